"""Signatures of webhooks: verifies that the sender knows the secret, and reads the delivery's id.

Each follows its sender's own description: GitHub "Validating webhook deliveries", Stripe "Verify
webhook signatures manually", the Standard Webhooks specification 1.0, Slack "Verifying requests
from Slack", Shopify "Verify the webhook".
"""

import base64
import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from oncely.core.durations import Duration, positive_seconds
from oncely.core.errors import ConfigError, MessageError
from oncely.core.json_body import read_json

Headers = Mapping[str, str]
"""Header fields by their names, in lower case."""
Secret = str | bytes
Reads = Callable[[Headers, bytes], str | None]
"""Reads a text from a delivery; None if the delivery does not have it."""
Checks = Callable[[Headers, bytes, float], None]
"""Raises SignatureError if, at that time, a delivery's signature is wrong or too old."""

_TOLERANCE: Duration = "5m"
_FORM = "application/x-www-form-urlencoded"
_EMPTY = "secret: it is empty; write the one that you share with the sender"


class SignatureError(MessageError):
    """A delivery's signature is wrong, or too old."""


@dataclass(frozen=True, slots=True)
class Verifier:
    """How deliveries of one sender are verified, and how their ids are read."""

    sender: str
    check: Checks
    message_id: Reads
    message_type: Reads
    reply: Callable[[bytes], str | None] = lambda _: None
    """Given the body: the response to a request that is not a message. Slack requires one."""
    json_in: Callable[[Headers, bytes], bytes | None] = lambda _, __: None
    """The JSON inside of a form; None if the body itself is the content."""


def github(secret: Secret | Sequence[Secret]) -> Verifier:
    """Deliveries of GitHub; the id is X-GitHub-Delivery. Of several secrets any one is accepted.
    From a form, which is GitHub's default, the JSON in it is taken.
    """
    return Verifier(
        "github",
        _hex_check("x-hub-signature-256", _keys(secret), "sha256="),
        header_id("X-GitHub-Delivery"),
        header_id("X-GitHub-Event"),
        json_in=_json_in_form,
    )


def shopify(secret: Secret | Sequence[Secret]) -> Verifier:
    """Deliveries of Shopify; the id is X-Shopify-Webhook-Id."""

    def read(headers: Headers, body: bytes) -> _Signed:
        return _Signed([_field(headers, "x-shopify-hmac-sha256")], body)

    check = _check(_keys(secret), read, _base64)
    return Verifier(
        "shopify", check, header_id("X-Shopify-Webhook-Id"), header_id("X-Shopify-Topic")
    )


def stripe(secret: Secret | Sequence[Secret], tolerance: Duration = _TOLERANCE) -> Verifier:
    """Events of Stripe; the id is the event's `id`."""

    def read(headers: Headers, body: bytes) -> _Signed:
        parts = _field(headers, "stripe-signature").split(",")
        pairs = [part.strip().partition("=") for part in parts]
        times = [value for name, _, value in pairs if name == "t"]
        if len(times) != 1:
            raise SignatureError("stripe-signature has no time")
        given = [value for name, _, value in pairs if name == "v1"]
        return _Signed(given, _as_bytes(f"{times[0]}.") + body, times[0])

    check = _check(_keys(secret), read, bytes.hex, tolerance)
    return Verifier("stripe", check, body_id("id"), body_id("type"))


def standard_webhooks(
    secret: Secret | Sequence[Secret], tolerance: Duration = _TOLERANCE
) -> Verifier:
    """Deliveries of any sender that follows Standard Webhooks; the id is webhook-id.

    A secret is base64 text, with or without the prefix `whsec_`; or bytes, used as they are.
    """

    def read(headers: Headers, body: bytes) -> _Signed:
        message_id, time = _field(headers, "webhook-id"), _field(headers, "webhook-timestamp")
        parts = _field(headers, "webhook-signature").split(" ")
        pairs = [part.partition(",") for part in parts]
        given = [signature for version, _, signature in pairs if version == "v1"]
        return _Signed(given, _as_bytes(f"{message_id}.{time}.") + body, time)

    check = _check(_keys(secret, _from_base64), read, _base64, tolerance)
    return Verifier("standard-webhooks", check, header_id("webhook-id"), body_id("type"))


def slack(secret: Secret | Sequence[Secret], tolerance: Duration = _TOLERANCE) -> Verifier:
    """Events of Slack; the id is `event_id`. Slack's challenge is answered."""

    def read(headers: Headers, body: bytes) -> _Signed:
        time = _field(headers, "x-slack-request-timestamp")
        given = _field(headers, "x-slack-signature")
        return _Signed([given], _as_bytes(f"v0:{time}:") + body, time)

    check = _check(_keys(secret), read, lambda digest: f"v0={digest.hex()}", tolerance)
    return Verifier("slack", check, body_id("event_id"), body_id("event", "type"), _challenge)


