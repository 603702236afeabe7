"""Signatures of webhooks: odd corners of each sender's description, and mistakes in settings."""

import base64
import hashlib
import hmac
from collections.abc import Callable
from typing import Any

import pytest

from oncely import http
from oncely.core.errors import ConfigError
from oncely.http import SignatureError, Verifier, header_id

BODY = '{"id": "é"}'.encode()
NOW = 1_700_000_000


def digest(secret: str, signed: bytes) -> bytes:
    return hmac.new(secret.encode(), signed, hashlib.sha256).digest()


def takes(verifier: Verifier, **fields: str) -> bool:
    """Whether it takes a delivery with these header fields."""
    try:
        verifier.check({n.replace("_", "-"): v for n, v in fields.items()}, BODY, NOW)
    except SignatureError:
        return False
    return True


def test_stripe_with_several_signatures() -> None:
    """Any v1 signature counts, for any secret; v0 never does; a second time is refused."""
    verifier = http.stripe(["old", b"new"])
    good, bad = (digest(key, f"{NOW}.".encode() + BODY).hex() for key in ("new", "none"))
    for signature, is_taken in {
        f"t={NOW},v1={bad},v1={good}": True,
        f"t={NOW}, v1={good}, v0={bad}": True,
        f"v1={good},t={NOW}": True,
        f"t={NOW},v0={good}": False,
        f"t={NOW},v1={bad}": False,
        f"t={NOW},t={NOW},v1={good}": False,
        f"v1={good}": False,
        f"t={NOW},v1={good.upper()}": False,
        f"t={NOW + 1},v1={good}": False,
        f"t=,v1={good}": False,
        "t=,,=,v1": False,
    }.items():
        assert takes(verifier, stripe_signature=signature) is is_taken, signature


@pytest.mark.parametrize("secret", ["whsec_c2VjcmV0", "c2VjcmV0", b"secret"])
def test_secrets_of_standard_webhooks(secret: str | bytes) -> None:
    """A secret is taken with its prefix, without, and as bytes; several signatures may come."""
    verifier = http.standard_webhooks(secret)
    signed = base64.b64encode(digest("secret", f"d-1.{NOW}.".encode() + BODY)).decode()
    times = {"webhook_id": "d-1", "webhook_timestamp": str(NOW)}
    for signature, is_taken in {
        f"v1,AAAA v1,{signed}": True,
        f"v1a,{signed}": False,
        f"v2,{signed}": False,
        signed: False,
        f"v1,{signed.rstrip('=')}": False,
        "v1,": False,
    }.items():
        assert takes(verifier, **times, webhook_signature=signature) is is_taken, signature
    # The id is signed, too.
    other = {**times, "webhook_id": "d-2"}
    assert not takes(verifier, **other, webhook_signature=f"v1,{signed}")


def test_hexadecimal_digits_have_no_case() -> None:
    """Senders that write HMACs in capital letters are understood."""
    signature = digest("s", BODY).hex().upper()
    verifier = http.hmac_sha256("s", "X-Signature", header_id("X-Id"), prefix="sha256=")
    assert takes(verifier, x_signature=f"sha256={signature}")
    assert not takes(verifier, x_signature=signature)


def test_fields_with_bytes_that_are_not_text() -> None:
    """Some frameworks hand over such bytes as lone surrogates: no signature, and no time."""
    odd = "\udce9"
    assert not takes(http.github("s"), x_hub_signature_256=f"sha256={odd}")
    assert not takes(http.shopify("s"), x_shopify_hmac_sha256=odd)
    assert not takes(http.stripe("s"), stripe_signature=f"t={odd},v1={odd}")
    assert not takes(http.slack("s"), x_slack_request_timestamp=odd, x_slack_signature=odd)
    standard = {"webhook_id": odd, "webhook_timestamp": odd, "webhook_signature": f"v1,{odd}"}
    assert not takes(http.standard_webhooks(b"s"), **standard)


def test_every_secret_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long it takes tells nobody which secret was right."""
    compared: list[bytes] = []
    compare = hmac.compare_digest

    def noting(given: bytes, expected: bytes) -> bool:
        compared.append(expected)
        return compare(given, expected)

    monkeypatch.setattr(hmac, "compare_digest", noting)
    assert takes(http.github(["s", "t", "u"]), x_hub_signature_256=f"sha256={_hex('s')}")
    assert len(set(compared)) == 3


def _hex(secret: str) -> str:
    return digest(secret, BODY).hex()


# ---- Mistakes ------------------------------------------------------------------------------------

MAKES: list[Callable[[Any], Verifier]] = [
    http.github,
    http.shopify,
    http.stripe,
    http.slack,
    http.standard_webhooks,
    lambda secret: http.hmac_sha256(secret, "X-Signature", header_id("X-Id")),
]


EMPTY, OF_NO_USE = "it is empty; write the one", r"an? \w+ is neither text nor bytes"


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize(
    ("secret", "said"),
    [
        *((secret, EMPTY) for secret in (None, "", b"", [], [""], ["c2VjcmV0", None], [b""])),
        *((secret, EMPTY) for secret in ("   ", "\n", b" \t", ["c2VjcmV0", " "])),
        *((secret, OF_NO_USE) for secret in (7, {"s": 1}, [7], bytearray(b"s"))),
    ],
)
def test_what_is_not_a_secret(make: Callable[[Any], Verifier], secret: Any, said: str) -> None:
    """Whoever has set none, as when an environment variable is missing, is told so at once; what is
    neither text nor bytes is told by its type, and not shown.
    """
    with pytest.raises(ConfigError, match=f"secret: {said}"):
        make(secret)


def test_a_secret_of_nothing_but_its_prefix() -> None:
    """Its key would be empty, and everybody could sign."""
    with pytest.raises(ConfigError, match="secret: it is empty"):
        http.standard_webhooks("whsec_")
    with pytest.raises(ConfigError, match="secret: it is not base64"):
        http.standard_webhooks("whsec_é")


@pytest.mark.parametrize(
    "make", [http.stripe, http.slack, lambda s, t: http.standard_webhooks(s, t)]
)
def test_no_tolerance(make: Callable[[str, Any], Verifier]) -> None:
    """Zero would refuse every delivery: other libraries take it for no limit."""
    with pytest.raises(ConfigError, match="tolerance: zero would refuse all"):
        make("c2VjcmV0", 0)
    with pytest.raises(ConfigError, match="tolerance: -1 is negative"):
        make("c2VjcmV0", -1)


@pytest.mark.parametrize("header", ["", " ", None])
def test_no_header(header: Any) -> None:
    """A signature stands in a header field that has a name."""
    with pytest.raises(ConfigError, match="header: "):
        http.hmac_sha256("s", header, header_id("X-Id"))


def test_slack_beside_the_clock() -> None:
    """A time that is signed and is not a number is refused; so are other versions."""
    for moment, version, is_taken in (
        (str(NOW), "v0", True),
        (str(NOW), "v1", False),
        (f"+{NOW}", "v0", False),
        (f"{NOW}.0", "v0", False),
        ("٣", "v0", False),
        ("9" * 5000, "v0", False),
    ):
        signature = digest("s", f"v0:{moment}:".encode() + BODY).hex()
        fields = {
            "x_slack_request_timestamp": moment,
            "x_slack_signature": f"{version}={signature}",
        }
        assert takes(http.slack("s"), **fields) is is_taken, moment
