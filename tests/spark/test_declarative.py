"""Spark Declarative Pipelines: the example, run by Spark's own command."""

import json
import shutil
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests.records import granted
from tests.spark.programs import QUICK_JAVA, environment, program

from oncely import Key, State, open_ledger

EXAMPLE = Path(__file__).parents[2] / "examples" / "declarative"


@pytest.mark.in_turn("a Spark of its own")
def test_the_example(tmp_path: Path) -> None:
    """Every message is sent once, but for what another worker has handled before."""
    project = tmp_path / "declarative"
    shutil.copytree(EXAMPLE, project, ignore=shutil.ignore_patterns("__pycache__"))
    spec = project / "spark-pipeline.yml"
    text = spec.read_text()
    assert "storage: file:///tmp/oncely-declarative\n" in text
    spec.write_text(text.replace("file:///tmp/oncely-declarative", f"file://{tmp_path}/storage"))
    ledger = open_ledger(f"sqlite:///{project}/ledger.db")
    ledger.migrate()
    ledger.complete(granted(ledger.claim(Key("notification-service", "n-2"))))
    run = subprocess.run(
        [
            *(program("spark-pipelines"), "run", "--conf", "spark.ui.enabled=false"),
        ],
        cwd=project,
        # The port of the server that Spark starts for itself is a free one under SPARK_TESTING.
        env=environment(**QUICK_JAVA, SPARK_TESTING="1"),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    sent = [json.loads(line) for line in (project / "sent.jsonl").read_text().splitlines()]
    assert sorted(line["id"] for line in sent) == ["n-1", "n-3"]
    assert {line["to"] for line in sent} == {"ada@example.org", "cid@example.org"}
    assert ledger.counts() == {("notification-service", State.COMPLETED): 3}
    ledger.close()
    aside = pq.read_table(project / "quarantine").to_pylist()
    assert [row["reason"] for row in aside] == ["missing id"]
