"""A RabbitMQ broker as a Transport."""

from collections import defaultdict
from collections.abc import Sequence

from pika.connection import Parameters

from oncely._util.clock import monotonic
from oncely._util.forking import afresh_in_children
from oncely.core.destination import EventsOf, ExchangeNamed, QueueNamed, destination_of
from oncely.core.errors import BrokerRefused, PublishRefused, TransportError
from oncely.core.message import Message
from oncely.core.verdicts import Acknowledgement
from oncely.transports.rabbitmq.connection import Lost
from oncely.transports.rabbitmq.intake import Intake
from oncely.transports.rabbitmq.messages import content_of
from oncely.transports.rabbitmq.publisher import NOT_STORED, Route
from oncely.transports.rabbitmq.session import Session
from oncely.transports.rabbitmq.topology import make_queue, subscribe
from oncely.transports.rabbitmq.url_options import RabbitSettings
from oncely.transports.transport import Delivery, Features, contents_of, log_late, log_rejected

_PAUSE_S = 0.2
"""The pause before receiving again, after a failure that was not the connection's."""


class RabbitmqTransport:
    """Queues on a RabbitMQ broker."""

    def __init__(self, parameters: Parameters, settings: RabbitSettings = RabbitSettings()) -> None:
        self.features = Features(
            ordered=True,
            counts_deliveries=settings.counts_deliveries,
            max_bytes=settings.max_bytes,
            visibility_s=None,
        )
        self._parameters = parameters
        self._settings = settings
        self._alone: set[str] = set()
        self.start_afresh()
        afresh_in_children(self)

    def start_afresh(self) -> None:
        """Leave the connections, and the deliveries, to the parent: called in a forked child."""
        self._session = Session(self._parameters, self._settings, self._alone)

    def receive(self, queue: str, max_messages: int, wait_s: float) -> Sequence[Delivery]:
        until = monotonic() + wait_s
        session = self._session
        while not session.closed.is_set():
            try:
                taken = session.intake(queue, until).take(max_messages, until)
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
        session = self._session
        log_rejected(verdicts)
        late = 0
        failure: Lost | None = None
        by_intake: dict[Intake, list[tuple[int, Acknowledgement]]] = defaultdict(list)
        for delivery, verdict in verdicts:
            by_intake[delivery.tag.intake].append((delivery.tag.number, verdict))
        for intake, pairs in by_intake.items():
            try:
                late += intake.acknowledge(pairs) if session.has(intake) else len(pairs)
            except (TransportError, BrokerRefused) as error:
                # The others may still be acknowledged.
                failure = error
        if late:
            log_late(late)
        if failure is not None:
            raise failure

    def publish(
        self, destination: str, messages: Sequence[Message], *, create: bool = True
    ) -> None:
        target = destination_of(destination)
        limit = self._settings.max_bytes
        contents, refused = contents_of(messages, target, limit, content_of)
        passing: set[int] = set()
        if contents:
            match target:
                case QueueNamed(name):
                    route = Route("", name, name if create else None)
                case ExchangeNamed(name, routing_key):
                    route = Route(name, routing_key)
                case EventsOf(type_):
                    route = Route(self._settings.exchange, type_)
            by_broker = self._session.publisher.publish(route, list(contents.values()))
            indexes = list(contents)
            passing = {indexes[n] for n, why in by_broker.items() if why == NOT_STORED}
            refused |= {indexes[n]: f"{destination!r}: {why}" for n, why in by_broker.items()}
        if refused:
            raise PublishRefused(dict(sorted(refused.items())), passing)

    def subscribe(self, queue: str, types: Sequence[str], *, alone: bool = False) -> None:
        self._alone |= {queue} if alone else set()
        line = self._session.consuming.line()
        make_queue(line, queue, self._settings.queue_type)
        subscribe(line, queue, self._settings.exchange, types)

    def is_drained(self, queue: str) -> bool:
        return self._session.is_drained(queue)

    def close(self) -> None:
        session = self._session
        self.start_afresh()
        session.close()
