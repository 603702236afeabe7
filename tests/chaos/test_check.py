"""The checker sees what a campaign must not leave: each kind of it, put there by hand."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from tests.chaos.check import HELD, MODES, REPEATED, TRANSACTIONAL, Left, Standing, faults

COMPLETED = Standing("sent", 1)
COMPLETED_LATER = Standing("sent", 2)
IN_DOUBT = Standing("processing", 1)

Case = tuple[Sequence[int], Standing | None, bool]
"""The fences of a message's effects, what the ledger knows of it, and whether it was set aside."""

RIGHT: Mapping[str, tuple[Sequence[str], Case]] = {
    "once": (MODES, ([1], COMPLETED, False)),
    "once, after it was in doubt": (MODES, ([2], COMPLETED_LATER, False)),
    "in doubt, with its effect": ([HELD], ([1], IN_DOUBT, True)),
    "in doubt, without": ([HELD], ([], IN_DOUBT, True)),
    "in doubt, and given back": ([HELD], ([], None, True)),
    "completed after all": ([HELD], ([1], COMPLETED, True)),
    "again, in doubt between": ([REPEATED], ([1, 2], COMPLETED_LATER, False)),
}
WRONG: Mapping[str, tuple[Sequence[str], str, Case]] = {
    "never seen": (MODES, "lost", ([], None, False)),
    "no effect": (MODES, "lost", ([], COMPLETED, False)),
    "done, set aside": ([TRANSACTIONAL, REPEATED], "given up", ([1], COMPLETED, True)),
    "no effect, set aside": (MODES, "lost", ([], COMPLETED, True)),
    "not ended": ([TRANSACTIONAL, REPEATED], "lost", ([1], IN_DOUBT, False)),
    "given up": ([TRANSACTIONAL, REPEATED], "lost", ([], Standing("failed", 5), True)),
    "forgotten": ([HELD], "lost", ([1], None, True)),
    "failed, with its effect": ([HELD], "lost", ([1], Standing("failed", 1), True)),
    "in doubt, and nobody knows": ([HELD], "lost", ([], IN_DOUBT, False)),
    "twice, by other claims": ([TRANSACTIONAL, HELD], "twice", ([1, 2], COMPLETED_LATER, False)),
    "twice, by one claim": (MODES, "twice", ([1, 1], COMPLETED_LATER, False)),
    "twice, and never in doubt": (MODES, "twice", ([1, 2], COMPLETED, False)),
    "twice, and set aside": ([HELD], "twice", ([1, 2], IN_DOUBT, True)),
}


def _left(case: Case, **changes: Any) -> Left:
    """Of one message, beside another with which all is well."""
    fences, standing, is_dead = case
    records = {"other": COMPLETED} | ({"one": standing} if standing else {})
    dead = frozenset(["one"] if is_dead else [])
    effects = {"other": [1]} | ({"one": fences} if fences else {})
    left = Left(effects, records, dead, 0, frozenset(["one", "other"]))
    return left._replace(**changes)


@pytest.mark.parametrize("name", RIGHT)
def test_right(name: str) -> None:
    """What may be is no fault."""
    modes, case = RIGHT[name]
    for mode in modes:
        assert faults(mode, ["one", "other", "one"], _left(case)) == []


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name: str) -> None:
    """What must not be is a fault, of the right kind, and of the message that has it."""
    modes, verdict, case = WRONG[name]
    for mode in modes:
        found = faults(mode, ["one", "other", "one"], _left(case))
        assert any(fault.startswith(f"{mode} one: {verdict}") for fault in found)
        assert not any(" other: " in fault for fault in found)


def test_not_sent() -> None:
    """What is sent in a transaction is not lost either."""
    left = _left(([1], COMPLETED, False), sent=frozenset(["other"]))
    [fault] = faults(TRANSACTIONAL, ["one", "other"], left)
    assert fault.startswith("transactional one: lost: what its handler sends")


@pytest.mark.parametrize(
    "change",
    [
        {"waiting": 1},
        {"dead": frozenset(["stranger"])},
        {"sent": frozenset(["one", "other", "stranger"])},
        {"effects": {"one": [1], "other": [1], "stranger": [1]}},
        {"records": {"one": COMPLETED, "other": COMPLETED, "stranger": COMPLETED}},
    ],
)
def test_wrong_as_a_whole(change: Mapping[str, Any]) -> None:
    """Nothing is left to be done, and nothing there that nobody has published."""
    for mode in MODES:
        right = _left(([1], COMPLETED, False))
        assert faults(mode, ["one", "other"], right) == []
        assert len(faults(mode, ["one", "other"], right._replace(**change))) == 1
