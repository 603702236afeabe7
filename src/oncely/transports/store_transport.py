"""Queues in a ledger's store, in its table of waiting messages: in a database, or in memory."""

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from oncely._util.clock import monotonic
from oncely._util.forking import afresh_in_children
from oncely.core.destination import EventsOf, ExchangeNamed, QueueNamed, destination_of, takes
from oncely.core.errors import (
    BrokerRefused,
    ConfigError,
    ContentionError,
    MessageError,
    PublishRefused,
    StoreDenied,
    StoreError,
    StoreUnavailable,
    TransportError,
)
from oncely.core.message import Message
from oncely.core.verdicts import Ack, Acknowledgement, Reject, Requeue
from oncely.core.waiting import QueuedRow, WaitingMessage, name_of, queue_named
from oncely.stores.memory_store import MemoryStore
from oncely.stores.refusing import refused_of
from oncely.stores.store import PutBack, Transaction
from oncely.transports.transport import (
    Delivery,
    Features,
    Limits,
    contents_of,
    dead_of,
    log_late,
    log_rejected,
    too_large,
)

if TYPE_CHECKING:
    from oncely.stores.sql.sql_store import SqlStore


_CLOSING_S = 5.0
"""How long `close` waits for calls in other threads, which may wait for the database."""


class StoreTransport:
    """A connection to the queues among the waiting messages of a store."""

    def __init__(self, store: "SqlStore | MemoryStore", limits: Limits = Limits()) -> None:
        self.features = Features(ordered=True, counts_deliveries=True, **limits._asdict())
        self._limits = limits
        self._store = store
        self._is_migrated = False
        self._made: set[str] = set()
        """Queues that are known to exist."""
        self.start_afresh()
        afresh_in_children(self)

    def start_afresh(self) -> None:
        """Leave deliveries to the parent: called in a forked child."""
        self._lock = threading.Condition()
        self._calls = 0
        """How many calls are running."""
        self._held: dict[int, WaitingMessage] = {}
        """The messages received since the transport was opened, until acknowledged, by number."""
        # A new object after each close.
        self._opening = object()
        self._looked: dict[str, tuple[int, float]] = defaultdict(lambda: (-1, 0.0))
        """For a queue that was found empty: the last notification, and when to look without one."""

    def receive(self, queue: str, max_messages: int, wait_s: float) -> Sequence[Delivery]:
        until = monotonic() + wait_s
        opening, notifications = self._opening, self._store.notifications
        with self._calling():
            self._make(queue)
            while True:
                count = notifications.signal.count
                if self._opening is not opening:
                    return []
                taken = self._look(queue, max_messages, count, opening)
                left_s = until - monotonic()
                if taken or left_s <= 0:
                    break
                notifications.wait(count, min(left_s, self._looked[queue][1] - monotonic()))
        deliveries = []
        for row in taken:
            problem = too_large(row.message.body, self._limits.max_bytes)
            tag = QueuedRow(row, self._store.database_id)
            # A copy: a handler may change the headers of its message, but not of the row.
            message = replace(row.message, headers=dict(row.message.headers))
            is_again = row.attempts > 1
            deliveries.append(Delivery(message, queue, row.attempts, tag, problem, is_again))
        return deliveries

    def _look(
        self, queue: str, limit: int, count: int, opening: object
    ) -> Sequence[WaitingMessage]:
        """The messages that can be taken now. After an empty look, it waits before the next one."""
        (seen, look_at), now = self._looked[queue], monotonic()
        if count == seen and now < look_at:
            return []
        # A read first: a waiting receiver must not block those that write.
        name, hold_s = queue_named(queue), self._limits.visibility_s
        free_in_s = self._store.free_in_s(name)
        taken: Sequence[WaitingMessage] = ()
        if free_in_s == 0:
            taken = self._store.transaction(
                lambda transaction: transaction.take(
                    name, limit, hold_s, one_per_lane=True, counts=True
                )
            )
        if not taken:
            look_s = self._store.notifications.poll_s
            self._looked[queue] = count, now + min(look_s, free_in_s or look_s)
        with self._lock:
            if self._opening is opening:
                self._held.update((row.number or 0, row) for row in taken)
                return taken
        self._acknowledge([(row, Requeue()) for row in taken])
        return ()

    def acknowledge(self, verdicts: Sequence[tuple[Delivery, Acknowledgement]]) -> None:
        log_rejected(verdicts)
        asked = [(d.tag.row, verdict) for d, verdict in verdicts if not d.tag.is_over]
        # If a delivery is acknowledged twice, the first time counts.
        first = {(row.number, row.attempts): (row, verdict) for row, verdict in reversed(asked)}
        with self._calling():
            for delivery, verdict in verdicts:
                if isinstance(verdict, Reject) and _can_be_named(dead_of(delivery.queue)):
                    self._make(dead_of(delivery.queue))
            done = self._acknowledge([*first.values()]) if first else 0
        with self._lock:
            for delivery, _ in verdicts:
                number = delivery.tag.row.number
                if self._held.get(number) is delivery.tag.row:
                    del self._held[number]
        if done < len(asked):
            log_late(len(asked) - done)

    def _acknowledge(self, verdicts: Sequence[tuple[WaitingMessage, Acknowledgement]]) -> int:
        """Acknowledge; return how many deliveries were still held."""
        acked = [row for row, verdict in verdicts if isinstance(verdict, Ack)]
        others = [(row, verdict) for row, verdict in verdicts if not isinstance(verdict, Ack)]

        def work(transaction: Transaction) -> int:
            done = len(transaction.remove_held(acked)) if acked else 0
            held = transaction.held([row for row, _ in others]) if others else ()
            still = [(row, verdict) for row, verdict in others if row.number in held]
            if back := [row for row, verdict in still if isinstance(verdict, Requeue)]:
                transaction.put_back([PutBack(row, None, 0.0, is_try=False) for row in back])
            for row, verdict in still:
                if isinstance(verdict, Reject):
                    dead = dead_of(name_of(row.queue))
                    if _can_be_named(dead):
                        transaction.free([row.moved(dead)])
                    else:
                        transaction.put_back([PutBack(row, verdict.reason, None, is_try=False)])
            return done + len(still)

        return self._store.transaction(work)

    def publish(
        self, destination: str, messages: Sequence[Message], *, create: bool = True
    ) -> None:
        target = destination_of(destination)
        with self._calling():
            queues: Sequence[str] = []
            match target:
                case QueueNamed(name):
                    if create:
                        self._make(name)
                    queues = [name] if create or self._is_there(name) else []
                case EventsOf(type_):
                    bindings = self._store.bindings()
                    queues = sorted(
                        {name for name, topic in bindings if topic and takes(topic, type_)}
                    )
            if queues:
                limit = self._limits.max_bytes
                fit, refused = contents_of(messages, target, limit, lambda message: message)
                errors = refused_of(partial(self._put, queues), [*fit.values()])
                if errors and len(errors) == len(fit):
                    # It may be a fault of the database.
                    raise errors[0]
                indexes = [*fit]
                refused |= {indexes[n]: str(error) for n, error in errors.items()}
            else:
                is_exchange = isinstance(target, ExchangeNamed)
                no = "there are no exchanges here" if is_exchange else "no queue takes it"
                refused = dict.fromkeys(range(len(messages)), f"{destination!r}: {no}")
        if refused:
            raise PublishRefused(dict(sorted(refused.items())))

    def _put(self, queues: Sequence[str], messages: Sequence[Message]) -> None:
        if messages and len(queues) == 1:
            self._store.put(queues[0], messages)
        elif messages:
            # Into all queues, or none.
            rows = [row for name in queues for row in WaitingMessage.queued(name, messages)]
            self._store.transaction(lambda transaction: transaction.keep(rows))

    def subscribe(self, queue: str, types: Sequence[str], *, alone: bool = False) -> None:  # noqa: ARG002 - what is held has its own time here.
        with self._calling():
            self._make(queue)
            self._store.bind(queue, types)

    def is_drained(self, queue: str) -> bool:
        with self._calling():
            return self._store.free_in_s(queue_named(queue)) is None

    def close(self) -> None:
        with self._lock:
            self._opening = object()
            held, self._held = [*self._held.values()], {}
            # Receivers that wait in other threads see that it is closed.
            self._store.notifications.signal.send()
            self._lock.wait_for(lambda: self._calls == 0, _CLOSING_S)
            try:
                with _told():
                    if held:
                        self._acknowledge([(row, Requeue()) for row in held])
            finally:
                self._store.close()

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Keep the store open while a call uses it."""
        with self._lock:
            self._calls += 1
        try:
            with _told():
                if not self._is_migrated:
                    # The tables are created; those of an older ledger are upgraded.
                    try:
                        self._store.bindings("")
                    except (StoreUnavailable, ContentionError, StoreDenied):
                        raise
                    except StoreError:
                        self._store.migrate()
                    self._is_migrated = True
                yield
        finally:
            with self._lock:
                self._calls -= 1
                self._lock.notify_all()

    def _make(self, queue: str) -> None:
        if not self._is_there(queue):
            queue_named(queue)
            self._store.bind(queue, [""])
            self._made.add(queue)

    def _is_there(self, queue: str) -> bool:
        if queue not in self._made and self._store.bindings(queue):
            self._made.add(queue)
        return queue in self._made


def _can_be_named(queue: str) -> bool:
    try:
        queue_named(queue)
    except MessageError:
        return False
    return True


@contextmanager
def _told() -> Iterator[None]:
    """Raise a transport's errors instead of a store's."""
    try:
        yield
    except StoreDenied as error:
        raise BrokerRefused(str(error)) from error
    except StoreError as error:
        raise TransportError(str(error)) from error
    except MessageError as error:
        raise ConfigError(f"{error}; write a shorter name") from error
