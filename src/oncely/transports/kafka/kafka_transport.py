"""A Kafka cluster as a Transport: topics, publishing, and an intake for each queue."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException, Producer
from confluent_kafka import TopicPartition as Place
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]
from confluent_kafka.cimpl import NewTopic

from oncely._util.clock import monotonic
from oncely._util.forking import afresh_in_children
from oncely.core.destination import EventsOf, ExchangeNamed, QueueNamed, destination_of, takes
from oncely.core.errors import ConfigError, PublishRefused, TransportError
from oncely.core.message import Message
from oncely.core.verdicts import Acknowledgement, Reject, Requeue
from oncely.transports.kafka.intake import Intake, Tag
from oncely.transports.kafka.records import Record, published_again, record_of
from oncely.transports.kafka.url_options import KafkaSettings
from oncely.transports.transport import (
    Delivery,
    Features,
    contents_of,
    dead_of,
    log_late,
    log_rejected,
)

_LOOK_S = 0.1
_ASK_S = 5.0
"""How long to wait until a broker answers what it knows by heart."""
_PAUSE_S = 1.0
"""The pause after dead letters that could not be published: they are received again at once."""
_REFUSED = (
    *(KafkaError.INVALID_MSG, KafkaError.INVALID_RECORD, KafkaError.POLICY_VIOLATION),
    *(KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE),
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
)
"""Errors that another try would meet again. A broker refuses a whole batch for one record."""
_SOON = (
    *(KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError.COORDINATOR_NOT_AVAILABLE),
    KafkaError.NOT_COORDINATOR,
)
"""Errors of a group's broker that has just become that."""
_of_parents: list[object] = []
"""In a forked child: librdkafka would wait for its threads before it forgets a client."""


