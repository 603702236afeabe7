"""Receiving as a member of a consumer group, and committing what is acknowledged."""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka import Message as Arrived

from oncely._util.clock import monotonic
from oncely.core.errors import TransportError
from oncely.core.verdicts import Acknowledgement, Requeue
from oncely.transports.kafka.cluster import Cluster, failure
from oncely.transports.kafka.messages import Headers, headers_of, message_of
from oncely.transports.kafka.url_options import KafkaSettings
from oncely.transports.transport import Delivery

_POLL_S = 0.1
_PROBE_S = 1.0
"""How often, and for how long, a cluster is asked that may be away."""
_CLOSING_S = 20.0
"""How long a cluster that is away holds up `close`."""


@dataclass(slots=True, eq=False)
class Partition:
    """A partition of a topic, from when it is assigned to this process until it is taken away."""

    intake: "Intake"
    topic: str
    number: int
    held: dict[int, "Tag"] = field(default_factory=dict)
    """The unacknowledged deliveries, by their offsets, in their order."""
    end: int = -1
    """The offset after the last that has arrived; negative before the first."""
    is_paused: bool | None = None
    """None if it is not known: a partition that was paused when it was taken away may still be."""

    @property
    def mark(self) -> int:
        """The offset before which all is acknowledged."""
        return next(iter(self.held), self.end)


@dataclass(slots=True, eq=False)
class Tag:
    """Identifies a delivery."""

    partition: Partition
    record: Arrived
    headers: Headers | None

    @property
    def is_held(self) -> bool:
        """Whether it is not acknowledged, and its partition is still ours."""
        return self.partition.held.get(self.record.offset() or 0) is self


