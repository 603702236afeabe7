"""Where a consumer's messages come from: its queue at the broker, and the ledger."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from oncely._util.clock import monotonic
from oncely._util.outage import Outage
from oncely.consumer.health import BrokerOutage
from oncely.consumer.report import ConsumerReport
from oncely.consumer.settings import ConsumerSettings
from oncely.consumer.turn import DeliveryTurn
from oncely.core.commands import Company
from oncely.core.errors import MessageError, StoreDenied, StoreError, TransportError
from oncely.core.ids import fingerprint_of
from oncely.core.message import check_message
from oncely.core.turn import GIVEN_BACK, Turn, after_unknown
from oncely.core.verdicts import Counted, DeadLetter, Delay
from oncely.core.waiting import WaitingMessage
from oncely.ledger.mailbox import LedgerMailbox
from oncely.lifecycle.results import Serializer
from oncely.lifecycle.retry_queue import RetryQueue, settle_taken
from oncely.transports.transport import Delivery, Transport

T = TypeVar("T", bound=Turn)

_AWAY_S = 1.0
"""How long to rest when the broker cannot be reached."""
_LOOK_S = 0.5
"""How often to look for messages that other workers have stored for a retry."""
_MOST_UNKNOWN = 10_000
"""Messages of unknown types whose first delivery is remembered; the oldest are forgotten."""


class UnhandledError(MessageError):
    """No handler takes a message of that type."""


@dataclass(eq=False)
class DueRetries:
    """The messages of a queue in the ledger that are due: no other worker is given a message that
    was taken for `hold_s`. If this process dies, the message is available again after that time.
    """

    _mailbox: LedgerMailbox
    _queue: RetryQueue
    _hold_s: float
    _outage: Outage
    _look_at: float = 0.0
    """`clock.monotonic()` at which the next message may be due."""
    _expected: deque[float] = field(default_factory=deque)
    """Earlier times at which one may be due, as the thread that stores has found out."""
    _are_due: bool = False
    _yields: bool = False
    """Whether to leave the next due messages to other workers: some may be of a type that no
    handler here takes."""

    def are_due(self) -> bool:
        """Whether messages are due, as far as is known; asks the ledger when it is time to."""
        while self._expected:
            self._look_at = min(self._look_at, self._expected.popleft())
        return self._are_due if monotonic() < self._look_at else self.look()

    def look(self) -> bool:
        """Ask the ledger whether messages are due."""
        free_in_s = None
        with self._noted("looks"):
            free_in_s = self._mailbox.free_in_s(self._queue.name)
        self._look_at = monotonic() + min(free_in_s or _LOOK_S, _LOOK_S)
        self._are_due = free_in_s == 0
        if self._are_due and self._yields:
            # Once: each other worker has looked before this one looks again. All look at the moment
            # when a message is due, and the one that put it back looks a little before the others.
            self._are_due = self._yields = False
        return self._are_due

    def take(self, most: int) -> Sequence[WaitingMessage]:
        """At most so many messages that are due."""
        taken: Sequence[WaitingMessage] = ()
        with self._noted("takes"):
            taken = self._mailbox.take(most, self._hold_s, queue=self._queue.name)
        # A message that can be taken may stand behind one that cannot.
        self._are_due = len(taken) == most
        return taken

    def acknowledge(self, turns: Sequence[Turn]) -> None:
        """Tell the ledger how the taken messages have ended, if it does not know yet. Raises
        StoreError.
        """
        settle_taken(self._mailbox, turns)

    def expect(self, turns: Sequence[DeliveryTurn]) -> None:
        """Note when these messages, or those behind them, may be due again."""
        for turn in turns:
            verdict = None if turn.ending is None else turn.ending.verdict
            if isinstance(verdict, Delay):
                self._expected.append(monotonic() + verdict.delay_s)
                # A message that waits behind another of its order has no delay; this one is of a
                # type that no handler here takes.
                self._yields |= turn.waits and verdict.delay_s > 0
            elif turn.taken is not None and self._queue.lane_of(turn.message) is not None:
                self._expected.append(monotonic())

    def behind(self, turns: Sequence[T]) -> Sequence[T] | None:
        """Those of these turns before which a message of their order waits; None if the ledger
        cannot tell.
        """
        lanes = {turn: lane for turn in turns if (lane := self._queue.lane_of(turn.message))}
        if not lanes:
            return []
        found: list[set[str]] = []
        with self._noted("lanes"):
            found.append(self._mailbox.lanes(self._queue.name, {*lanes.values()}))
        return [turn for turn, lane in lanes.items() if lane in found[0]] if found else None

    def are_none(self) -> bool:
        """Whether no message waits, due or not. False if the ledger cannot tell."""
        try:
            return self._mailbox.free_in_s(self._queue.name) is None
        except StoreError:
            return False

    @contextmanager
    def _noted(self, by: str) -> Iterator[None]:
        """Note an error of the store, which is tried again. Raises StoreDenied, which would come
        again and again.
        """
        try:
            yield
        except StoreDenied:
            raise
        except StoreError as error:
            self._outage.met(error, by)
        else:
            self._outage.over(by)


@dataclass(eq=False)
class DeliverySource:
    """The deliveries of a queue, and before them the `retries` that are due. Counts what it gives
    in `report`. While the broker is away, it rests, unless `stop` is set.
    """

    _settings: ConsumerSettings
    _transport: Transport
    _retries: DueRetries | None
    _report: ConsumerReport
    _broker: BrokerOutage
    _stop: threading.Event
    _drains: bool
    _unknown: dict[str, float] = field(default_factory=dict)
    """When this process has first seen messages of types that no handler here takes."""

    def __post_init__(self) -> None:
        self._serializers: dict[int, Serializer] = {}
        """Of each handler, by its id, since it may not be hashable; empty if no result is kept."""
        lifecycle = self._settings.lifecycle
        if lifecycle is not None and lifecycle.keeps_result:
            handlers = self._settings.routes.all
            self._serializers = {id(each): lifecycle.serializer_of(each) for each in handlers}

    def take(self, room: int, free: int, wait_s: float) -> Sequence[DeliveryTurn]:
        """As in Source: until a handler is free, another worker may take retries that are due."""
        queue, deliveries = self._settings.queue, list[Delivery]()
        if self._retries is not None and self._retries.are_due():
            if (most := min(room, free)) <= 0:
                return []
            taken = self._retries.take(most)
            deliveries += [Delivery(each.message, queue, each.attempts + 1, each) for each in taken]
        if room > len(deliveries):
            wait_s = 0.0 if deliveries else wait_s
            try:
                deliveries += self._transport.receive(queue, room - len(deliveries), wait_s)
            except TransportError as error:
                # The broker was there when the consumer subscribed, and will be there again.
                self._broker.met(error)
                self._stop.wait(_AWAY_S)
            else:
                self._broker.over()
        turns = []
        for delivery in deliveries:
            turn = DeliveryTurn(delivery, self._settings.routes.of(delivery.message.type))
            self._prepare(turn)
            turns.append(turn)
        self._report.received += len(turns)
        return turns

    def renew(self, turn: DeliveryTurn) -> None:
        ended_as = turn.ending and turn.ending.counted
        was_tried = ended_as in (Counted.RETRIED, Counted.IN_DOUBT)
        turn.deliveries += was_tried
        self._report.received += was_tried
        turn.begins_anew()
        if turn.handler is None:
            turn.ended_as(GIVEN_BACK)
        else:
            self._prepare(turn)

    def is_empty(self) -> bool:
        # Asked again after the broker: another worker may have kept a message in the ledger
        # meanwhile, and acknowledged it.
        return self._are_no_retries() and self._is_drained() and self._are_no_retries()

    def _are_no_retries(self) -> bool:
        return self._retries is None or self._retries.are_none()

    def _is_drained(self) -> bool:
        try:
            return self._transport.is_drained(self._settings.queue)
        except TransportError as error:
            self._broker.met(error)
            return False

    def _prepare(self, turn: DeliveryTurn) -> None:
        """Find out what is known of a message before it is claimed; an invalid one is refused."""
        message, lifecycle = turn.message, self._settings.lifecycle
        try:
            if turn.delivery.problem is not None:
                raise MessageError(turn.delivery.problem)
            if lifecycle is not None:
                # Other handlers begin only when their claims are committed.
                has_no_trace = self._settings.begins is not None and turn.delivery.is_again
                turn.company = Company.AGAIN if has_no_trace else Company.WINDOW
                check_message(message, needs_id=False)
                turn.fingerprint = fingerprint_of(message.body)
                if self._settings.metadata_of is not None:
                    try:
                        turn.metadata = self._settings.metadata_of(message)
                    except Exception as error:
                        told = f"the function for its metadata failed: {error!r}"
                        raise MessageError(told) from error
                turn.key = lifecycle.key_of(turn)
            if self._serializers and turn.handler is not None:
                turn.serializer = self._serializers[id(turn.handler)]
            if turn.handler is None:
                self._wait_for_a_handler(turn)
            elif lifecycle is None:
                turn.runs_untracked()
        except MessageError as error:
            turn.refused(error)

    def _wait_for_a_handler(self, turn: DeliveryTurn) -> None:
        """Let a message wait whose type no handler here takes: another worker may take it. Raises
        UnhandledError when it has waited for long.
        """
        error = UnhandledError(f"nothing here takes messages of the type {turn.message.type!r}")
        now = monotonic()
        while len(self._unknown) > _MOST_UNKNOWN:
            del self._unknown[next(iter(self._unknown))]
        waited_s = now - self._unknown.setdefault(turn.message.id, now)
        if turn.taken is not None:
            waited_s = (turn.taken.due or 0.0) - (turn.taken.since or 0.0)
        ending = after_unknown(self._settings.policy, error, waited_s, drains=self._drains)
        if isinstance(ending.verdict, DeadLetter):
            raise error
        turn.ended_as(ending)
        turn.waits = self._retries is not None
