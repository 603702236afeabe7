"""Message, and the one function that says whether an id is usable."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from oncely.core.errors import MessageError
from oncely.core.record import Claim, Key

MAX_ID_LENGTH = 255
"""Characters. The column of the ledger's table is as wide."""
MAX_FINGERPRINT_LENGTH = 64
"""Characters. The column of the ledger's table is as wide."""
ID_IS_NO_STRING = "id is not a string"
"""The reason of `check_id`, for a source that turns everything into strings itself."""


def check_id(value: object, what: str = "id") -> str:
    """Return `value` if it can identify a message (or, as `what` says, a consumer).

    Raises MessageError, its text the reason: missing, empty (also when only white space), not a
    string, too long, or with a character that no database stores.
    """
    if value is None:
        raise MessageError(f"missing {what}")
    if not isinstance(value, str):
        raise MessageError(f"{what} is not a string")
    if not value or value.isspace():
        raise MessageError(f"empty {what}")
    if len(value) > MAX_ID_LENGTH:
        raise MessageError(f"too long {what}")
    if "\0" in value:
        raise MessageError(f"{what} with NUL")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise MessageError(f"{what} with a lone surrogate")
    return value


def check_key(key: Key) -> Key:
    """Return `key` if both of its halves are usable; raises MessageError as `check_id` does."""
    check_id(key.consumer, "consumer")
    check_id(key.message_id)
    return key


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
    """A short digest by which two payloads under one id are told apart."""
    return hashlib.blake2b(payload, digest_size=16).hexdigest()


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


@dataclass(frozen=True, slots=True)
class Message:
    """The thing sent. `claim` is set while a handler has it, and says under which right."""

    id: str
    body: bytes = b""
    type: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    time: datetime | None = None
    content_type: str = "application/json"
    key: str | None = None
    claim: Claim | None = field(default=None, compare=False, repr=False, kw_only=True)

    def json(self) -> Any:
        """The body as JSON.

        Raises MessageError where the body is no JSON as RFC 8259 has it: not UTF-8, cut off, NaN,
        a name twice in one object, nested or long beyond what can be read safely.
        """
        try:
            return _decode_json(self.body.decode())
        except (ValueError, RecursionError) as error:
            raise MessageError("body is not JSON") from error

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
        if self.claim is None:
            raise MessageError("idempotency_key is known only while a consumer handles the message")
        names = json.dumps([self.claim.key.consumer, self.id])
        return hashlib.sha256(names.encode()).hexdigest()
