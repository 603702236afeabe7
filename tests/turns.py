"""Chooses by the day what a run of the tests covers, where the same test would hold on each of
several stores, servers or cases: one of them a day, and so all of them in as many days.
"""

import os
import time
import zlib
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")

_A_DAY = {
    "a Spark of its own": 1,
    "Spark is killed": 1,
    "pipelines": 2,
    "batches": 2,
    "long on Spark": 2,
    "brokers fail": 3,
    "bridges": 2,
    "demos": 1,
    "processes are killed": 3,
    "lake writers are killed": 1,
    "long": 2,
    "planted bugs": 6,
    "drifts": 10,
    "wrong clocks": 2,
    "isolation levels": 3,
    "TLS": 1,
    "privileges": 4,
    "locks": 4,
    "useless sessions": 6,
    "broken off": 8,
    "waiting plans": 6,
    "other brokers of frameworks": 1,
    "failovers": 1,
}
"""How many of the tests with the mark `in_turn` and this name a run has."""

_TURN = "ONCELY_TEST_TURN"
_ALL = "ONCELY_TEST_ALL"


def fix_turn() -> int:
    """Today's number, or the one that the environment names. Stays in the environment: the other
    processes of a run that goes on over midnight read the same.
    """
    return int(os.environ.setdefault(_TURN, str(int(time.time() // 86400))))


def is_whole_run() -> bool:
    """Whether all choices are to be covered in this run."""
    return bool(os.environ.get(_ALL))


def in_turn(name: str, choices: Sequence[T], count: int = 1) -> Sequence[T]:
    """As many of the choices as `count` says: others with the next turn, and with the same turn
    others for another name. All of them if ONCELY_TEST_ALL is set.
    """
    if is_whole_run() or count >= len(choices):
        return choices
    first = zlib.crc32(name.encode()) + fix_turn() * count
    return [choices[(first + place) % len(choices)] for place in range(count)]


def not_today(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """The tests for which others with their mark stand today. Whoever asks for one test alone has
    it any day: there are no others to choose from.
    """
    groups = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if mark := item.get_closest_marker("in_turn"):
            groups[mark.args[0]].append(item)
    return {
        item
        for name, group in groups.items()
        for item in {*group}.difference(in_turn(name, group, _A_DAY[name]))
    }


def report_line() -> str:
    """For the run's header: what was chosen, and how to choose it again."""
    if is_whole_run():
        return f"{_ALL}: every choice, not only those of a turn"
    return f"turn {fix_turn()}: {_TURN}={fix_turn()} repeats it, {_ALL}=1 covers every choice"
