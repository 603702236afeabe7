"""Message, and the one function that says whether an id is usable."""

import hashlib
import json
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from oncely.core import context
from oncely.core.errors import MessageError
from oncely.core.record import Claim, Key

if TYPE_CHECKING:
    from oncely.core.policy import Duration

T = TypeVar("T")

MAX_ID_LENGTH = 255
"""Characters. The column of the ledger's table is as wide."""
MAX_FINGERPRINT_LENGTH = 64
"""Characters. The column of the ledger's table is as wide."""
ID_IS_NO_STRING = "id is not a string"
"""The reason of `check_id`, for a source that turns everything into strings itself."""


def check_id(value: object, what: str = "id", max_length: int = MAX_ID_LENGTH) -> str:
    """Return `value` if it can identify a message (or, as `what` says, a consumer).

    Raises MessageError, its text the reason: missing, empty (also when only white space), not a
    string, too long, or with a character that no database stores.
    """
    if value is None:
        raise MessageError(f"missing {what}")
    if not isinstance(value, str):
        raise MessageError(f"{what} is not a string")
    is_plain = value.isascii() and value.isprintable() and not value.isspace()
    if is_plain and 0 < len(value) <= max_length:
        return value  # As most are: the rest finds out what is wrong.
    if not value or value.isspace():
        raise MessageError(f"empty {what}")
    if len(value) > max_length:
        raise MessageError(f"too long {what}")
    return _check_text(value, what)


def are_plain_ids(values: Collection[str | None]) -> bool:
    """Whether all are ids as most are: of printable ASCII, without a space. Of any others
    `check_id` tells; to ask it for each of many takes ten times as long.
    """
    try:
        together = "".join(values)  # type: ignore[arg-type]
    except TypeError:
        return False
    is_plain = together.isascii() and together.isprintable() and " " not in together
    return is_plain and all(values) and max(map(len, values), default=0) <= MAX_ID_LENGTH  # type: ignore[arg-type]


def check_ids(values: Collection[str | None]) -> None:
    """Raise MessageError as `check_id` does, if one of these cannot identify a message."""
    if not are_plain_ids(values):
        for value in values:
            check_id(value)


def _check_text(value: object, what: str) -> str:
    """Return `value` if it is text that every database and broker can keep."""
    if not isinstance(value, str):
        raise MessageError(f"{what} is not a string")
    if "\0" in value:
        raise MessageError(f"{what} with NUL")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise MessageError(f"{what} with a lone surrogate")
    return value


def check_key(key: Key) -> Key:
    """Return `key` if both of its halves are usable; raises MessageError as `check_id` does."""
    check_keys([key])
    return key


def check_keys(keys: Collection[Key]) -> None:
    """Raise MessageError as `check_id` does, if half of one of these is not usable."""
    checked: object = keys  # No consumer.
    for key in keys:
        if key.consumer is not checked:
            checked = check_id(key.consumer, "consumer")
    check_ids([key.message_id for key in keys])


def check_fingerprint(value: str | None) -> str | None:
    """Return `value` if every store can keep it. Raises MessageError."""
    if value is None:
        return None
    if not isinstance(value, str) or not (value.isascii() and value.isprintable()):
        raise MessageError("a fingerprint is printable ASCII")
    if not 0 < len(value) <= MAX_FINGERPRINT_LENGTH:
        raise MessageError(f"a fingerprint has 1 to {MAX_FINGERPRINT_LENGTH} characters")
    return value


def fingerprint_of(payload: bytes) -> str:
    """A short digest by which two payloads under one id are told apart.

    Raises MessageError for what is no bytes.
    """
    try:
        return hashlib.blake2b(payload, digest_size=16).hexdigest()
    except TypeError as error:
        raise MessageError("body is not bytes") from error


def _no_duplicate_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return names


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


_decode_json = json.JSONDecoder(
    object_pairs_hook=_no_duplicate_names, parse_constant=_no_constant
).decode


def read_json(body: bytes) -> Any:
    """A body as JSON.

    Raises MessageError where it is no JSON as RFC 8259 has it: not UTF-8, cut off, NaN, a name
    twice in one object, nested or long beyond what can be read safely.
    """
    try:
        return _decode_json(body.decode())
    except (ValueError, RecursionError) as error:
        raise MessageError("body is not JSON") from error


def idempotency_key(key: Key, step: str | None = None) -> str:
    """What an outside service may be handed to tell a repetition by; one for each step."""
    names = [*key] if step is None else [*key, step]
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Message:
    """The thing sent. `claim`, where it is set, says under which right a handler has it."""

    id: str
    body: bytes = b""
    type: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    time: datetime | None = None
    content_type: str = "application/json"
    key: str | None = None
    claim: Claim | None = field(default=None, compare=False, repr=False, kw_only=True)

    @classmethod
    def from_cloudevent(cls, headers: Mapping[str, Any], body: bytes) -> Self:
        """The message that a CloudEvent is, in binary or structured mode.

        `headers` are those of HTTP, Kafka (`ce_id`) or AMQP (`cloudEvents:id`), their content type
        among them. The id is made of the event's source and id. Raises MessageError for what is no
        CloudEvent, ConfigError where the package `cloudevents` is not installed.
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
    def idempotency_key(self) -> str:
        """The same for every delivery of this message to this consumer: 64 hexadecimal digits.

        Hand it to an outside service that accepts one. Raises MessageError outside a handler,
        where no consumer is known.
        """
        if self.claim is not None:
            return idempotency_key(self.claim.key)
        return self._processing.idempotency_key

    def step_key(self, name: str) -> str:
        """As `idempotency_key`, for the step of that name."""
        if self.claim is not None:
            return idempotency_key(self.claim.key, name)
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
        delay: "Duration | None" = None,
    ) -> str:
        """Inside a handler: send when it has succeeded, as `Processing.send` says."""
        return self._processing.send(destination, content, delay)

    @property
    def _processing(self) -> context.Processing:
        """What this message is processed by. Raises MessageError where it is another's."""
        processing = context.current()
        if processing.message is not None and processing.message.id != self.id:
            raise MessageError(
                f"{processing.message.id!r} is being processed here, and not {self.id!r}"
            )
        return processing


def check_message(message: Message, *, needs_id: bool = True) -> Message:
    """Return `message` if every store and broker can take it, whatever its annotations say.

    Raises MessageError, its text the reason. Unless it `needs_id`, it may have none.
    """
    if needs_id or message.id:
        check_id(message.id)
    if not isinstance(message.body, bytes):
        raise MessageError("body is not bytes")
    for what in ("type", "source", "content_type"):
        text = getattr(message, what)
        # As most are: the rest finds out what is wrong.
        if not (isinstance(text, str) and text.isascii() and text.isprintable()):
            _check_text(text, what)
    if message.key is not None:
        _check_text(message.key, "key")
    if type(message.headers) is not dict and not isinstance(message.headers, Mapping):
        raise MessageError("headers are no mapping")
    texts = (*message.headers, *message.headers.values())
    if texts and not all(isinstance(text, str) for text in texts):
        raise MessageError("a header is not text")
    if message.time is not None and not isinstance(message.time, datetime):
        raise MessageError("time is no datetime")
    return message
