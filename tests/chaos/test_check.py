"""The checker sees what a campaign must not leave: each kind of it, put there by hand."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from tests.chaos.check import (
    HELD,
    MODES,
    ORDERED,
    REPEATED,
    TRANSACTIONAL,
    Left,
    Standing,
    faults,
    key_of,
)

COMPLETED = Standing("sent", 1)
COMPLETED_LATER = Standing("sent", 2)
IN_DOUBT = Standing("processing", 1)
FAILED = Standing("failed", 1)

OTHER = "1"
"""With which all is well."""
PLAIN, FAILING, POISON, SENDING = "2", "3", "50", "7"
OTHERS = (TRANSACTIONAL, REPEATED, ORDERED)
"""Modes in which what failed, or is in doubt, runs again."""

Case = tuple[str, Sequence[int], Standing | None, bool]
"""A message, the fences of its effects, what the ledger knows of it, and whether it was set aside.
"""

RIGHT: Mapping[str, tuple[Sequence[str], Case]] = {
    "once": (MODES, (PLAIN, [1], COMPLETED, False)),
    "once, after it was in doubt": (MODES, (PLAIN, [2], COMPLETED_LATER, False)),
    "once, after it failed": (OTHERS, (FAILING, [2], COMPLETED_LATER, False)),
    "failed": ([HELD], (FAILING, [], FAILED, True)),
    "failed permanently": (MODES, (POISON, [], FAILED, True)),
    "in doubt, with its effect": ([HELD], (PLAIN, [1], IN_DOUBT, True)),
    "in doubt, without": ([HELD], (PLAIN, [], IN_DOUBT, True)),
    "in doubt before it could fail": ([HELD], (POISON, [], IN_DOUBT, True)),
    "in doubt, and given back": ([HELD], (PLAIN, [], None, True)),
    "completed after all": ([HELD], (PLAIN, [1], COMPLETED, True)),
    "again, in doubt between": ([REPEATED, ORDERED], (PLAIN, [1, 2], COMPLETED_LATER, False)),
}
WRONG: Mapping[str, tuple[Sequence[str], str, Case]] = {
    "never seen": (MODES, "lost", (PLAIN, [], None, False)),
    "no effect": (MODES, "lost", (PLAIN, [], COMPLETED, False)),
    "done, set aside": (OTHERS, "given up", (PLAIN, [1], COMPLETED, True)),
    "no effect, set aside": (MODES, "lost", (PLAIN, [], COMPLETED, True)),
    "not ended": (OTHERS, "lost", (PLAIN, [1], IN_DOUBT, False)),
    "given up": (OTHERS, "lost", (PLAIN, [], Standing("failed", 5), True)),
    "given up, though it fails once": (OTHERS, "lost", (FAILING, [], FAILED, True)),
    "failed, and nobody tries again": (OTHERS, "lost", (FAILING, [], FAILED, False)),
    "failed, and nobody is told": (MODES, "lost", (POISON, [], FAILED, False)),
    "set aside, and never failed": (OTHERS, "lost", (POISON, [], IN_DOUBT, True)),
    "with the effect that always fails": (MODES, "it took effect", (POISON, [1], FAILED, True)),
    "forgotten": ([HELD], "lost", (PLAIN, [1], None, True)),
    "failed, with its effect": ([HELD], "lost", (FAILING, [1], FAILED, True)),
    "failed, and cannot": ([HELD], "lost", (PLAIN, [], FAILED, True)),
    "failed, and ran again": ([HELD], "twice", (FAILING, [2], COMPLETED_LATER, True)),
    "in doubt, and nobody knows": ([HELD], "lost", (PLAIN, [], IN_DOUBT, False)),
    "twice, by other claims": (
        [TRANSACTIONAL, HELD],
        "twice",
        (PLAIN, [1, 2], COMPLETED_LATER, False),
    ),
    "twice, by one claim": (MODES, "twice", (PLAIN, [1, 1], COMPLETED_LATER, False)),
    "twice, and never in doubt": (MODES, "twice", (PLAIN, [1, 2], COMPLETED, False)),
    "twice, and set aside": ([HELD], "twice", (PLAIN, [1, 2], IN_DOUBT, True)),
}


def _left(case: Case, **changes: Any) -> Left:
    """Of one message, beside another with which all is well."""
    message_id, fences, standing, is_dead = case
    records = {OTHER: COMPLETED} | ({message_id: standing} if standing else {})
    dead = frozenset([message_id] if is_dead else [])
    effects = {OTHER: [1]} | ({message_id: fences} if fences else {})
    return Left(effects, records, dead, 0, {})._replace(**changes)


@pytest.mark.parametrize("name", RIGHT)
def test_right(name: str) -> None:
    """What may be is no fault."""
    modes, case = RIGHT[name]
    for mode in modes:
        assert faults(mode, [case[0], OTHER, case[0]], _left(case)) == []


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name: str) -> None:
    """What must not be is a fault, of the right kind, and of the message that has it."""
    modes, verdict, case = WRONG[name]
    for mode in modes:
        found = faults(mode, [case[0], OTHER, case[0]], _left(case))
        assert any(fault.startswith(f"{mode} {case[0]}: {verdict}") for fault in found)
        assert not any(f" {OTHER}: " in fault for fault in found)


@pytest.mark.parametrize(
    ("case", "sent", "wrong"),
    [
        ((SENDING, [1], COMPLETED, False), {SENDING: frozenset("a")}, None),
        ((SENDING, [1], COMPLETED, False), {}, "lost: what its handler sends"),
        ((SENDING, [1], COMPLETED, False), {SENDING: frozenset("ab")}, "what it sends has 2 ids"),
        ((SENDING, [1], IN_DOUBT, True), {SENDING: frozenset("a")}, "sent, and its handler has"),
        ((PLAIN, [1], COMPLETED, False), {PLAIN: frozenset("a")}, "sent, and its handler has"),
    ],
)
def test_sent(case: Case, sent: Mapping[str, frozenset[str]], wrong: str | None) -> None:
    """What is sent is not lost either, and leaves under one id, after its handler has succeeded."""
    found = faults(HELD, [case[0], OTHER], _left(case, sent=sent))
    assert len(found) == (wrong is not None)
    assert wrong is None or found[0].startswith(f"held {case[0]}: {wrong}")


@pytest.mark.parametrize(
    ("order", "count"),
    [
        (["1", "401", "11", "801"], 0),
        (["1", "1", "401", "401"], 0),
        (["401", "1"], 1),
        (["1", "401", "1"], 1),
        (["11", "1"], 0),
    ],
)
def test_order(order: Sequence[str], count: int) -> None:
    """Those of one key took effect in the order of publishing; of others it does not matter."""
    published = ["1", "11", "401", "801"]
    assert key_of("1") == key_of("401") == key_of("801") != key_of("11")
    known = dict.fromkeys(published, COMPLETED)
    left = Left({each: [1] for each in published}, known, frozenset(), 0, {}, order)
    assert len(faults(ORDERED, [*published, "1"], left)) == count


@pytest.mark.parametrize(
    "change",
    [
        {"waiting": 1},
        {"dead": frozenset(["99"])},
        {"sent": {"99": frozenset("a")}},
        {"effects": {OTHER: [1], PLAIN: [1], "99": [1]}},
        {"records": {OTHER: COMPLETED, PLAIN: COMPLETED, "99": COMPLETED}},
    ],
)
def test_wrong_as_a_whole(change: Mapping[str, Any]) -> None:
    """Nothing is left to be done, and nothing there that nobody has published."""
    for mode in MODES:
        right = _left((PLAIN, [1], COMPLETED, False))
        assert faults(mode, [PLAIN, OTHER], right) == []
        assert len(faults(mode, [PLAIN, OTHER], right._replace(**change))) == 1
