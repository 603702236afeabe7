"""A Kafka cluster as publishers and administrators see it: its topics, and records in them."""

import re
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from oncely._util.clock import monotonic
from oncely._util.tls import advice
from oncely.core.errors import ConfigError, TransportError
from oncely.transports.kafka.messages import Record
from oncely.transports.kafka.url_options import KafkaSettings

_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_NO_ANSWER = "no broker answers; if they speak TLS, write ?security=ssl, or sasl_ssl for a user"
_LOOK_S = 0.1
_ASK_S = 10.0
_NO_TOPIC = (
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
)
_FOR_CONTENT = (
    KafkaError.INVALID_MSG,
    KafkaError.INVALID_MSG_SIZE,
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.RECORD_LIST_TOO_LARGE,
    KafkaError.INVALID_RECORD,
    KafkaError.POLICY_VIOLATION,
)
"""Errors that the broker has for a whole batch, of which one record may be the reason."""
_FOR_TOPIC = (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.TOPIC_EXCEPTION)


def check_topic(name: str) -> str:
    """Return `name` if it can be a topic's. Raises ConfigError, which says what to write."""
    if _TOPIC.fullmatch(name) and name not in (".", ".."):
        return name
    raise ConfigError(
        f"destination: {name!r} cannot be a topic's name on Kafka; write at most 249 letters, "
        "digits, '.', '_' and '-'"
    )


def failure(error: KafkaError | KafkaException | str) -> TransportError:
    """The error to raise for one of Kafka's, with what to write where it is about TLS."""
    why = error.args[0] if isinstance(error, KafkaException) else error
    told = why.str() if isinstance(why, KafkaError) else str(why)
    return TransportError(f"Kafka: {told}{advice(told, 'kafka')}")


