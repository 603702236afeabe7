"""Bad input is refused before any store is asked; odd input comes back from every store."""

import json
from collections.abc import Iterator
from contextlib import closing
from functools import reduce
from typing import Any

import pytest
from tests.conformance.conftest import SHARED, ledger_url_of
from tests.records import granted

from oncely import open_ledger
from oncely.core.commands import Duplicate, Mismatch
from oncely.core.errors import ConfigError, MessageError
from oncely.core.policy import Policy
from oncely.core.record import Key, State
from oncely.ledger import Ledger

KEY = Key("billing", "1")


def _nested(inner: Any, _: int) -> Any:
    return [inner]


BAD_IDS: dict[str, Any] = {
    "missing": None,
    "empty": "",
    "white space": " \t\n",
    "truth": True,
    "bytes": b"17",
    "NUL": "a\0b",
    "lone surrogate": "a\ud800",
    "too long": "x" * 256,
}
BAD_METADATA: dict[str, Any] = {
    "NUL": {"a": ["x\0"]},
    "NUL in a name": {"a\0": 1},
    "lone surrogate": {"a": "\udfff"},
    "no JSON": {"a": object()},
    "NaN": {"a": float("nan")},
    "infinity": {"a": float("inf")},
    "itself": {},
}
BAD_METADATA["itself"]["a"] = BAD_METADATA["itself"]
GOOD_METADATA: dict[str, Any] = {
    "an escape that is none": {"a": "\\u0000", "b": "\\\\u0000"},
    "letters": {"ключ": "🧾 \x01 \x1b[31m ' \" % _ \\"},
    "deep": {"a": reduce(_nested, range(29), 0)},
}
BAD_FINGERPRINTS: dict[str, Any] = {
    "too long": "f" * 65,
    "empty": "",
    "NUL": "a\0",
    "no ASCII": "ä",
    "bytes": b"f",
}


@pytest.fixture
def ledger(request: pytest.FixtureRequest) -> Iterator[Ledger]:
    """A ledger in memory, or in the store that is asked for."""
    kind = getattr(request, "param", "memory")
    url = "memory://" if kind == "memory" else ledger_url_of(kind, request)
    with closing(open_ledger(url)) as opened:
        yield opened


on_every_store = pytest.mark.parametrize("ledger", ["memory", *SHARED], indirect=True)


@pytest.mark.parametrize("bad", BAD_IDS.values(), ids=BAD_IDS)
def test_bad_ids(ledger: Ledger, bad: Any) -> None:
    """An id or a consumer that cannot be one is a MessageError, alone and in a batch."""
    for key in (Key("billing", bad), Key(bad, "1")):
        with pytest.raises(MessageError):
            ledger.claim(key)
        with pytest.raises(MessageError):
            ledger.claim_many([KEY, key])
        with pytest.raises(MessageError):
            ledger.find(key)
        with pytest.raises(MessageError):
            ledger.forget(key)
    assert ledger.counts() == {}


@pytest.mark.parametrize("bad", BAD_METADATA.values(), ids=BAD_METADATA)
def test_bad_metadata(ledger: Ledger, bad: Any) -> None:
    """Metadata that not every store can keep is a MessageError."""
    with pytest.raises(MessageError):
        ledger.claim(KEY, metadata=bad)
    assert ledger.counts() == {}


@pytest.mark.parametrize("good", GOOD_METADATA.values(), ids=GOOD_METADATA)
@on_every_store
def test_odd_metadata(ledger: Ledger, good: Any) -> None:
    """What only looks bad comes back as it was."""
    assert granted(ledger.claim(KEY, metadata=good)).record.metadata == good
    assert _found(ledger).metadata == good


@pytest.mark.parametrize("bad", BAD_FINGERPRINTS.values(), ids=BAD_FINGERPRINTS)
def test_bad_fingerprints(ledger: Ledger, bad: Any) -> None:
    """A fingerprint that not every store can keep is a MessageError."""
    with pytest.raises(MessageError):
        ledger.claim(KEY, fingerprint=bad)
    assert ledger.counts() == {}


