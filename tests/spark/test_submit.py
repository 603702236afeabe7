"""spark-submit: its cluster and its settings hold; oncely and a handler brought along."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.spark.conftest import HERE
from tests.spark.programs import QUICK_JAVA, environment, program
from tests.spark_faults.cluster import MASTER, WORKER, start_cluster
from tests.spark_faults.processes import Programs

import oncely

# Installed is what stands on sys.path when Python has started: there, oncely is taken away.
_NOT_INSTALLED = f"""
import sys
sys.path[:] = [path for path in sys.path if path != {str(Path(oncely.__file__).parents[1])!r}]
"""
_HANDLER = """
import os
import oncely

def refuse(message):
    raise ValueError("no such account")

def charge(message):
    log = os.open(message.source, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, f"{message.id} {oncely.__file__}\\n".encode())
    os.close(log)
"""
_PROGRAM = """
import json, sys
from pyspark.sql import SparkSession
from oncely import OncelyError
from oncely.spark import process, register

ledger, effects, quarantine = sys.argv[1:]
spark = SparkSession.builder.getOrCreate()
rows = [(id, effects) for id in ("a", "b", "a")]
messages = spark.createDataFrame(rows, "id string, source string")
options = {"ledger": ledger, "handler": "charging:charge", "quarantine": quarantine}
try:
    process(messages, consumer="tests", **options)
except OncelyError as error:
    print(error)
register(spark)
report = process(messages, consumer="tests", partitions=2, **options)
print(json.dumps(report.as_dict()))
(
    spark.createDataFrame([("c", effects), ("d", effects)], "id string, source string")
    .write.format("oncely")
    .options(consumer="tests", ledger=ledger, handler="charging:refuse", tries="1")
    .option("quarantine", quarantine)
    .mode("append")
    .save()
)
"""


@pytest.mark.in_turn("a Spark of its own")
def test_brought_along(tmp_path: Path) -> None:
    """Where no Python has oncely installed, driver, planner and workers take it from a zip."""
    (tmp_path / "sitecustomize.py").write_text(_NOT_INSTALLED)
    (tmp_path / "charging.py").write_text(_HANDLER)
    (tmp_path / "program.py").write_text(_PROGRAM)
    package = Path(oncely.__file__).parent
    archive = shutil.make_archive(str(tmp_path / "brought"), "zip", package.parent, package.name)
    effects = tmp_path / "effects"
    run = subprocess.run(
        [
            *(program("spark-submit"), "--master", "local[2,4]"),
            *("--conf", "spark.ui.enabled=false"),
            *("--py-files", f"{archive},{tmp_path / 'charging.py'}"),
            *(str(tmp_path / "program.py"), f"sqlite:///{tmp_path}/ledger.db", str(effects)),
            str(tmp_path / "quarantine"),
        ],
        cwd=tmp_path,
        env=environment(**QUICK_JAVA, PYTHONPATH=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    # Spark has looked for formats before it had the zip.
    assert "; install oncely in the Python that Spark runs, " in run.stdout
    # Who writes by the format alone has no report: what all failed is told all the same.
    said = "oncely: 2 of 2 new messages were not handled: 2 failed; last error: message '"
    assert said in run.stderr, run.stderr
    assert "ValueError: no such account; see: oncely list --consumer tests" in run.stderr
    told = json.loads(run.stdout.splitlines()[-1])
    assert (told["handled"], told["duplicates"]) == (2, {"input": 1, "ledger": 0})
    ids, files = zip(*(line.split() for line in effects.read_text().splitlines()), strict=True)
    assert sorted(ids) == ["a", "b"]
    assert all(file.endswith("brought.zip/oncely/__init__.py") for file in files)


_CLUSTERED = """
import json, os

LOG = os.path.join(os.path.dirname(os.path.abspath(__file__)), "effects.jsonl")

def handle(message):
    line = json.dumps({"id": message.id, "cwd": os.getcwd()})
    log = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, (line + "\\n").encode())
    os.close(log)
"""
_PIPELINE = """
[pipeline]
name = "submitted"
consumer = "submitted"
ledger = "env:LEDGER_SECRET"
handler = "handlers:handle"
checkpoint = "out/checkpoint"
quarantine = "out/quarantine"

[source]
format = "json"
path = "in"
schema = "id STRING, body STRING"

[message]
id = "id"

[spark]
"spark.master" = "local[1]"
"""


def _submit(programs: Programs, master: str, tmp_path: Path, ledger: str) -> dict[str, Any]:
    settings = {
        "spark.driver.host": MASTER,
        "spark.driver.bindAddress": MASTER,
        "spark.executor.memory": "512m",
        "spark.executorEnv.LEDGER_SECRET": ledger,
        # Few rows: generating code for them would take longer than it saves.
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.session.timeZone": "Europe/Berlin",
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
    }
    (tmp_path / "defaults.conf").write_text("spark.sql.ansi.enabled true\n")
    words = [word for pair in settings.items() for word in ("--conf", "=".join(pair))]
    out = tmp_path / "told.json"
    with out.open("wb") as written:
        run = programs.start(
            *("env", f"LEDGER_SECRET={ledger}", program("spark-submit"), "--master", master),
            *("--properties-file", str(tmp_path / "defaults.conf"), *words),
            *(str(HERE / "submitted.py"), str(tmp_path)),
            stdout=written,
        )
    programs.wait_for(lambda: run.poll() is not None, "the program does not end")
    assert run.returncode == 0, programs.last_words()
    # Spark-submit writes the program's stderr to stdout, too.
    told: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
    return told


@pytest.mark.in_turn("a Spark of its own")
@pytest.mark.timeout(600)
def test_a_cluster(tmp_path: Path, postgresql_url: str) -> None:
    """A pipeline runs where --master says; a ledger that is a file is refused."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0.json").write_text("".join(f'{{"id": "{n}"}}\n' for n in range(20)))
    (tmp_path / "handlers.py").write_text(_CLUSTERED)
    (tmp_path / "pipeline.toml").write_text(_PIPELINE)
    with Programs(tmp_path) as programs:
        master = start_cluster(programs, tmp_path / "work", cores=1, hosts=[WORKER])
        told = _submit(programs, master, tmp_path, postgresql_url)
    assert (told["pipeline"]["code"], told["pipeline"]["handled"]) == (0, 20)
    assert list(told["settings"].values()) == [master, "Europe/Berlin", "true"]
    lines = map(json.loads, (tmp_path / "effects.jsonl").read_text().splitlines())
    effects = {line["id"]: line["cwd"] for line in lines}
    assert len(effects) == 20
    assert all(folder.startswith(f"{tmp_path}/work-{WORKER}/") for folder in effects.values())
    code, said = told["file"]
    assert code == 2
    wrong = f"[pipeline] ledger: 'sqlite:///{tmp_path}/relative.db' is a file of one machine"
    assert f"oncely: pipeline.toml: {wrong}" in said
    said, jobs = told["process"]
    assert jobs == 0
    assert said == (
        f"ledger: 'sqlite:///{tmp_path}/relative.db' is a file of one machine, and Spark's tasks "
        'run on a cluster; write the URL of a server, such as "postgresql://user@host/db"'
    )
    assert "relative.db' is a file of one machine" in told["write"]
