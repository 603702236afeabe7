"""Mode `rows` under SIGKILL: however often its driver dies, each row is there once.

`ONCELY_TEST_ROWS` and `ONCELY_TEST_ROWS_KILLS` make it the long campaign.
"""

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).parent
ROWS = int(os.environ.get("ONCELY_TEST_ROWS", "20000"))
KILLS = int(os.environ.get("ONCELY_TEST_ROWS_KILLS", "1"))
DUPLICATES = 0.1


def generate(folder: Path) -> set[str]:
    """Payments as Parquet, a tenth of them copies; their ids."""
    draw = random.Random(11)
    ids = [uuid.UUID(int=draw.getrandbits(128)).hex for _ in range(int(ROWS * (1 - DUPLICATES)))]
    given = [*ids, *draw.choices(ids, k=ROWS - len(ids))]
    draw.shuffle(given)
    folder.mkdir()
    for part in range(4):
        chosen = given[part::4]
        amounts = pa.array([int(id_[:7], 16) for id_ in chosen], pa.int64())
        pq.write_table(pa.table({"id": chosen, "amount": amounts}), folder / f"{part}.parquet")
    return set(ids)


def count(connection: psycopg.Connection[tuple[int]]) -> int:
    """How many payments are there."""
    row = connection.execute("SELECT count(*) FROM payments").fetchone()
    assert row is not None
    return row[0]


def start(folder: Path, url: str, tmp_path: Path) -> subprocess.Popen[bytes]:
    """The driver, in a group of processes of its own."""
    with (tmp_path / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, HERE / "rows_run.py", folder, url, tmp_path / "spark"],
            stdout=log,
            stderr=log,
            cwd=tmp_path,
            start_new_session=True,
        )


def test_drivers_killed(postgresql_url: str, tmp_path: Path) -> None:
    """Killed each time it has got on, and started anew: exactly the unique rows."""
    ids = generate(tmp_path / "payments")
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE payments (id text NOT NULL, amount bigint NOT NULL)")
        for kill in range(KILLS):
            goal = len(ids) * (kill + 1) // (KILLS + 2)
            driver = start(tmp_path / "payments", postgresql_url, tmp_path)
            while count(connection) < goal:
                assert driver.poll() is None, (tmp_path / "log").read_text()[-3_000:]
                time.sleep(0.01)
            os.killpg(driver.pid, signal.SIGKILL)
            assert driver.wait() == -signal.SIGKILL
            assert goal <= count(connection) < len(ids)
        last = start(tmp_path / "payments", postgresql_url, tmp_path)
        assert last.wait() == 0, (tmp_path / "log").read_text()[-3_000:]
        found = connection.execute("SELECT id, amount FROM payments").fetchall()
        records = connection.execute(
            "SELECT status, count(*) FROM processed_messages GROUP BY status"
        ).fetchall()
    assert len(found) == len(ids)
    assert {id_ for id_, _ in found} == ids
    assert all(amount == int(id_[:7], 16) for id_, amount in found)
    assert records == [("sent", len(ids))]
