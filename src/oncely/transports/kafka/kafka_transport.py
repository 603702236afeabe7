"""A Kafka cluster as a Transport."""

import re
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress

from oncely._util.clock import monotonic
from oncely._util.forking import afresh_in_children
from oncely.core.destination import (
    Destination,
    EventsOf,
    ExchangeNamed,
    QueueNamed,
    destination_of,
)
from oncely.core.errors import ConfigError, MessageError, PublishRefused, TransportError
from oncely.core.message import Message
from oncely.core.verdicts import Acknowledgement, Reject
from oncely.transports.kafka.cluster import Cluster, check_topic
from oncely.transports.kafka.intake import Intake, Tag
from oncely.transports.kafka.messages import Record, copy_of, record_of
from oncely.transports.kafka.url_options import KafkaSettings
from oncely.transports.transport import (
    Delivery,
    Features,
    dead_of,
    log_late,
    log_rejected,
    refusals,
    typed,
)

_PAUSE_S = 0.2
"""The pause before receiving again, after a failure."""
_of_parents: "list[_Session]" = []
"""In a forked child: librdkafka would wait for its threads before it forgets a client."""


class KafkaTransport:
    """Topics on a Kafka cluster, each read by a consumer group."""

    def __init__(self, settings: KafkaSettings) -> None:
        self.features = Features(
            ordered=False,
            counts_deliveries=False,
            max_bytes=settings.max_bytes,
            visibility_s=None,
            events=False,
            names=False,
        )
        self._settings = settings
        self._types: dict[str, set[str]] = defaultdict(set)
        """The types that each queue has subscribed to."""
        self.start_afresh()
        afresh_in_children(self)

    def start_afresh(self) -> None:
        """Leave the clients, and the deliveries, to the parent: called in a forked child."""
        if (session := getattr(self, "_session", None)) is not None:
            _of_parents.append(session)
        self._session = _Session(self._settings)

    def receive(self, queue: str, max_messages: int, wait_s: float) -> Sequence[Delivery]:
        until = monotonic() + wait_s
        session = self._session
        while not session.closed.is_set():
            try:
                taken = session.intake(queue, self._topics(queue)).take(max_messages, until)
            except TransportError:
                if session.closed.is_set():
                    break
                if monotonic() >= until:
                    raise
                session.closed.wait(min(_PAUSE_S, until - monotonic()))
                continue
            if taken or monotonic() >= until:
                return taken
        return []

    def acknowledge(self, verdicts: Sequence[tuple[Delivery, Acknowledgement]]) -> None:
        log_rejected(verdicts)
        session = self._session
        first: dict[Tag, tuple[Delivery, Acknowledgement]] = {}
        for delivery, verdict in verdicts:
            # Not those of a session that is closed, nor of the process that has forked this one.
            if session.has(delivery.tag.partition.intake):
                first.setdefault(delivery.tag, (delivery, verdict))
        letters: dict[str, list[Tag]] = defaultdict(list)
        for tag, (delivery, verdict) in first.items():
            if isinstance(verdict, Reject) and tag.is_held:
                letters[delivery.queue].append(tag)
        failed: TransportError | None = None
        for queue, tags in letters.items():
            try:
                self._reject(queue, tags)
            except (TransportError, ConfigError) as error:
                failed = TransportError(f"{error}")
                first = {tag: each for tag, each in first.items() if tag not in tags}
        by_intake: dict[Intake, dict[Tag, Acknowledgement]] = defaultdict(dict)
        for tag, (_, verdict) in first.items():
            by_intake[tag.partition.intake][tag] = verdict
        in_time = sum(intake.acknowledge(each) for intake, each in by_intake.items())
        if failed is not None:
            raise failed
        if in_time < len(verdicts):
            log_late(len(verdicts) - in_time)

    def _reject(self, queue: str, tags: Sequence[Tag]) -> None:
        """Publish records to the dead-letter topic, unchanged: before their offsets are passed."""
        cluster, dead = self._session.cluster, dead_of(queue)
        cluster.make(dead)
        refused = cluster.publish(dead, [copy_of(tag.record, tag.headers) for tag in tags])
        if refused:
            raise PublishRefused({index: error.str() for index, error in refused.items()})

    def publish(
        self, destination: str, messages: Sequence[Message], *, create: bool = True
    ) -> None:
        target = destination_of(destination)
        refused = dict(refusals(messages, self._settings.max_bytes))
        records = {}
        for index, message in enumerate(messages):
            try:
                if index not in refused:
                    records[index] = record_of(typed(message, target), self._settings.id)
            except MessageError as error:
                refused[index] = str(error)
        if records:
            indexes = [*records]
            for place, why in self._publish(target, [*records.values()], create=create).items():
                refused[indexes[place]] = f"{destination!r}: {why}"
        if refused:
            raise PublishRefused(dict(sorted(refused.items())))

    def _publish(
        self, target: Destination, records: Sequence[Record], *, create: bool
    ) -> Mapping[int, str]:
        """Why records are refused, by their places."""
        cluster = self._session.cluster
        match target:
            case ExchangeNamed():
                return dict.fromkeys(range(len(records)), "there are no exchanges on Kafka")
            case QueueNamed(name) if create:
                cluster.make(name)
            case QueueNamed(name) | EventsOf(name):
                if not cluster.has(check_topic(name)):
                    return dict.fromkeys(range(len(records)), f"there is no topic {name!r}")
        return {place: error.str() for place, error in cluster.publish(name, records).items()}

    def subscribe(self, queue: str, types: Sequence[str], *, alone: bool = False) -> None:  # noqa: ARG002 - a partition has one reader at a time.
        # A pattern that begins with any word would take in every topic of the cluster: it chooses
        # among the messages of the others.
        self._types[queue] |= {each for each in types if not each.startswith(("*", "#"))}
        queues_own, *others = self._topics(queue)
        self._session.cluster.make(queues_own)
        for topic in others:
            # This user may not be allowed to: others may create it, and it is read from then on.
            with suppress(TransportError):
                if not topic.startswith("^"):
                    self._session.cluster.make(topic)

    def is_drained(self, queue: str) -> bool:
        intake = self._session.intakes.get(queue)
        if intake is not None and not intake.is_over:
            return intake.is_drained()
        return not self._session.cluster.lag(self._settings.group_of(queue), self._topics(queue))

    def close(self) -> None:
        session, self._session = self._session, _Session(self._settings)
        session.close()

    def _topics(self, queue: str) -> list[str]:
        """What the queue's group subscribes to: its own topic, and those of its types."""
        names = [check_topic(queue), *sorted(self._types[queue] - {queue})]
        return [_pattern(each) if {*"*#"} & {*each} else check_topic(each) for each in names]


