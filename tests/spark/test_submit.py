"""spark-submit: oncely and a handler brought along with --py-files."""

import json
import shutil
import subprocess
from pathlib import Path

from tests.spark.conftest import environment
from tests.spark.programs import QUICK_JAVA, program

import oncely

# Installed is what stands on sys.path when Python has started: there, oncely is taken away.
_NOT_INSTALLED = f"""
import sys
sys.path[:] = [path for path in sys.path if path != {str(Path(oncely.__file__).parents[1])!r}]
"""
_HANDLER = """
import os
import oncely

def charge(message):
    log = os.open(message.source, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, f"{message.id} {oncely.__file__}\\n".encode())
    os.close(log)
"""
_PROGRAM = """
import json, sys
from pyspark.sql import SparkSession
from oncely.spark import process, register

ledger, effects, quarantine = sys.argv[1:]
spark = SparkSession.builder.getOrCreate()
register(spark)
rows = [(id, effects) for id in ("a", "b", "a")]
report = process(
    spark.createDataFrame(rows, "id string, source string"),
    consumer="tests",
    ledger=ledger,
    handler="charging:charge",
    quarantine=quarantine,
    partitions=2,
)
print(json.dumps(report.as_dict()))
"""


def test_brought_along(tmp_path: Path) -> None:
    """Where no Python has oncely installed, a zip of it does: the driver, its planner and the
    workers take it from there, tables are migrated, and handlers come along as a module.
    """
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
    told = json.loads(run.stdout.splitlines()[-1])
    assert (told["handled"], told["duplicates"]) == (2, {"input": 1, "ledger": 0})
    ids, files = zip(*(line.split() for line in effects.read_text().splitlines()), strict=True)
    assert sorted(ids) == ["a", "b"]
    assert all(file.endswith("brought.zip/oncely/__init__.py") for file in files)
