"""Spark Connect: the fronts from a client that is another process than the driver."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.spark.conftest import HERE, Effects
from tests.spark.programs import environment, program

from oncely import State, open_ledger


@pytest.mark.in_turn("a Spark of its own")
def test_every_front_through_a_server(remote: str, tmp_path: Path) -> None:
    """The report comes back from the driver; all fronts share a ledger; a mistake is a line."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0.json").write_text('{"id": "a"}\n{"id": "b"}\n{"id": "a"}\n')
    client = subprocess.run(
        [sys.executable, "-W", "error", str(HERE / "connect_client.py"), remote, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=tmp_path,
        env=environment(),
    )
    assert client.returncode == 0, client.stderr
    told = json.loads(client.stdout)
    first, again = told["first"], told["again"]
    assert (first["handled"], first["duplicates"]) == (2, {"input": 1, "ledger": 0})
    assert (again["handled"], again["duplicates"]) == (0, {"input": 0, "ledger": 3})
    assert first["quarantined"] == again["quarantined"] == {"missing id": 1}
    assert told["mistake"] == "option handlerr: there is no such key; did you mean 'handler'?"
    batch = json.loads((tmp_path / "batch.json").read_text())
    assert (batch["handled"], batch["duplicates"]) == (2, {"input": 1, "ledger": 0})
    ledger = open_ledger(f"sqlite:///{tmp_path}/ledger.db")
    counts = ledger.counts()
    ledger.close()
    done = State.COMPLETED
    assert counts == {("process", done): 3, ("batches", done): 2, ("stream", done): 2}
    assert Effects(tmp_path / "effects.jsonl").per_message() == {"a": 3, "b": 3, "c": 1}


_PIPELINE = """
[pipeline]
name = "remote"
consumer = "remote"
ledger = "sqlite:///ledger.db"
handler = "handlers:work"
checkpoint = "checkpoint"
quarantine = "quarantine"

[source]
format = "json"
path = "in"
schema = "id STRING, body STRING, source STRING"
options = { maxFilesPerTrigger = 1 }

[message]
id = "id"
body = "body"
source = "source"

[spark]
"spark.sql.shuffle.partitions" = "2"
"""


@pytest.mark.in_turn("a Spark of its own")
def test_a_pipeline_on_a_server(remote: str, tmp_path: Path) -> None:
    """With SPARK_REMOTE the batches run on the server, and their counts come back added up."""
    (tmp_path / "in").mkdir()
    effects = Effects(tmp_path / "effects.jsonl")
    for number, ids in enumerate((["a", "b", "a"], ["b", "c", ""])):
        rows = [{"id": id_, "body": "{}", "source": str(effects.path)} for id_ in ids]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "in" / f"{number}.json").write_text(lines)
    (tmp_path / "handlers.py").write_text((HERE / "handlers.py").read_text())
    (tmp_path / "pipeline.toml").write_text(_PIPELINE)

    def run() -> dict[str, Any]:
        command = subprocess.run(
            [program("oncely"), "pipeline", "run", "pipeline.toml", "--json"],
            capture_output=True,
            text=True,
            timeout=300,
            cwd=tmp_path,
            env=environment(SPARK_REMOTE=remote),
        )
        assert command.returncode == 0, command.stderr
        told: dict[str, Any] = json.loads(command.stdout)
        return told

    first, again = run(), run()
    assert (first["received"], first["handled"]) == (6, 3)
    assert first["duplicates"] == {"input": 2, "ledger": 0}
    assert first["quarantined"] == {"empty id": 1}
    assert again["received"] == 0
    assert effects.per_message() == {"a": 1, "b": 1, "c": 1}