class Intake:
    """A member of a consumer group, and its unacknowledged deliveries.

    A thread of its own polls at all times, since a member that does not poll loses its partitions,
    and a handler may take longer. The lock of `_changed` protects all that deliveries are known by.
    A partition that is taken away takes its deliveries with it: verdicts about them are late.
    """

    def __init__(
        self, queue: str, topics: Sequence[str], settings: KafkaSettings, cluster: Cluster
    ) -> None:
        self.is_over = False
        self._client = Consumer(_consumer_settings(queue, settings, self._on_error))
        """Only its own thread may call it: others would wait until that does not poll."""
        self._cluster = cluster
        self._queue = queue
        self.topics = [*topics]
        self._settings = settings
        self._changed = threading.Condition(threading.RLock())
        self._partitions: dict[tuple[str, int], Partition] = {}
        self._arrivals: deque[Delivery] = deque()
        self._held = 0
        """How many deliveries are unacknowledged, those among them that have not been received."""
        self._advanced: set[Partition] = set()
        """The partitions whose mark may have changed since it was stored."""
        self._is_closing = False
        self._suspicion: KafkaError | None = None
        """What may be wrong with the cluster."""
        self._trouble: TransportError | None = None
        """What is wrong with it."""
        self._probe_at = 0.0
        self._thread = threading.Thread(target=self._run, name=f"oncely-kafka-{queue}", daemon=True)
        self._thread.start()

    def take(self, limit: int, until: float) -> list[Delivery]:
        """The deliveries that have arrived, at most so many; waits until that moment for the first.
        Empty if the intake is closed. Raises TransportError while the cluster is away.
        """
        with self._changed:
            while not (self._arrivals or self.is_over or self._is_closing or self._trouble):
                left_s = until - monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            if self._trouble and not self._arrivals and not self._is_closing:
                raise self._trouble
            return [self._arrivals.popleft() for _ in range(min(limit, len(self._arrivals)))]

    def acknowledge(self, verdicts: Mapping[Tag, Acknowledgement]) -> int:
        """Acknowledge each delivery; return how many were still held. A rejected one is as good as
        acknowledged: its copy is in the dead-letter topic.
        """
        in_time = 0
        again: list[Delivery] = []
        with self._changed:
            for tag, verdict in verdicts.items():
                partition, offset = tag.partition, tag.record.offset() or 0
                if not tag.is_held:
                    continue
                in_time += 1
                if isinstance(verdict, Requeue):
                    partition.held[offset] = other = replace(tag)
                    again.append(self._delivery(other))
                else:
                    del partition.held[offset]
                    self._held -= 1
                    self._advanced.add(partition)
            self._arrivals.extendleft(reversed(again))
            self._changed.notify_all()
        return in_time

    def is_drained(self) -> bool:
        """Whether nothing is unacknowledged here, and the group has no lag."""
        with self._changed:
            if self._held:
                return False
            marks = {place: each.mark for place, each in self._partitions.items()}
        return not self._cluster.lag(self._settings.group_of(self._queue), self.topics, marks)

    def close(self) -> None:
        """Commit, and leave the group; what is not acknowledged is redelivered."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(_CLOSING_S)
        self._forget(self._partitions)

    # ---- In its thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._client.subscribe(
                self.topics,
                on_assign=self._on_assign,
                on_revoke=self._on_revoke,
                on_lost=self._on_lost,
            )
            while not self._is_closing:
                self._store()
                self._poll()
                self._probe()
        except KafkaException as error:
            # Another member may have this one's name, say: a new one may fare better.
            self._trouble = failure(error)
        finally:
            try:
                with suppress(KafkaException):
                    self._client.close()
            finally:
                self._forget(self._partitions)
                with self._changed:
                    self.is_over = True
                    self._changed.notify_all()

    def _poll(self) -> None:
        room = self._settings.prefetch - self._held
        is_paused = any(each.is_paused for each in self._partitions.values())
        # Not for each message that makes room: what was fetched ahead is fetched again.
        is_paused = room <= 0 or (is_paused and room < self._settings.prefetch / 2)
        self._pause(is_to_pause=is_paused)
        if is_paused:
            self._arrive(self._client.consume(1, 0))
            with self._changed:
                if self._held > self._settings.prefetch / 2 and not self._is_closing:
                    self._changed.wait(_POLL_S)
            return
        # `consume` would wait for all that it is asked for.
        first = self._client.poll(_POLL_S)
        if first is not None:
            self._arrive([first, *(self._client.consume(room - 1, 0) if room > 1 else ())])

    def _pause(self, *, is_to_pause: bool) -> None:
        changed = [each for each in self._partitions.values() if each.is_paused is not is_to_pause]
        if changed:
            act = self._client.pause if is_to_pause else self._client.resume
            act([TopicPartition(each.topic, each.number) for each in changed])
            for each in changed:
                each.is_paused = is_to_pause

    def _arrive(self, records: Sequence[Arrived]) -> None:
        arrived: list[Delivery] = []
        with self._changed:
            for record in records:
                error, offset = record.error(), record.offset() or 0
                partition = self._partitions.get((record.topic() or "", record.partition() or 0))
                if error is None and partition is not None:
                    partition.held[offset] = tag = Tag(partition, record, headers_of(record))
                    partition.end = offset + 1
                    arrived.append(self._delivery(tag))
                elif error is not None and error.code() != KafkaError._PARTITION_EOF:
                    self._on_error(error)
                elif partition is not None and offset > partition.end:
                    # What is between is not for consumers: the ends of transactions, say.
                    partition.end = offset
                    self._advanced.add(partition)
            self._held += len(arrived)
            self._arrivals.extend(arrived)
            self._changed.notify_all()

    def _delivery(self, tag: Tag) -> Delivery:
        settings = self._settings
        message, problem = message_of(tag.record, tag.headers, settings.id, settings.max_bytes)
        return Delivery(message, self._queue, 1, tag, problem)

    def _store(self) -> None:
        """Let the next commit have what is acknowledged."""
        with self._changed:
            advanced, self._advanced = self._advanced, set()
            marks = [TopicPartition(each.topic, each.number, each.mark) for each in advanced]
        for mark in marks:
            # It may have been taken away, which the next poll tells.
            if mark.offset >= 0:
                with suppress(KafkaException):
                    self._client.store_offsets(offsets=[mark])

    def _on_assign(self, _: Consumer, places: Sequence[TopicPartition]) -> None:
        with self._changed:
            for each in places:
                partition = Partition(self, each.topic, each.partition)
                self._partitions[each.topic, each.partition] = partition

    def _on_revoke(self, client: Consumer, places: Sequence[TopicPartition]) -> None:
        with self._changed:
            ours = [self._partitions.get((each.topic, each.partition)) for each in places]
            marks = [TopicPartition(p.topic, p.number, p.mark) for p in ours if p and p.mark >= 0]
        self._on_lost(client, places)
        # Before others get them. What cannot be committed is redelivered.
        with suppress(KafkaException):
            if marks:
                client.commit(offsets=marks, asynchronous=False)

    def _on_lost(self, _: Consumer, places: Sequence[TopicPartition]) -> None:
        self._forget([(each.topic, each.partition) for each in places])

    def _forget(self, places: "Sequence[tuple[str, int]] | Mapping[tuple[str, int], Any]") -> None:
        with self._changed:
            for place in [*places]:
                if partition := self._partitions.pop(place, None):
                    self._held -= len(partition.held)
                    partition.held.clear()
            left = [each for each in self._arrivals if each.tag.is_held]
            self._arrivals.clear()
            self._arrivals.extend(left)

    def _on_error(self, error: KafkaError) -> None:
        if error.fatal():
            raise KafkaException(error)
        if self._suspicion is None or error.code() != KafkaError._ALL_BROKERS_DOWN:
            self._suspicion = error

    def _probe(self) -> None:
        """If something may be wrong, find out whether the cluster is away."""
        if (self._suspicion is None and self._trouble is None) or monotonic() < self._probe_at:
            return
        self._probe_at = monotonic() + _PROBE_S
        suspicion, self._suspicion = self._suspicion, None
        trouble = None
        try:
            self._cluster.probe(self._queue, _PROBE_S)
        except KafkaException as error:
            trouble = self._trouble or failure(suspicion or error)
        with self._changed:
            self._trouble = trouble
            self._changed.notify_all()


def _consumer_settings(queue: str, settings: KafkaSettings, on_error: Any) -> dict[str, Any]:
    given = settings.client
    usual: dict[str, Any] = {
        "auto.offset.reset": "earliest",
        "auto.commit.interval.ms": 1_000,
        # How soon a topic is read that was created after the group had subscribed to it.
        "topic.metadata.refresh.interval.ms": 30_000,
    }
    if given.get("group.protocol", "classic").lower() == "classic":
        # A partition that stays where it is keeps its deliveries.
        usual["partition.assignment.strategy"] = "cooperative-sticky"
    return {
        **usual,
        **given,
        "group.id": settings.group_of(queue),
        "enable.auto.commit": True,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
        "error_cb": on_error,
    }