def hmac_sha256(
    secret: Secret | Sequence[Secret],
    header: str,
    message_id: Reads,
    *,
    prefix: str = "",
    message_type: Reads | None = None,
) -> Verifier:
    """Deliveries whose `header` is `prefix` and the HMAC-SHA256 of the raw body in hexadecimal
    digits; `message_id` reads their id: `header_id(...)` or `body_id(...)`.
    """
    if not isinstance(header, str) or not header.strip():
        raise ConfigError('header: it is empty; write the signature\'s, as in "X-Signature"')
    check = _hex_check(header.lower(), _keys(secret), prefix)
    check_reads(message_id, "message_id")
    return Verifier("hmac", check, message_id, message_type or (lambda _, __: None))


def header_id(name: str) -> Reads:
    """Reads the value of a header field."""
    wanted = name.lower()
    return lambda headers, _: headers.get(wanted)


def body_id(*path: str) -> Reads:
    """Reads a text from a JSON body; `path` is the names of the objects around it, and its own."""

    def read(_: Headers, body: bytes) -> str | None:
        value = read_json(body)
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return value if isinstance(value, str) else None

    return read


def check_reads(value: object, what: str) -> None:
    """Raise ConfigError for a value that cannot read an id from a delivery, such as a name."""
    if not callable(value):
        name = value if isinstance(value, str) else "X-Delivery-Id"
        raise ConfigError(
            f"{what}: {value!r} does not read an id from a delivery; write "
            f'{what}=header_id("{name}")'
        )


class _Signed(NamedTuple):
    """What a delivery says of its signature."""

    given: Sequence[str]
    """The signatures, one of which has to be right."""
    signed: bytes
    time: str | None = None
    """When it was signed, where that is signed, too."""


def _check(
    keys: Sequence[bytes],
    read: Callable[[Headers, bytes], _Signed],
    written: Callable[[bytes], str],
    tolerance: Duration = _TOLERANCE,
) -> Checks:
    """Checks what `read` finds in a delivery; `written` makes a signature of an HMAC-SHA256."""
    tolerance_s = positive_seconds(tolerance, "tolerance", 'refuse all; write "5m"')

    def check(headers: Headers, body: bytes, now: float) -> None:
        given, signed, time = read(headers, body)
        found = False
        for key in keys:
            expected = _as_bytes(written(hmac.new(key, signed, hashlib.sha256).digest()))
            for signature in given:
                found |= hmac.compare_digest(_as_bytes(signature), expected)
        if not found:
            raise SignatureError("the signature is wrong")
        if time is None:
            return
        if not (time.isascii() and time.isdigit()) or abs(now - int(time[:20])) > tolerance_s:
            raise SignatureError("it was signed too long ago, or a clock is wrong")

    return check


def _hex_check(header: str, keys: Sequence[bytes], prefix: str) -> Checks:
    def read(headers: Headers, body: bytes) -> _Signed:
        # Some senders write the digits in upper case.
        return _Signed([_field(headers, header).lower()], body)

    return _check(keys, read, lambda digest: f"{prefix.lower()}{digest.hex()}")


def _as_bytes(text: str) -> bytes:
    """The bytes of a text, also with lone surrogates, which some frameworks use for raw bytes."""
    return text.encode("utf-8", "surrogatepass")


def _field(headers: Headers, name: str) -> str:
    value = headers.get(name)
    if not value:
        raise SignatureError(f"{name} is missing")
    return value


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def _challenge(body: bytes) -> str | None:
    try:
        asked = read_json(body)
    except MessageError:
        return None  # Slack's commands are forms.
    is_asked = isinstance(asked, dict) and asked.get("type") == "url_verification"
    challenge = asked.get("challenge") if is_asked else None
    return challenge if isinstance(challenge, str) else None


def _json_in_form(headers: Headers, body: bytes) -> bytes | None:
    kind = headers.get("content-type", "").partition(";")[0]
    if kind.strip().lower() != _FORM:
        return None
    try:
        [payload] = parse_qs(body.decode(), errors="strict")["payload"]
    except (ValueError, KeyError):
        raise MessageError("the form has no payload") from None
    return payload.encode()


def _keys(
    secret: Secret | Sequence[Secret], of_text: Callable[[str], bytes] = str.encode
) -> list[bytes]:
    is_one = isinstance(secret, str | bytes | bytearray) or not isinstance(secret, Sequence)
    secrets: Sequence[Any] = [secret] if is_one else secret
    for each in secrets or [None]:
        if each is None or (isinstance(each, str | bytes | bytearray) and not each.strip()):
            raise ConfigError(_EMPTY)
        if not isinstance(each, str | bytes):
            # Only its type is shown: the value may be a secret.
            raise ConfigError(f"secret: a {type(each).__name__} is neither text nor bytes")
    return [each if isinstance(each, bytes) else of_text(each) for each in secrets]


def _from_base64(secret: str) -> bytes:
    try:
        key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except ValueError:
        raise ConfigError(
            'secret: it is not base64; copy it as the sender shows it, as in "whsec_MfKQ9r8GKYqr"'
        ) from None
    if not key:
        raise ConfigError(_EMPTY)
    return key
