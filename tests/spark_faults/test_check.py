"""The checker sees what a fault must not leave: each kind of it, put there by hand."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from tests.chaos.check import Standing
from tests.spark_faults.check import (
    BATCHES,
    HELD,
    MODES,
    REPEATED,
    ROWS,
    TRANSACTIONAL,
    Left,
    faults,
)

COMPLETED = Standing("sent", 1)
COMPLETED_LATER = Standing("sent", 2)
IN_DOUBT = Standing("processing", 1)
ONCE = (HELD, TRANSACTIONAL, ROWS, BATCHES)

Case = tuple[Sequence[int], Standing | None]
"""The fences of a message's effects, and what the ledger knows of it."""

RIGHT: Mapping[str, tuple[Sequence[str], Case]] = {
    "once": (MODES, ([1], COMPLETED)),
    "once, after it was in doubt": (MODES, ([2], COMPLETED_LATER)),
    "in doubt, with its effect": ([HELD], ([1], IN_DOUBT)),
    "in doubt, without": ([HELD], ([], IN_DOUBT)),
    "again, in doubt between": ([REPEATED], ([1, 2], COMPLETED_LATER)),
}
WRONG: Mapping[str, tuple[Sequence[str], str, Case]] = {
    "never seen": (MODES, "lost", ([], None)),
    "no effect": (MODES, "lost", ([], COMPLETED)),
    "forgotten": (MODES, "lost", ([1], None)),
    "given up": (MODES, "lost", ([], Standing("failed", 5))),
    "not ended": ([TRANSACTIONAL, REPEATED, ROWS, BATCHES], "lost", ([1], IN_DOUBT)),
    "twice, by other claims": (ONCE, "twice", ([1, 2], COMPLETED_LATER)),
    "twice, by one claim": (MODES, "twice", ([1, 1], COMPLETED_LATER)),
    "twice, and never in doubt": (MODES, "twice", ([1, 2], COMPLETED)),
    "twice, and in doubt": ([HELD], "twice", ([1, 2], IN_DOUBT)),
}
PUBLISHED = ["one", "other", "one"]


def _left(case: Case, **told: Any) -> Left:
    """Of one message, beside another with which all is well."""
    fences, standing = case
    is_in_doubt = standing is not None and standing.status == "processing"
    audit = {
        "received": 3,
        "handled": 0,
        "duplicates": {"input": 0, "ledger": 1 if is_in_doubt else 3},
        "quarantined": {},
        "failed": 0,
        "in_doubt": 2 if is_in_doubt else 0,
    }
    records = {"other": COMPLETED} | ({"one": standing} if standing else {})
    effects = {"other": [1]} | ({"one": fences} if fences else {})
    return Left(effects, records, audit | told)


@pytest.mark.parametrize("name", RIGHT)
def test_right(name: str) -> None:
    """What may be is no fault."""
    modes, case = RIGHT[name]
    for mode in modes:
        assert faults(mode, PUBLISHED, _left(case)) == []


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name: str) -> None:
    """What must not be is a fault, of the right kind, and of the message that has it."""
    modes, verdict, case = WRONG[name]
    for mode in modes:
        found = faults(mode, PUBLISHED, _left(case))
        assert any(fault.startswith(f"{mode} one: {verdict}") for fault in found)
        assert not any(" other: " in fault for fault in found)


@pytest.mark.parametrize(
    "told",
    [
        {"received": 2},
        {"handled": 1},
        {"duplicates": {"input": 0, "ledger": 2}},
        {"in_doubt": 1},
        {"failed": 1},
        {"quarantined": {"no id": 1}},
    ],
)
def test_wrong_in_the_end(told: Mapping[str, Any]) -> None:
    """The last run knows what became of every delivery, and has nothing left to do."""
    for mode in MODES:
        assert len(faults(mode, PUBLISHED, _left(([1], COMPLETED), **told))) == 1


def test_in_doubt_and_not_told() -> None:
    """What is in doubt is counted as such."""
    told = {"duplicates": {"input": 0, "ledger": 3}, "in_doubt": 0}
    [fault] = faults(HELD, PUBLISHED, _left(([1], IN_DOUBT), **told))
    assert fault.startswith("the last run counts")


def test_a_stranger() -> None:
    """Nothing takes effect that nobody has published."""
    for mode in MODES:
        [fault] = faults(mode, ["other"], _left(([1], COMPLETED), received=1, duplicates=1))
        assert fault == "one was never published"
