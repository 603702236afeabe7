"""Receiving a queue as a member of its consumer group, and committing what is acknowledged."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka import Message as Arrived

from oncely._util.clock import monotonic
from oncely.core.destination import topic_expression
from oncely.core.errors import TransportError
from oncely.core.verdicts import Acknowledgement, Requeue
from oncely.transports.kafka.records import Record, message_of, received
from oncely.transports.kafka.url_options import KafkaSettings
from oncely.transports.transport import Delivery

_POLL_S = 0.1
_PATIENCE_S = 1.0
"""How long it does not poll, and so holds up the group's rebalances, where there is no room."""
_CLOSING_S = 20.0
"""How long a cluster that is away holds up `close`."""
_HELD_BYTES = 1 << 27
"""How many bytes of values it holds; librdkafka has fetched as many again ahead."""


@dataclass(slots=True, eq=False)
class Tag:
    """Identifies a delivery. A record that is requeued gets another one."""

    place: TopicPartition
    offset: int
    record: Record

    @property
    def bytes(self) -> int:
        """The size of its value."""
        return len(self.record.value or b"")


class Intake:
    """A member of a consumer group, and its unacknowledged deliveries.

    A record arrives in `_poll` and is held; `take` hands it out; `acknowledge` lets it go, which
    may move the mark of its partition: the offset before which all is acknowledged. `_store` gives
    the marks to librdkafka, which commits them every second, and before a partition is given up. A
    partition that is taken away takes its deliveries with it: verdicts about them are late.

    A thread of its own polls at all times, since a member that does not poll loses its partitions,
    and a handler may take longer. The lock of `_changed` protects all that deliveries are known by.
    """

    def __init__(
        self, queue: str, topics: set[str], settings: KafkaSettings, reach: Callable[[], object]
    ) -> None:
        """`reach` raises TransportError while the cluster is away."""
        self.is_over = False
        """Whether it has ended, and said why."""
        self._queue, self._settings, self._reach = queue, settings, reach
        group = {"group.id": f"oncely-{queue}", "error_cb": self._on_error}
        self._client = Consumer({**group, **settings.client})
        """From now on only its own thread calls it: others would wait until that does not poll."""
        self._changed = threading.Condition()
        self._held: dict[TopicPartition, dict[int, Tag]] = {}
        """The unacknowledged deliveries of each partition that is ours, by their offsets."""
        self._held_bytes = 0
        self._ends: dict[TopicPartition, int] = {}
        """The offset after the last that has arrived."""
        self._arrivals: deque[Delivery] = deque()
        """Those that have not been taken; they are held, too."""
        self._is_closing = False
        self._is_paused: bool | None = None
        """None after a rebalance: what was paused before may still be."""
        self._may_be_away = False
        """Whether librdkafka has met an error. It tries again, and never tells of success."""
        self._error: TransportError | None = None
        """Why it has ended."""
        expressions = [topic_expression(each) for each in topics]
        self._client.subscribe(expressions, on_assign=self._on_assign, on_revoke=self._on_revoke)
        self._thread = threading.Thread(target=self._run, name=f"oncely-kafka-{queue}", daemon=True)
        self._thread.start()

    def take(self, limit: int, until: float) -> Sequence[Delivery]:
        """The deliveries that have arrived, at most so many; waits until that moment for the first.
        Empty if the intake is closed. Raises TransportError if nothing arrives for a reason.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._arrivals or self._is_closing or self._error, until - monotonic()
            )
            taken = [self._arrivals.popleft() for _ in range(min(limit, len(self._arrivals)))]
        if not (taken or self._is_closing):
            if self._error is not None:
                self.is_over = True
                raise self._error
            if self._may_be_away:
                self._reach()
                self._may_be_away = False
        return taken

    def held(self, tags: Iterable[Tag]) -> Sequence[Tag]:
        """Those that are not acknowledged, and whose partition is still ours."""
        return [tag for tag in tags if self._held.get(tag.place, {}).get(tag.offset) is tag]

    def acknowledge(self, verdicts: Mapping[Tag, Acknowledgement]) -> int:
        """Let go of each delivery that is held, or deliver it again; return how many were held."""
        again: list[Delivery] = []
        with self._changed:
            held = self.held(verdicts)
            for tag in held:
                if isinstance(verdicts[tag], Requeue):
                    again.append(self._hold(tag.place, tag.offset, tag.record))
                else:
                    self._held_bytes -= self._held[tag.place].pop(tag.offset).bytes
            self._arrivals.extendleft(reversed(again))
            self._changed.notify_all()
        return len(held)

    def marks(self) -> Mapping[TopicPartition, int]:
        """Of each partition that is ours, the offset before which all is acknowledged."""
        with self._changed:
            return {place: next(iter(self._held[place]), end) for place, end in self._ends.items()}

    def close(self) -> None:
        """Commit, and leave the group; what is not acknowledged is redelivered."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(_CLOSING_S)

    # ---- In its thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._poll()
                self._store()
        except KafkaException as error:
            # Another member may have this one's name, say: a new one may fare better.
            self._error = TransportError(f"Kafka: {error.args[0].str()}")
        finally:
            self._error = self._error or TransportError("Kafka: the thread that polls has ended")
            with suppress(KafkaException):
                self._client.close()
            self._forget([*self._held])

    def _poll(self) -> None:
        """Let records arrive, unless so many or such large ones are held that there is no room."""
        room, half = self._room(), self._settings.prefetch / 2
        if room <= 0 and not self._is_paused:
            # A pause throws away what was fetched ahead: it is for handlers that are slow.
            with self._changed:
                if self._changed.wait_for(
                    lambda: self._room() >= half or self._is_closing, _PATIENCE_S
                ):
                    return
        # Not resumed for each message that makes room: what was fetched ahead is fetched again.
        is_full = room < half if self._is_paused else room <= 0
        if is_full is not self._is_paused:
            (self._client.pause if is_full else self._client.resume)(self._client.assignment())
            self._is_paused = is_full
        first = self._client.poll(0 if is_full else _POLL_S)
        if first is not None:
            # `consume` would wait for all that it is asked for.
            self._arrive([first, *self._client.consume(max(0, int(room) - 1), 0)])
        elif is_full:
            with self._changed:
                if self._room() < half:
                    self._changed.wait(_POLL_S)

    def _arrive(self, records: Sequence[Arrived]) -> None:
        with self._changed:
            for record in records:
                error, offset = record.error(), record.offset() or 0
                place = TopicPartition(record.topic() or "", record.partition() or 0)
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    self._on_error(error)
                elif place in self._held:
                    if error is None:
                        self._arrivals.append(self._hold(place, offset, received(record)))
                        self._held_bytes += self._held[place][offset].bytes
                    # What is before an end is not for consumers: the ends of transactions, say.
                    self._ends[place] = offset + (error is None)
            self._changed.notify_all()

    def _hold(self, place: TopicPartition, offset: int, record: Record) -> Delivery:
        self._held[place][offset] = tag = Tag(place, offset, record)
        message, problem = message_of(record, self._settings.id, self._settings.max_bytes)
        return Delivery(message, self._queue, 1, tag, problem)

    def _store(self) -> None:
        """Let the next commit have the marks."""
        marks = self.marks().items()
        self._client.store_offsets(
            offsets=[TopicPartition(place.topic, place.partition, mark) for place, mark in marks]
        )

    def _on_assign(self, _: Consumer, places: Sequence[TopicPartition]) -> None:
        with self._changed:
            self._held |= {place: {} for place in places}
        self._is_paused = None

    def _on_revoke(self, _: Consumer, places: Sequence[TopicPartition]) -> None:
        # They may be lost already.
        with suppress(KafkaException):
            self._store()
        self._forget(places)

    def _forget(self, places: Sequence[TopicPartition]) -> None:
        with self._changed:
            for place in places:
                self._held_bytes -= sum(tag.bytes for tag in self._held.pop(place, {}).values())
                self._ends.pop(place, None)
            left = [each for each in self._arrivals if self.held([each.tag])]
            self._arrivals = deque(left)
            self._changed.notify_all()

    def _room(self) -> float:
        """For how many more records, of the size of those that are held, there is room."""
        most = self._settings.prefetch
        with self._changed:
            count = sum(map(len, self._held.values()))
        return min(most - count, most * (1 - self._held_bytes / _HELD_BYTES))

    def _on_error(self, error: KafkaError) -> None:
        # Without the right to read, nothing arrives, though the cluster is there.
        if error.fatal() or "AUTHORIZATION" in error.name():
            raise KafkaException(error)
        self._may_be_away = True