class KafkaTransport:
    """Topics on a Kafka cluster, each read by a consumer group."""

    def __init__(self, settings: KafkaSettings) -> None:
        limit = settings.max_bytes
        self.features = Features(
            ordered=False, counts_deliveries=False, max_bytes=limit, visibility_s=None, topics=True
        )
        self._settings = settings
        self._types: dict[str, set[str]] = defaultdict(set)
        """What each queue's group reads besides its own topic: topics and patterns."""
        self._known: dict[str, int] = {}
        """The topics that exist, or did when they were last looked for; their partitions."""
        self._reason = "no broker answers; if they speak TLS, write ?security.protocol=ssl"
        """The last error of a connection."""
        self._lock = threading.Lock()
        self._open()
        afresh_in_children(self)

    def _open(self) -> None:
        self._intakes: dict[str, Intake] = {}
        """By their queues, since the transport was opened."""
        for client in ("_admin", "_producer"):
            vars(self).pop(client, None)

    @cached_property
    def _admin(self) -> AdminClient:
        return AdminClient(self._settings.client | {"error_cb": self._on_error})

    @cached_property
    def _producer(self) -> Producer:
        return Producer(self._settings.client)

    def start_afresh(self) -> None:
        """Leave the clients, and the deliveries, to the parent: called in a forked child."""
        _of_parents.append({**vars(self)})
        self._lock = threading.Lock()
        self._open()

    def receive(self, queue: str, max_messages: int, wait_s: float) -> Sequence[Delivery]:
        until, intakes = monotonic() + wait_s, self._intakes
        self._make(queue)
        with self._lock:
            if intakes is not self._intakes:
                return []  # It was closed meanwhile.
            intake = intakes.get(queue)
            if intake is None or intake.is_over:
                topics = {queue, *self._types[queue]}
                intake = intakes[queue] = Intake(queue, topics, self._settings, self._look)
        return intake.take(max_messages, until)

    def acknowledge(self, verdicts: Sequence[tuple[Delivery, Acknowledgement]]) -> None:
        log_rejected(verdicts)
        by_queue: dict[str, dict[Tag, Acknowledgement]] = defaultdict(dict)
        for delivery, verdict in verdicts:
            # If a delivery is acknowledged twice, the first time counts.
            by_queue[delivery.queue].setdefault(delivery.tag, verdict)
        late, failed, intakes = len(verdicts), None, {**self._intakes}
        for queue in intakes.keys() & by_queue.keys():
            intake, told = intakes[queue], by_queue[queue]
            letters = intake.held(tag for tag in told if isinstance(told[tag], Reject))
            records = {index: published_again(tag.record) for index, tag in enumerate(letters)}
            left: Mapping[int, Any] = records
            try:
                # Before their offsets are passed.
                if left := self._publish(dead_of(queue), records, create=True):
                    raise PublishRefused(left)
            except (TransportError, ConfigError) as error:
                # Kafka does not deliver them again. The others may still be acknowledged.
                failed = error
                told |= {letters[index]: Requeue() for index in left}
            late -= intake.acknowledge(told)
        if failed is not None:
            time.sleep(_PAUSE_S)
            raise TransportError(f"dead letters: {failed}") from failed
        if late:
            log_late(late)

    def publish(
        self, destination: str, messages: Sequence[Message], *, create: bool = True
    ) -> None:
        target = destination_of(destination)
        convert = partial(record_of, id_header=self._settings.id)
        records, refused = contents_of(messages, target, self._settings.max_bytes, convert)
        match target:
            case QueueNamed(topic):
                why = self._publish(topic, records, create=create)
            case EventsOf(topic):
                why = self._publish(topic, records, create=False)
            case ExchangeNamed():
                why = dict.fromkeys(records, "there are no exchanges on Kafka")
        refused |= {index: f"{destination!r}: {told}" for index, told in why.items()}
        if refused:
            raise PublishRefused(dict(sorted(refused.items())))

    def _publish(
        self, topic: str, records: Mapping[int, Record], *, create: bool
    ) -> Mapping[int, str]:
        """Publish; return why records are refused, by their indexes, when all others are stored."""
        if not records:
            return {}
        if create:
            self._make(topic)
        if not self._has(topic):
            return dict.fromkeys(records, f"there is no topic {topic!r}")
        refused: dict[int, str] = {}
        for index, error in self._failed(topic, records).items():
            if error.code() not in _REFUSED:
                # The topic may have been deleted, or the producer be of no use any more.
                self._known.pop(topic, None)
                vars(self).pop("_producer", None)
                raise TransportError(f"Kafka: {error.str()}")
            if len(records) == 1:
                refused[index] = error.str()
            else:
                refused |= self._publish(topic, {index: records[index]}, create=False)
        return refused

    def _failed(self, topic: str, records: Mapping[int, Record]) -> Mapping[int, KafkaError]:
        """Publish; return the errors of the records that are not stored."""
        producer, reports = self._producer, dict[int, KafkaError | None]()
        for index, (value, key, headers, *_) in records.items():

            def report(error: KafkaError | None, _: object, index: int = index) -> None:
                reports[index] = error

            while True:
                try:
                    producer.produce(topic, value, key, headers=[*headers], on_delivery=report)
                except BufferError:
                    # It is full until some of what it holds is reported.
                    producer.poll(_LOOK_S)
                    continue
                except KafkaException as error:
                    reports[index] = error.args[0]
                break
        # Each record is reported at the latest when the time for it is over. The reports of one
        # thread may be taken by another.
        while len(reports) < len(records):
            producer.poll(_LOOK_S)
        return {index: error for index, error in reports.items() if error is not None}

    def subscribe(self, queue: str, types: Sequence[str], *, alone: bool = False) -> None:  # noqa: ARG002 - a partition has one reader at a time.
        # A pattern that begins with any word would take in every topic of the cluster: it chooses
        # among the messages of the others.
        new = {each for each in types if not each.startswith(("*", "#"))} - self._types[queue]
        self._types[queue] |= new
        if new and (intake := self._intakes.pop(queue, None)) is not None:
            intake.close()
        for topic in {queue, *self._types[queue]}:
            if not {*"*#"} & {*topic}:
                self._make(topic)

    def is_drained(self, queue: str) -> bool:
        return not any(self._behind(queue).values())

    def lags(self, queue: str) -> Mapping[str, int]:
        found: Counter[str] = Counter()
        for place, count in self._behind(queue).items():
            found[f"kafka:{place.topic}"] += count
        return found

    def _behind(self, queue: str) -> Mapping[Place, int]:
        """How many messages of each partition no member of the queue's group has acknowledged."""
        intake = self._intakes.get(queue)
        # What is acknowledged may not be committed yet. What only brokers see, such as the ends of
        # transactions, counts until a member passes it.
        marks = {} if intake is None else intake.marks()
        places = [
            Place(name, number)
            for name, count in self._look().items()
            if any(takes(topic, name) for topic in {queue, *self._types[queue]})
            for number in range(count)
        ]
        if not places:
            return {}
        group = self._settings.client.get("group.id", f"oncely-{queue}")
        asked = [ConsumerGroupTopicPartitions(group, places)]
        admin, last = self._admin, OffsetSpec.latest()  # type: ignore[no-untyped-call]
        until = monotonic() + _ASK_S
        while True:
            try:
                found = admin.list_consumer_group_offsets(asked, request_timeout=_ASK_S)
                ends = admin.list_offsets(dict.fromkeys(places, last), request_timeout=_ASK_S)
                return {
                    each: max(0, ends[each].result().offset - max(each.offset, marks.get(each, 0)))
                    for each in found[group].result().topic_partitions
                }
            except KafkaException as error:
                if error.args[0].code() not in _SOON or monotonic() > until:
                    raise TransportError(f"Kafka: {error.args[0].str()}") from error
                admin.poll(_LOOK_S)

    def close(self) -> None:
        with self._lock:
            intakes = self._intakes
            self._open()
        for intake in intakes.values():
            intake.close()

    def _make(self, topic: str) -> None:
        """Create a topic that is missing, as the broker does it by default."""
        if self._has(topic):
            return
        admin = self._admin  # Of one that is gone, as the transport is closed, no answer comes.
        try:
            admin.create_topics([NewTopic(topic)], request_timeout=_ASK_S)[topic].result()
        except KafkaException as error:
            code, why = error.args[0].code(), f"Kafka: {error.args[0].str()}"
            if code == KafkaError.TOPIC_EXCEPTION:
                raise ConfigError(f"destination: {why}; write another name") from error
            if code != KafkaError.TOPIC_ALREADY_EXISTS:
                raise TransportError(f"{why}; create topic {topic!r} yourself") from error
        self._known[topic] = 0

    def _has(self, topic: str) -> bool:
        return topic in self._known or topic in self._look()

    def _look(self) -> Mapping[str, int]:
        """The number of partitions of each topic. Raises TransportError while no broker answers."""
        try:
            found = self._admin.list_topics(timeout=_ASK_S).topics
        except KafkaException as error:
            self._admin.poll(0)
            raise TransportError(f"Kafka: {self._reason}") from error
        self._known = {name: len(topic.partitions) for name, topic in found.items()}
        return self._known

    def _on_error(self, error: KafkaError) -> None:
        if error.code() != KafkaError._ALL_BROKERS_DOWN:
            self._reason = error.str()
