"""Batch handlers under SIGKILL: a driver is killed at every point at which that may matter.

`ONCELY_TEST_SPARK_FAULTS` is how many messages each target takes, at every point; without it few,
at some, and one target in turn.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.spark.batch_targets import CALLS, DATABASE, FOLDER, IDS_IN
from tests.spark.conftest import HERE
from tests.spark.programs import environment
from tests.turns import in_turn

_ALL = int(os.environ.get("ONCELY_TEST_SPARK_FAULTS", "0"))
POINTS = (
    *("batch_claimed", "batch_staged", "members_claimed", "before_batch_handler"),
    *("in_batch_handler", "after_batch_handler", "batch_handled", "members_completed"),
)
MESSAGES = _ALL // (len(POINTS) + 1) or 30
"""With each driver."""
KILLED_AT = POINTS if _ALL else ("members_claimed", "in_batch_handler", "batch_handled")
"""One driver after the other, of each target."""
_STATES = "SELECT status, count(*) FROM processed_messages WHERE provider = %s GROUP BY status"


def kill(
    remote: str, target: str, points: tuple[str, ...], url: str, folder: Path
) -> list[dict[str, Any]]:
    program = subprocess.run(
        [sys.executable, str(HERE / "batch_kills.py"), remote, target, str(MESSAGES), *points],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=folder,
        env=environment(**{FOLDER: str(folder), DATABASE: url}),
    )
    assert program.returncode == 0, program.stderr[-3_000:]
    return [json.loads(line) for line in program.stdout.splitlines()]


def states(url: str, consumer: str) -> dict[str, int]:
    with psycopg.connect(url) as connection:
        return dict(connection.execute(_STATES, [consumer]).fetchall())


def calls(folder: Path) -> dict[str, list[Any]]:
    """What handlers were given, by batch key."""
    given: dict[str, list[Any]] = {}
    for line in (folder / CALLS).read_text().splitlines():
        key, *what = json.loads(line)
        given.setdefault(key, []).append(what)
    return given


@pytest.fixture
def folder(tmp_path: Path, postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the targets are, for the drivers and for who looks at them."""
    with psycopg.connect(postgresql_url) as connection:
        connection.execute("CREATE TABLE batches (key text PRIMARY KEY)")
        connection.execute("CREATE TABLE rows (id text, body text)")
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv(DATABASE, postgresql_url)
    return tmp_path


@pytest.mark.in_turn("Spark is killed")
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("target", in_turn("target of batches", ["parquet", "table", "delta"]))
def test_killed_at_every_point(remote: str, postgresql_url: str, folder: Path, target: str) -> None:
    """Every message is in the target once: by a target that takes a batch twice as one, by one
    that knows its batch keys, and by a Delta table that knows its transactions. Where a handler is
    called again, it is with the same key and the same messages; where its effect is known, it is
    not called.
    """
    told = kill(remote, target, KILLED_AT, postgresql_url, folder)
    assert [each["killed"] for each in told] == [True] * len(KILLED_AT) + [False]
    expected = Counter(f"m{n:05}" for n in range(MESSAGES * (len(KILLED_AT) + 1)))
    assert Counter(IDS_IN[target]()) == expected
    assert states(postgresql_url, target) == {"sent": len(expected)}
    assert set(states(postgresql_url, f"{target}/batches")) == {"sent"}
    given = calls(folder)
    assert all(len({json.dumps(each) for each in whats}) == 1 for whats in given.values())
    again = sum(len(whats) - 1 for whats in given.values())
    assert (again > 0) == (target == "parquet")
    assert list((folder / "quarantine-batches").iterdir()) == []


@pytest.mark.in_turn("Spark is killed")
def test_killed_and_held(remote: str, postgresql_url: str, folder: Path) -> None:
    """What is in doubt is counted as that, and not handed over again; all else is handled."""
    points = ("members_claimed", "in_batch_handler")
    told = kill(remote, "held", points, postgresql_url, folder)
    assert [each["killed"] for each in told] == [True, True, False]
    # The first batch, which the second driver had taken up: once as such, and then as it comes.
    copies = -(-MESSAGES // 10)
    report = told[-1]["report"]
    assert report["in_doubt"] == MESSAGES + MESSAGES + copies
    assert report["handled"] == 2 * MESSAGES
    assert states(postgresql_url, "held") == {"processing": MESSAGES, "sent": 2 * MESSAGES}
    assert all(len(whats) == 1 for whats in calls(folder).values())