@on_every_store
def test_another_payload(ledger: Ledger) -> None:
    """The same id with another fingerprint is a Mismatch; the longest one is kept whole."""
    ledger.claim(KEY, fingerprint="f" * 64)
    assert isinstance(ledger.claim(KEY, fingerprint="f" * 63 + "e"), Mismatch)


@pytest.mark.parametrize(
    "result", ["\0", "\ud800", "x" * 10_000_000, {"a": "🧾"}], ids=lambda r: repr(r)[:20]
)
@on_every_store
def test_odd_results(ledger: Ledger, result: Any) -> None:
    """Results come back whole, whatever letters they hold and however long they are."""
    ledger.complete(granted(ledger.claim(KEY)), result)
    outcome = ledger.claim(KEY)
    assert isinstance(outcome, Duplicate)
    assert outcome.record.result == result


def test_results_that_are_no_json(ledger: Ledger) -> None:
    """A result that is not JSON is a MessageError, and the claim stays."""
    claim = granted(ledger.claim(KEY))
    for bad in (object(), float("nan"), {1, 2}):
        with pytest.raises(MessageError):
            ledger.complete(claim, bad)
    assert _found(ledger).state is State.PROCESSING


@on_every_store
def test_errors_are_made_storable(ledger: Ledger) -> None:
    """An error's text is cut, its passwords masked, and what no database stores written out."""

    class Nasty(Exception):
        def __str__(self) -> str:
            return "a\0b\ud800 password=hunter2 " + "x" * 10_000_000

    ledger.fail(granted(ledger.claim(KEY)), Nasty())
    text = _found(ledger).error
    assert text is not None
    assert len(text) <= 2_000
    assert "hunter2" not in text
    assert "\\0" in text


@on_every_store
def test_notes_of_a_reset_are_made_storable(ledger: Ledger) -> None:
    """Who reset a record, and why, may hold any letters as well."""
    ledger.fail(granted(ledger.claim(KEY)), "no")
    ledger.reset(KEY, by="anna\0", why="\ud800 password=hunter2")
    note = _found(ledger).metadata["reset"]
    assert (note["by"], note["why"]) == ("anna\\0", "\\ud800 password=***")
    assert _found(ledger).error == "no"


@pytest.mark.parametrize("lease", ["0s", "-1s", "5", "", "5 minutes", "999999d", -300, None])
def test_bad_leases(ledger: Ledger, lease: Any) -> None:
    """A lease that is none is a ConfigError; None alone stands for the policy's."""
    if lease is None:
        granted(ledger.claim(KEY, lease))
        return
    with pytest.raises(ConfigError):
        ledger.claim(KEY, lease)
    with pytest.raises(ConfigError):
        Policy(lease=lease)
    assert ledger.counts() == {}


@on_every_store
def test_long_leases(ledger: Ledger) -> None:
    """A lease of a hundred years is one."""
    granted(ledger.claim(KEY, "36500d"))
    lease_until = _found(ledger).lease_until
    assert lease_until is not None
    assert lease_until == pytest.approx(ledger.now() + 36_500 * 86_400, abs=60)


@pytest.mark.parametrize("text", ["' OR 1=1 --", "a;DROP TABLE processed_messages", "%s", "{}"])
@on_every_store
def test_statements_in_names(ledger: Ledger, text: str) -> None:
    """What looks like SQL, or like a placeholder, is a name like others."""
    ledger.complete(granted(ledger.claim(Key(text, text))), text)
    assert ledger.counts() == {(text, State.COMPLETED): 1}
    assert [record.key.message_id for record in ledger.scan(text, text=text)] == [text]
    assert json.dumps(ledger.find(Key(text, text)), default=str)


def _found(ledger: Ledger) -> Any:
    record = ledger.find(KEY)
    assert record is not None
    return record