class Cluster:
    """The clients of one process that publish, and create topics. Each is made at first use."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._known: set[str] = set()
        """Topics that exist, or existed when they were last looked for."""
        self._admin: AdminClient | None = None
        self._producer: Producer | None = None
        self._observers: dict[str, Consumer] = {}
        """Of consumer groups, by their names; they are not members."""
        self._reason: KafkaError | None = None
        """The last error of a connection."""
        self._trouble: KafkaError | str | None = None
        """Why no broker can be reached."""

    def has(self, topic: str) -> bool:
        """Whether there is such a topic."""
        if topic not in self._known:
            found = self._asked("describe_topics", TopicCollection([topic]))
            if isinstance(found, KafkaError):
                if found.code() in _NO_TOPIC:
                    return False
                raise failure(found)
            self._known.add(topic)
        return True

    def make(self, topic: str) -> None:
        """Create a topic that is missing, with the partitions and replicas that the broker gives
        it by default. Raises TransportError if this user may not.
        """
        if not self.has(check_topic(topic)):
            made = self._asked("create_topics", [NewTopic(topic)])
            if isinstance(made, KafkaError) and made.code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise TransportError(
                    f"{failure(made)}; create topic {topic!r}, or let it be created"
                )
            self._known.add(topic)

    def publish(self, topic: str, records: Sequence[Record]) -> Mapping[int, KafkaError]:
        """Publish; return why records are refused, by their places, when all others are stored.
        Raises TransportError for any other failure.
        """
        refused: dict[int, KafkaError] = {}
        for index, error in self._publish(topic, records).items():
            if error.code() in _FOR_CONTENT and len(records) > 1:
                # The broker refuses a batch for one record of it.
                if alone := self.publish(topic, [records[index]]):
                    refused[index] = alone[0]
            elif error.code() in (*_FOR_CONTENT, *_FOR_TOPIC):
                refused[index] = error
            else:
                # It may have been deleted: whoever publishes again looks for it.
                self._known.discard(topic)
                raise failure(error)
        return refused

    def probe(self, topic: str, timeout_s: float) -> None:
        """Raises KafkaException if the cluster cannot be reached in that time."""
        self._open_admin().list_topics(topic, timeout=timeout_s)

    def lag(
        self, group: str, topics: Sequence[str], marks: Mapping[tuple[str, int], int] = {}
    ) -> int:
        """How many records of these topics a group has not committed, nor has as `marks`, which
        are not committed yet. A topic that begins with `^` is a regular expression.

        What only brokers see, such as the ends of transactions, counts until a member passes it.
        """
        with self._lock:
            observer = self._observers.get(group)
            if observer is None:
                observer = Consumer({**self._settings.client, "group.id": group})
                self._observers[group] = observer
        try:
            found = observer.list_topics(timeout=_ASK_S).topics
            places = [
                TopicPartition(name, number)
                for name in found
                if name in topics or any(t[0] == "^" and re.match(t, name) for t in topics)
                for number in found[name].partitions
            ]
            lag = 0
            for place in observer.committed(places, timeout=_ASK_S) if places else ():
                low, high = observer.get_watermark_offsets(place, timeout=_ASK_S)
                mark = marks.get((place.topic, place.partition), -1)
                lag += max(0, high - max(low, place.offset, mark))
            return lag
        except KafkaException as error:
            raise failure(error) from error

    def close(self) -> None:
        """Close what has to be closed; nothing that was published waits."""
        with self._lock:
            observers, self._observers = [*self._observers.values()], {}
        for observer in observers:
            observer.close()

    def _publish(self, topic: str, records: Sequence[Record]) -> Mapping[int, KafkaError]:
        """Why records are not stored."""
        producer = self._open_producer()
        failed: dict[int, KafkaError] = {}
        left = len(records)
        done = threading.Condition()

        def report(index: int, error: KafkaError | None, _: object = None) -> None:
            nonlocal left
            with done:
                left -= 1
                if error is not None:
                    failed[index] = error

        for index, (value, key, headers) in enumerate(records):
            while True:
                try:
                    producer.produce(
                        topic,
                        value,
                        key,
                        headers=[*headers],
                        on_delivery=partial(report, index),
                    )
                except BufferError:
                    producer.poll(_LOOK_S)  # librdkafka's own queue is full.
                    continue
                except KafkaException as error:
                    report(index, error.args[0])
                break
        # Each record is reported at the latest when the time to confirm it is over. The reports of
        # one thread may be taken by another.
        while left:
            producer.poll(_LOOK_S)
        if any(error.fatal() or error.code() == KafkaError._FATAL for error in failed.values()):
            with self._lock:
                self._producer = None
        return failed

    def _open_producer(self) -> Producer:
        with self._lock:
            if self._producer is None:
                self._producer = Producer(
                    {
                        # As in Java's clients, so that the records of a key share a partition.
                        "partitioner": "murmur2_random",
                        # The broker decides.
                        "message.max.bytes": 1_000_000_000,
                        "linger.ms": 1,
                        **self._settings.client,
                        "enable.idempotence": True,
                        "message.timeout.ms": round(self._settings.confirm_timeout_s * 1_000),
                    }
                )
            return self._producer

    def _open_admin(self) -> AdminClient:
        with self._lock:
            if self._admin is None:
                settings: dict[str, Any] = {**self._settings.client, "error_cb": self._on_error}
                self._admin = AdminClient(settings)
            return self._admin

    def _asked(self, method: str, about: Any) -> KafkaError | None:
        """The error that the answer to a request about one topic is. Raises TransportError if the
        cluster cannot be reached.
        """
        admin, self._trouble, self._reason = self._open_admin(), None, None
        timeout_s = self._settings.confirm_timeout_s
        [answer] = getattr(admin, method)(about, request_timeout=timeout_s).values()
        until = monotonic() + timeout_s
        while not answer.done() and monotonic() < until and self._trouble is None:
            admin.poll(_LOOK_S)
        if not answer.done():
            with self._lock:
                # It would tell only once that nobody is there.
                self._admin = None
            raise failure(self._trouble or self._reason or f"no answer within {timeout_s:g} s")
        error = answer.exception()
        if error is None:
            return None
        if not isinstance(error, KafkaException):
            raise error
        found: KafkaError = error.args[0]
        if found.code() in (KafkaError._TIMED_OUT, KafkaError._TRANSPORT):
            raise failure(self._trouble or found)
        return found

    def _on_error(self, error: KafkaError) -> None:
        if error.code() == KafkaError._ALL_BROKERS_DOWN:
            self._trouble = self._reason or _NO_ANSWER
        elif error.code() == KafkaError._AUTHENTICATION:
            self._trouble = error
        else:
            self._reason = error
