"""Bad input is refused before any store is asked; what only looks bad comes back from each."""

from collections.abc import Iterator
from contextlib import closing
from functools import reduce
from typing import Any

import pytest
from tests.conformance.conftest import SHARED, ledger_url_of
from tests.records import granted, record_of

from oncely import open_ledger
from oncely.core.commands import Duplicate
from oncely.core.errors import MessageError
from oncely.core.record import Key
from oncely.ledger.ledger import Ledger

KEY = Key("billing", "1")


def _nested(inner: Any, _: int) -> Any:
    return [inner]


BAD_METADATA: dict[str, Any] = {
    "NUL": {"a": ["x\0"]},
    "NUL in a name": {"a\0": 1},
    "lone surrogate": {"a": "\udfff"},
    "no JSON": {"a": object()},
    "NaN": {"a": float("nan")},
    "infinity": {"a": float("inf")},
    "itself": {},
    "deep": {"a": reduce(_nested, range(31), 0)},
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
    "NUL in a fingerprint": "a\0",
    "no ASCII": "ä",
    "bytes": b"f",
}


@pytest.fixture
def ledger(request: pytest.FixtureRequest) -> Iterator[Ledger]:
    """A ledger in memory: see also `on_each_store`."""
    kind = getattr(request, "param", "memory")
    url = "memory://" if kind == "memory" else ledger_url_of(kind, request)
    with closing(open_ledger(url)) as opened:
        yield opened


on_each_store = pytest.mark.parametrize("ledger", ["memory", *SHARED], indirect=True)
"""For what a store is given."""


@pytest.mark.parametrize(
    ("what", "bad"),
    [
        *(("metadata", bad) for bad in BAD_METADATA.values()),
        *(("fingerprint", bad) for bad in BAD_FINGERPRINTS.values()),
    ],
    ids=[*BAD_METADATA, *BAD_FINGERPRINTS],
)
def test_what_not_every_store_can_keep(ledger: Ledger, what: str, bad: Any) -> None:
    """Such metadata, or such a fingerprint, is a MessageError."""
    with pytest.raises(MessageError):
        ledger.claim(KEY, **{what: bad})
    assert ledger.counts() == {}


@on_each_store
def test_odd_metadata(ledger: Ledger) -> None:
    """What only looks bad comes back as it was."""
    for name, good in GOOD_METADATA.items():
        key = Key("billing", name)
        assert granted(ledger.claim(key, metadata=good)).metadata == good
        assert record_of(ledger, key).metadata == good


@on_each_store
def test_odd_results(ledger: Ledger) -> None:
    """Results come back whole, whatever letters they hold and however long they are."""
    for n, result in enumerate(("\0", "\ud800", "x" * 10_000_000, {"a": "🧾"})):
        key = Key("billing", str(n))
        ledger.complete(granted(ledger.claim(key)), result)
        outcome = ledger.claim(key)
        assert isinstance(outcome, Duplicate)
        assert outcome.record.result == result


@on_each_store
def test_errors_are_made_storable(ledger: Ledger) -> None:
    """An error's text is cut, its passwords masked, and what no database stores written out."""

    class Nasty(Exception):
        def __str__(self) -> str:
            return "a\0b\ud800 password=hunter2 " + "x" * 10_000_000

    ledger.fail(granted(ledger.claim(KEY)), Nasty())
    text = record_of(ledger, KEY).error
    assert text is not None
    assert len(text) <= 2_000
    assert "hunter2" not in text
    assert "\\0" in text


@on_each_store
def test_long_leases(ledger: Ledger) -> None:
    """A lease of a hundred years is one."""
    granted(ledger.claim(KEY, "36500d"))
    lease_until = record_of(ledger, KEY).lease_until
    assert lease_until is not None
    assert lease_until == pytest.approx(ledger.now() + 36_500 * 86_400, abs=60)
