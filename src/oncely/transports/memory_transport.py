"""Queues in this process's memory: for tests, and for work that ends with the process."""

import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count

from oncely.core.binding import Binding
from oncely.core.destination import Destination, EventsOf, QueueNamed, destination_of, takes
from oncely.core.errors import PublishRefused
from oncely.core.message import Message
from oncely.core.verdicts import Ack, Refuse, Requeue, Settlement
from oncely.transports.transport import (
    Clock,
    Delivery,
    Features,
    Limits,
    dead_of,
    log_rejected,
    parted,
    too_large,
)

_log = logging.getLogger(__name__)

_numbers = count(1)
"""A message's number is its place in the order of publishing; none is given twice."""


@dataclass(slots=True)
class _InQueue:
    """A message that waits, or is held."""

    message: Message
    visible_at: float = -math.inf
    count: int = 0
    holder: object | None = None


class _Queue:
    """One queue. Whoever calls holds the server's lock."""

    def __init__(self, name: str) -> None:
        self.due_at = math.inf
        """When the next comes back: never later than that."""
        self.types: set[str] = set()
        """What it has subscribed to."""
        self._name = name
        self._ready: list[tuple[int, _InQueue]] = []
        self._later: dict[int, _InQueue] = {}

    def add(self, message: Message) -> None:
        heappush(self._ready, (next(_numbers), _InQueue(message)))

    def take(self, limit: int, holder: object, now: float, limits: Limits) -> list[Delivery]:
        self._bring_back(now)
        taken = []
        for _ in range(min(limit, len(self._ready))):
            number, kept = self._ready[0]
            kept.count += 1
            kept.holder = holder
            self._put_off(number, kept, now + limits.visibility_s)
            # Last: an interrupt before it loses nothing.
            heappop(self._ready)
            tag = (number, kept.count)
            problem = too_large(kept.message.body, limits.max_bytes)
            taken.append(Delivery(_own(kept.message), self._name, kept.count, tag, problem))
        return taken

    def settle(
        self, delivery: Delivery, holder: object, verdict: Settlement, dead: "_Queue"
    ) -> bool:
        """Whether it was still held, as it was delivered, by `holder`."""
        number, times = delivery.tag
        kept = self._later.get(number)
        if kept is None or kept.holder is not holder or kept.count != times:
            return False
        match verdict:
            case Ack():
                del self._later[number]
            case Requeue():
                self._make_ready(number, kept)
            case Refuse():
                dead.add(kept.message)
                del self._later[number]
        return True

    def give_back(self, holder: object) -> None:
        for number, kept in list(self._later.items()):
            if kept.holder is holder:
                self._make_ready(number, kept)

    def is_drained(self) -> bool:
        return not self._ready and not self._later

    def _bring_back(self, now: float) -> None:
        if now < self.due_at:
            return
        for number, kept in list(self._later.items()):
            if kept.visible_at <= now:
                self._make_ready(number, kept)
        self.due_at = min((kept.visible_at for kept in self._later.values()), default=math.inf)

    def _make_ready(self, number: int, kept: _InQueue) -> None:
        kept.holder = None
        heappush(self._ready, (number, kept))
        del self._later[number]

    def _put_off(self, number: int, kept: _InQueue, until: float) -> None:
        kept.visible_at = until
        self._later[number] = kept
        self.due_at = min(self.due_at, until)


class QueueServer:
    """Queues that the transports of one process share, behind a lock."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        # Whoever waits for messages waits for this.
        self.changed = threading.Condition()
        self._queues: dict[str, _Queue] = {}

    def queue(self, name: str) -> _Queue:
        """That of this name, made where it is missing."""
        return self._queues.setdefault(name, _Queue(name))

    def queues_of(self, destination: Destination) -> list[_Queue]:
        """Where messages for a destination come to."""
        match destination:
            case QueueNamed(name):
                return [self._queues[name]] if name in self._queues else []
            case EventsOf(type_):
                each = self._queues.values()
                return [q for q in each if any(takes(pattern, type_) for pattern in q.types)]
        return []

    def give_back(self, holder: object) -> None:
        for queue in self._queues.values():
            queue.give_back(holder)


_servers: dict[str, QueueServer] = defaultdict(QueueServer)


def server_named(name: str) -> QueueServer:
    """The one of that name in this process, for as long as the process lives."""
    return _servers[name]


class MemoryTransport:
    """A connection to a QueueServer."""

    def __init__(self, server: QueueServer, limits: Limits = Limits()) -> None:
        self.features = Features(ordered=True, counts_deliveries=True, **limits._asdict())
        self._limits = limits
        self._server = server
        # Another one after each close: what was received before it is not held any more.
        self._holder = object()

    def receive(self, queue: str, max_messages: int, wait_s: float) -> Sequence[Delivery]:
        until = time.monotonic() + wait_s
        holder = self._holder
        with self._server.changed:
            while self._holder is holder:
                kept, now = self._server.queue(queue), self._server.clock()
                taken = kept.take(max_messages, holder, now, self._limits)
                left_s = until - time.monotonic()
                if taken or left_s <= 0:
                    return taken
                self._server.changed.wait(min(left_s, kept.due_at - now))
        return []

    def settle(self, verdicts: Sequence[tuple[Delivery, Settlement]]) -> None:
        log_rejected(verdicts)
        with self._changing() as server:
            settled = [self._settle(server, *pair) for pair in verdicts]
        if not all(settled):
            _log.info("settled_too_late", extra={"count": settled.count(False)})

    def publish(
        self, destination: str, messages: Sequence[Message], *, create: bool = True
    ) -> None:
        target = destination_of(destination)
        with self._changing() as server:
            if create and isinstance(target, QueueNamed):
                server.queue(target.name)
            queues = server.queues_of(target)
            taken, refused = parted(messages, destination, queues, self._limits.max_bytes)
            for message in taken:
                for queue in queues:
                    queue.add(_own(message))
        if refused:
            raise PublishRefused(refused)

    def subscribe(self, queue: str, types: Sequence[str]) -> None:
        with self._server.changed:
            self._server.queue(queue).types.update(types)

    def unsubscribe(self, bindings: Collection[Binding]) -> None:
        with self._server.changed:
            for binding in bindings:
                self._server.queue(binding.queue).types.discard(binding.pattern)

    def bindings(self, queue: str) -> Sequence[Binding]:
        with self._server.changed:
            types = self._server.queue(queue).types
            return [Binding(queue, pattern=type_) for type_ in sorted(types)]

    def is_drained(self, queue: str) -> bool:
        with self._server.changed:
            return self._server.queue(queue).is_drained()

    def close(self) -> None:
        with self._changing() as server:
            server.give_back(self._holder)
            self._holder = object()

    def _settle(self, server: QueueServer, delivery: Delivery, verdict: Settlement) -> bool:
        dead = server.queue(dead_of(delivery.queue))
        return server.queue(delivery.queue).settle(delivery, self._holder, verdict, dead)

    @contextmanager
    def _changing(self) -> Iterator[QueueServer]:
        """With the lock; in the end those who wait look again."""
        with self._server.changed:
            try:
                yield self._server
            finally:
                self._server.changed.notify_all()


def _own(message: Message) -> Message:
    """A message that shares no part with this one which somebody could change."""
    return replace(message, headers=dict(message.headers), claim=None)
