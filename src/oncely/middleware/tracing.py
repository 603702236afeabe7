"""Traced: an OpenTelemetry span for each message, linked to the span that sent the message."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from oncely.core.errors import ConfigError
from oncely.core.message import Message
from oncely.middleware.chain import Around

try:
    from opentelemetry.trace import Link, SpanKind, TracerProvider, get_current_span, get_tracer
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError as error:
    raise ConfigError(
        f"{error.name} is not installed; type: pip install 'oncely[tracing]'"
    ) from error

_HEADERS = TraceContextTextMapPropagator()


class Traced(Around):
    """Runs each message in a span of the kind consumer, named by the messaging conventions.

    The sender's span, from the headers `traceparent` and `tracestate`, is a link, not the parent:
    the same message may be delivered often, and days later. An error is recorded with its text.
    `destination` is the queue and `system` the broker, such as "rabbitmq". Without a
    `tracer_provider` the global one is used.
    """

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        *,
        destination: str = "",
        system: str = "oncely",
    ) -> None:
        self._tracer = get_tracer("oncely", tracer_provider=tracer_provider)
        self._name = f"process {destination}".strip()
        self._attributes: dict[str, Any] = {
            "messaging.system": system,
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
        }
        if destination:
            self._attributes["messaging.destination.name"] = destination

    @contextmanager
    def around(self, message: Message) -> Iterator[None]:  # noqa: D102
        headers = message.headers.items()
        texts = {name.lower(): text for name, text in headers if isinstance(text, str)}
        sender = get_current_span(_HEADERS.extract(texts)).get_span_context()
        attributes = {
            "messaging.message.id": message.id,
            "messaging.message.body.size": len(message.body),
            "oncely.message.type": message.type,
        }
        with self._tracer.start_as_current_span(
            self._name,
            kind=SpanKind.CONSUMER,
            attributes=self._attributes | attributes,
            links=[Link(sender)] if sender.is_valid else [],
        ) as span:
            try:
                yield
            except Exception as error:
                span.set_attribute("error.type", type(error).__qualname__)
                raise
