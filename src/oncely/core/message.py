"""Message, and the message that this thread or task processes now: how a handler's code reaches its
claim.
"""

from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol, Self, TypeVar, overload

from oncely.core.durations import Duration
from oncely.core.errors import MessageError
from oncely.core.ids import are_plain_texts, check_id, check_text
from oncely.core.json_body import read_json
from oncely.core.record import Claim

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Message:
    """The thing sent."""

    id: str
    body: bytes = b""
    type: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    time: datetime | None = None
    content_type: str = "application/json"
    key: str | None = None

    @classmethod
    def from_cloudevent(cls, headers: Mapping[str, Any], body: bytes) -> Self:
        """A CloudEvent, in binary or structured mode, as a message.

        `headers` are those of HTTP, Kafka (`ce_id`) or AMQP (`cloudEvents:id`), their content type
        among them. The id is made of the event's source and id. Raises MessageError where they are
        not a CloudEvent.
        """
        from oncely.core.cloudevents import fields_of

        return cls(**fields_of(headers, body))

    def json(self) -> Any:
        """The body as JSON. Raises MessageError as `read_json` does."""
        return read_json(self.body)

    def get(self, name: str, default: Any = None) -> Any:
        """One field of a JSON object body; `default` where it is absent. Raises as `json` does."""
        body = self.json()
        if not isinstance(body, dict):
            raise MessageError("body is not a JSON object")
        return body.get(name, default)

    @property
    def claim(self) -> Claim | None:
        """Inside a handler: the claim under which it has this message. None elsewhere."""
        try:
            return self._processing.claim
        except MessageError:
            return None

    @property
    def idempotency_key(self) -> str:
        """The same for every delivery of this message to this consumer: 64 hexadecimal digits.

        Hand it to an outside service that accepts one. Raises MessageError outside a handler,
        where no consumer is known.
        """
        return self._processing.idempotency_key

    def step_key(self, name: str) -> str:
        """As `idempotency_key`, for the step of that name."""
        return self._processing.step_key(name)

    @overload
    def step(
        self, name: str, function: Callable[..., Awaitable[T]], *args: Any
    ) -> Awaitable[T]: ...
    @overload
    def step(self, name: str, function: Callable[..., T], *args: Any) -> T: ...
    def step(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Inside a handler: run `function` once for this message, as `Processing.step` says."""
        return self._processing.step(name, function, *args)

    def send(
        self,
        destination: str,
        content: "Message | bytes | str | Any",
        delay: Duration | None = None,
    ) -> str:
        """Inside a handler: send when it has succeeded, as `Processing.send` says."""
        return self._processing.send(destination, content, delay)

    @property
    def _processing(self) -> "Processing":
        """The processing of this message. Raises MessageError where another one is processed."""
        processing = current()
        if processing.message is not None and processing.message.id != self.id:
            raise MessageError(
                f"{processing.message.id!r} is being processed here, and not {self.id!r}"
            )
        return processing


def check_message(message: Message, *, needs_id: bool = True) -> Message:
    """Return `message` if every store and broker can take it, whatever its annotations say.

    Raises MessageError, its text the reason. Without `needs_id` the id may be empty.
    """
    if needs_id or message.id:
        check_id(message.id)
    if not isinstance(message.body, bytes):
        raise MessageError("body is not bytes")
    # The usual texts pass here; `check_text` finds out what is wrong with any others.
    if not are_plain_texts((message.type, message.source, message.content_type)):
        for what in ("type", "source", "content_type"):
            check_text(getattr(message, what), what)
    if message.key is not None:
        check_text(message.key, "key")
    if type(message.headers) is not dict and not isinstance(message.headers, Mapping):
        raise MessageError("headers are not a mapping")
    texts = (*message.headers, *message.headers.values())
    if texts and not all(isinstance(text, str) for text in texts):
        raise MessageError("a header is not text")
    if message.time is not None and not isinstance(message.time, datetime):
        raise MessageError("time is not a datetime")
    return message


# ---- What is being processed now, in this thread and task ----------------------------------------


class Processing(Protocol):
    """A message whose handler runs under a claim."""

    is_over: bool
    """Whether the handler has ended."""
    message: "Message | None"
    """What the handler was given, where that is known."""

    @property
    def claim(self) -> Claim:
        """The claim under which the handler runs."""

    @property
    def idempotency_key(self) -> str:
        """The same for every delivery of the message to this consumer: 64 hexadecimal digits."""

    def step_key(self, name: str) -> str:
        """As `idempotency_key`, and different for each step."""

    @overload
    def step(
        self, name: str, function: Callable[..., Awaitable[T]], *args: Any
    ) -> Awaitable[T]: ...
    @overload
    def step(self, name: str, function: Callable[..., T], *args: Any) -> T: ...
    def step(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function` once for the message, and return its result, as it is read from JSON, by
        the type that its annotation names.

        A later attempt returns the kept result and does not run it; None where that could not be
        kept, which is logged. An async function is to be awaited. Raises FencedError where another
        worker took the message over, MessageError for a name that cannot be kept, ConfigError for
        a type that cannot; an error of the function is raised as it was.
        """

    def send(
        self,
        destination: str,
        content: "Message | bytes | str | Any",
        delay: Duration | None = None,
    ) -> str:
        """Send a message when the handler has succeeded; return its id.

        A Message keeps its id; anything else becomes the body of a new one, JSON where it is
        neither bytes nor text, whose id is the same in every attempt. Raises MessageError beyond
        the limit of one message, for what cannot be sent, and for what is not a destination.
        """


_current: ContextVar[Processing | None] = ContextVar("oncely_processing", default=None)


def current() -> Processing:
    """The processing of this thread or task. Raises MessageError outside a handler."""
    processing = _current.get()
    if processing is None or processing.is_over:
        raise MessageError(
            "no message is being processed here: call this inside a function under `once`, "
            "`claimed`, `idempotent_consumer`, or a consumer's handler"
        )
    return processing


class entered:  # noqa: N801 - reads as a statement.
    """While this is entered, `processing` is the one that `current` returns in this thread or
    task.
    """

    def __init__(self, processing: Processing | None) -> None:
        self._processing = processing

    def __enter__(self) -> None:
        self._token = _current.set(self._processing)

    def __exit__(self, *_: object) -> None:
        # A generator may be closed by another task than the one that began it: that task has its
        # own value of the variable, which is not reset.
        try:  # noqa: SIM105 - cheaper than `suppress`, and this is entered for each message.
            _current.reset(self._token)
        except ValueError:
            pass
