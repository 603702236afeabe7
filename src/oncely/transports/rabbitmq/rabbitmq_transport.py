"""A RabbitMQ broker as a Transport."""

import logging
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import NamedTuple
from uuid import uuid4

from pika.connection import Parameters

from oncely.core.errors import BrokerRefused, MessageError, PublishRefused, TransportError
from oncely.core.message import Message
from oncely.core.verdicts import DeadLetter, Delay, Requeue, Verdict
from oncely.transports.rabbitmq.arrivals import Arrivals
from oncely.transports.rabbitmq.browsing import Browser
from oncely.transports.rabbitmq.connection import Line, Lost
from oncely.transports.rabbitmq.connections import Session
from oncely.transports.rabbitmq.intake import Intake, Terms
from oncely.transports.rabbitmq.messages import (
    Content,
    Letter,
    anew,
    content_of,
    dead,
    delayed,
    letter_of,
    message_of,
)
from oncely.transports.rabbitmq.publishing import NOT_STORED
from oncely.transports.rabbitmq.topology import Queue, Topology, declare, subscribe, waiting
from oncely.transports.transport import DeadLettered, Delivery, Features, refusals

_log = logging.getLogger(__name__)

_PAUSE_S = 0.2
"""After a failure that was not the connection's, before the next try to receive."""
_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Before each next try to publish what was not stored."""


class RabbitSettings(NamedTuple):
    """What the URL of a RabbitMQ transport may set."""

    prefetch: int = 6_000
    queue_type: str = "quorum"
    exchange: str = "oncely"
    max_bytes: int = 1 << 20
    confirm_timeout_s: float = 30.0


class RabbitmqTransport:
    """Queues on a RabbitMQ broker."""

    def __init__(self, parameters: Parameters, settings: RabbitSettings = RabbitSettings()) -> None:
        self.features = Features(
            delays=True,
            ordered=True,
            counts_deliveries=settings.queue_type == "quorum",
            max_bytes=settings.max_bytes,
            visibility_s=None,
        )
        self._parameters = parameters
        self._settings = settings
        self._topology = Topology(settings.queue_type)
        self._session = self._new_session()

    def receive(self, queue: str, max_messages: int, wait_s: float) -> Sequence[Delivery]:
        until = time.monotonic() + wait_s
        session = self._own()
        while not session.closed.is_set():
            try:
                inbox = session.inbox(queue, max_messages, until)
                self._pass_on(inbox)
                taken = inbox.take(max_messages, until)
            except TransportError:
                if session.closed.is_set():
                    break
                if time.monotonic() >= until:
                    raise
                session.closed.wait(min(_PAUSE_S, until - time.monotonic()))
                continue
            if taken or time.monotonic() >= until:
                return taken
        return []

    def settle(self, verdicts: Sequence[tuple[Delivery, Verdict]]) -> None:
        session = self._own()
        late = 0
        failure: Lost | None = None
        by_intake: dict[Intake, list[tuple[Delivery, Verdict]]] = defaultdict(list)
        for delivery, verdict in verdicts:
            by_intake[delivery.tag.intake].append((delivery, verdict))
        for intake, pairs in by_intake.items():
            try:
                late += self._settle(intake, pairs) if session.has(intake) else len(pairs)
            except (TransportError, BrokerRefused) as error:
                # The others may yet be settled.
                failure = error
        if late:
            _log.info("settled_too_late", extra={"count": late})
        if failure is not None:
            raise failure

    def publish(self, queue: str, messages: Sequence[Message]) -> None:
        refused = dict(refusals(messages, self._settings.max_bytes))
        contents = {}
        for place, message in enumerate(messages):
            try:
                if place not in refused:
                    contents[place] = content_of(message)
            except MessageError as error:
                refused[place] = str(error)
        if contents:
            by_broker = self._publish(self._topology.main(queue), list(contents.values()))
            places = list(contents)
            refused |= {places[place]: reason for place, reason in by_broker.items()}
        if refused:
            raise PublishRefused(dict(sorted(refused.items())))

    def subscribe(self, queue: str, types: Sequence[str]) -> None:
        line = self._own().consuming.line()
        declare(line, self._topology.main(queue))
        subscribe(line, queue, self._settings.exchange, types)

    def is_drained(self, queue: str) -> bool:
        session = self._own()
        line = session.consuming.line()
        if session.holds_any(queue):
            return False
        # First the queue: what leaves it may be delayed then.
        made_of = (self._topology.main(queue), *self._topology.delays(queue))
        if any(waiting(line, each.name) for each in made_of):
            return False
        # What the broker counts is late at times; to get none is a sure sign.
        if any(_first_of(line, each.name) for each in made_of):
            return False
        # It may have been on its way to us while we asked.
        return not session.holds_any(queue)

    def dead_letters(self, queue: str, limit: int = 100) -> Sequence[DeadLettered]:
        with closing(Browser(self._own().consuming.line())) as browser:
            dead_queue = self._topology.dead(queue).name
            found = [content for _, content in islice(browser.messages(dead_queue), limit)]
        return [_dead_lettered(content, letter_of(content, queue)) for content in found]

    def retry(self, letters: Sequence[DeadLettered]) -> int:
        by_queue: dict[str, set[str]] = defaultdict(set)
        for letter in letters:
            by_queue[letter.queue].add(letter.tag)
        return sum(self._retry(queue, ids) for queue, ids in by_queue.items())

    def close(self) -> None:
        session = self._own()
        self._session = self._new_session()
        session.close()

    def _new_session(self) -> Session:
        return Session(
            self._parameters,
            self._settings.confirm_timeout_s,
            self._topology,
            Terms(self._settings.prefetch, self.features.counts_deliveries),
        )

    def _own(self) -> Session:
        if self._session.pid != os.getpid():
            # A forked child: the connections, and the deliveries, are the parent's.
            self._session = self._new_session()
        return self._session

    def _pass_on(self, inbox: Arrivals) -> None:
        for intake, pairs in inbox.passed_on():
            try:
                self._settle(intake, pairs)
            except (TransportError, BrokerRefused):
                # They are nowhere but here, where nobody is given them.
                intake.settle([(_number(delivery), Requeue()) for delivery, _ in pairs])
                raise

    def _settle(self, intake: Intake, pairs: Sequence[tuple[Delivery, Verdict]]) -> int:
        """Settle what one intake has delivered; return how many come too late."""
        late, moved = intake.settle([(_number(delivery), verdict) for delivery, verdict in pairs])
        if moved:
            late += self._move(intake, moved, pairs)
        return late

    def _move(
        self, intake: Intake, moved: set[int], pairs: Sequence[tuple[Delivery, Verdict]]
    ) -> int:
        """Publish where it belongs what is delayed or dead, and only then acknowledge it."""
        by_queue: dict[str, tuple[Queue, list[Content]]] = {}
        left = set(moved)
        for delivery, verdict in pairs:
            if (number := _number(delivery)) in left:
                left.discard(number)
                queue, content = self._moved(delivery, verdict)
                by_queue.setdefault(queue.name, (queue, []))[1].append(content)
        is_published = False
        try:
            for queue, contents in by_queue.values():
                self._store(queue, contents)
            is_published = True
        finally:
            late = intake.leave(moved, is_published=is_published)
        return late

    def _moved(self, delivery: Delivery, verdict: Verdict) -> tuple[Queue, Content]:
        content = delivery.tag.content
        match verdict:
            case Delay(delay_s):
                queue = self._topology.delay(delivery.queue, delay_s)
                return queue, delayed(content, delivery.count, delay_s)
            case DeadLetter(reason):
                letter = Letter(uuid4().hex, delivery.queue, reason, delivery.count)
                return self._topology.dead(delivery.queue), dead(content, letter)
        raise AssertionError(verdict)

    def _publish(self, queue: Queue, contents: Sequence[Content]) -> Mapping[int, str]:
        """Declare a queue and publish to it; which the broker does not take, by place, and why."""
        publisher = self._own().publisher()
        declare(publisher.line, queue)
        refused = publisher.publish(queue.name, contents)
        for pause_s in _PAUSES_S:
            # A quorum queue takes nothing for a moment while it starts, or has no leader.
            again_ = [place for place, reason in refused.items() if reason == NOT_STORED]
            if not again_:
                break
            time.sleep(pause_s)
            still = publisher.publish(queue.name, [contents[n] for n in again_])
            refused = {n: refused[n] for n in refused if n not in again_}
            refused |= {again_[n]: reason for n, reason in still.items()}
        return refused

    def _store(self, queue: Queue, contents: Sequence[Content]) -> None:
        """Publish what the broker has taken once before. Raises TransportError when it does not
        take all of it again.
        """
        if refused := self._publish(queue, contents):
            raise TransportError(f"RabbitMQ: {queue.name!r}: {PublishRefused(refused)}")

    def _retry(self, queue: str, ids: set[str]) -> int:
        found = []
        with closing(Browser(self._own().consuming.line())) as browser:
            for number, content in browser.messages(self._topology.dead(queue).name):
                if (id_ := letter_of(content, queue).id) in ids:
                    ids.discard(id_)
                    found.append((number, anew(content)))
                if not ids:
                    break
            if found:
                self._store(self._topology.main(queue), [content for _, content in found])
                browser.acknowledge([number for number, _ in found])
        return len(found)


def _number(delivery: Delivery) -> int:
    return int(delivery.tag.number)


def _first_of(line: Line, queue: str) -> bool:
    """Whether anything can be got out of a queue."""
    with closing(Browser(line)) as browser:
        return next(browser.messages(queue), None) is not None


def _dead_lettered(content: Content, letter: Letter) -> DeadLettered:
    return DeadLettered(message_of(*content), letter.queue, letter.reason, letter.times, letter.id)