class _Session:
    """The clients of one process, until they are closed."""

    def __init__(self, settings: KafkaSettings) -> None:
        self.cluster = Cluster(settings)
        self.closed = threading.Event()
        """Set when the session is closed."""
        self.intakes: dict[str, Intake] = {}
        """By their queues."""
        self._settings = settings
        self._lock = threading.Lock()

    def intake(self, queue: str, topics: Sequence[str]) -> Intake:
        """The intake of a queue; joins the group if it is not a member."""
        intake = self.intakes.get(queue)
        if intake is not None and not intake.is_over and intake.topics == topics:
            return intake
        with self._lock:
            intake = self.intakes.get(queue)
            if intake is not None and intake.topics != topics:
                intake.close()
            if (intake is None or intake.is_over) and not self.closed.is_set():
                self.cluster.make(queue)
                intake = self.intakes[queue] = Intake(queue, topics, self._settings, self.cluster)
            if intake is None:
                raise TransportError("Kafka: the transport is closed")
            return intake

    def has(self, intake: Intake) -> bool:
        """Whether the intake is of this session, so that its deliveries can be acknowledged."""
        return intake in [*self.intakes.values()]

    def close(self) -> None:
        """Leave all groups. Deliveries that are not acknowledged are redelivered."""
        self.closed.set()
        with self._lock:
            for intake in self.intakes.values():
                intake.close()
        self.cluster.close()


def _pattern(types: str) -> str:
    """A pattern of types as a regular expression for topics."""
    first, *others = types.split(".")
    # As in `destination.takes`: `#` is any number of words, with the dots before them.
    words = {"*": r"\.[^.]*", "#": r"(\.[^.]*)*"}
    return (
        "^" + re.escape(first) + "".join(words.get(w, rf"\.{re.escape(w)}") for w in others) + "$"
    )
