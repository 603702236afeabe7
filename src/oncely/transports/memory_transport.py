"""Queues in this process's memory: for tests, and for work that ends with the process."""

import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count, islice

from oncely.core.errors import PublishRefused
from oncely.core.message import Message
from oncely.core.verdicts import Ack, DeadLetter, Delay, Requeue, Verdict
from oncely.transports.transport import Clock, DeadLettered, Delivery, Features, Limits, refusals

_log = logging.getLogger(__name__)

_numbers = count(1)
"""A message's number is its place in the order of publishing; none is given twice."""


@dataclass(slots=True)
class _Kept:
    """A message that waits, is delayed, or is held."""

    message: Message
    visible_at: float = -math.inf
    count: int = 0
    holder: object | None = None


class _Queue:
    """One queue. Whoever calls holds the server's lock."""

    def __init__(self, name: str) -> None:
        self.due_at = math.inf
        """When the next comes back: never later than that."""
        self._name = name
        self._ready: list[tuple[int, _Kept]] = []
        self._later: dict[int, _Kept] = {}
        self._dead: dict[int, DeadLettered] = {}

    def add(self, message: Message) -> None:
        heappush(self._ready, (next(_numbers), _Kept(message)))

    def take(self, limit: int, holder: object, now: float, visibility_s: float) -> list[Delivery]:
        self._bring_back(now)
        taken = []
        for _ in range(min(limit, len(self._ready))):
            number, kept = self._ready[0]
            kept.count += 1
            kept.holder = holder
            self._put_off(number, kept, now + visibility_s)
            # Last: an interrupt before it loses nothing.
            heappop(self._ready)
            tag = (number, kept.count)
            taken.append(Delivery(_own(kept.message), self._name, kept.count, tag))
        return taken

    def settle(self, delivery: Delivery, holder: object, verdict: Verdict, now: float) -> bool:
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
            case Delay(delay_s):
                kept.holder = None
                self._put_off(number, kept, now + delay_s)
            case DeadLetter(reason):
                letter = DeadLettered(kept.message, self._name, reason, kept.count, number)
                self._dead[number] = letter
                del self._later[number]
        return True

    def give_back(self, holder: object) -> None:
        for number, kept in list(self._later.items()):
            if kept.holder is holder:
                self._make_ready(number, kept)

    def is_drained(self) -> bool:
        return not self._ready and not self._later

    def dead_letters(self, limit: int) -> list[DeadLettered]:
        letters = islice(self._dead.values(), limit)
        return [replace(letter, message=_own(letter.message)) for letter in letters]

    def retry(self, letter: DeadLettered) -> bool:
        there = self._dead.pop(letter.tag, None)
        if there is not None:
            self.add(there.message)
        return there is not None

    def _bring_back(self, now: float) -> None:
        if now < self.due_at:
            return
        for number, kept in list(self._later.items()):
            if kept.visible_at <= now:
                self._make_ready(number, kept)
        self.due_at = min((kept.visible_at for kept in self._later.values()), default=math.inf)

    def _make_ready(self, number: int, kept: _Kept) -> None:
        kept.holder = None
        heappush(self._ready, (number, kept))
        del self._later[number]

    def _put_off(self, number: int, kept: _Kept, until: float) -> None:
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
        return self._queues.setdefault(name, _Queue(name))

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
        self.features = Features(
            delays=True, ordered=True, counts_deliveries=True, **limits._asdict()
        )
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
                taken = kept.take(max_messages, holder, now, self._limits.visibility_s)
                left_s = until - time.monotonic()
                if taken or left_s <= 0:
                    return taken
                self._server.changed.wait(min(left_s, kept.due_at - now))
        return []

    def settle(self, verdicts: Sequence[tuple[Delivery, Verdict]]) -> None:
        with self._changing() as server:
            now = server.clock()
            settled = [
                server.queue(delivery.queue).settle(delivery, self._holder, verdict, now)
                for delivery, verdict in verdicts
            ]
        if not all(settled):
            _log.info("settled_too_late", extra={"count": settled.count(False)})

    def publish(self, queue: str, messages: Sequence[Message]) -> None:
        refused = refusals(messages, self._limits.max_bytes)
        with self._changing() as server:
            for place, message in enumerate(messages):
                if place not in refused:
                    server.queue(queue).add(_own(message))
        if refused:
            raise PublishRefused(refused)

    def subscribe(self, queue: str, types: Sequence[str]) -> None:
        pass  # Whoever publishes names the queue.

    def is_drained(self, queue: str) -> bool:
        with self._server.changed:
            return self._server.queue(queue).is_drained()

    def dead_letters(self, queue: str, limit: int = 100) -> Sequence[DeadLettered]:
        with self._server.changed:
            return self._server.queue(queue).dead_letters(limit)

    def retry(self, letters: Sequence[DeadLettered]) -> int:
        with self._changing() as server:
            return sum([server.queue(letter.queue).retry(letter) for letter in letters])

    def close(self) -> None:
        with self._changing() as server:
            server.give_back(self._holder)
            self._holder = object()

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
