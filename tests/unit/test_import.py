"""`import oncely` is light, and every public name comes when it is asked for."""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

import oncely

HEAVY = (
    *("sqlalchemy", "alembic", "psycopg", "pymysql", "redis", "prometheus_client"),
    *("pyspark", "pydantic", "rich", "pyarrow", "cloudevents", "pika"),
)

IMPORT = """
import json, sys
before = {*sys.modules}
import oncely
print(json.dumps({"modules": sorted({*sys.modules} - before)}))
"""
ALL_NAMES = """
import json, sys
import oncely
for name in oncely.__all__:
    getattr(oncely, name)
print(json.dumps({"modules": sorted(sys.modules)}))
"""
HELP = """
import contextlib, io, json, sys
from oncely.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    main(["dead", "list", "--help"])
print(json.dumps({"modules": sorted(sys.modules)}))
"""


def in_fresh_process(program: str) -> Any:
    """What the program prints as JSON, in a process of its own."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        check=True,
        text=True,
        timeout=60,
    )
    return json.loads(ended.stdout)


def test_import_is_quick() -> None:
    """The import loads few modules, of which each takes its time."""
    assert len(in_fresh_process(IMPORT)["modules"]) < 100


MIDDLEWARE = """
import json, sys
from oncely.middleware import Logged, RateLimited, TimeLimit, Idempotent
print(json.dumps({"modules": sorted(sys.modules)}))
"""
NO_LOOP = """
import json, sys
import oncely
ledger = oncely.open_ledger("memory://")
ledger.complete(ledger.claim(oncely.Key("billing", "1")).claim)
modules = sorted(sys.modules)
# Its idle threads keep no program running.
oncely.AsyncLedger(ledger)
print(json.dumps({"modules": modules}))
"""


@pytest.mark.parametrize(
    ("program", "heavy"),
    [
        (IMPORT, HEAVY),
        (ALL_NAMES, HEAVY),
        (MIDDLEWARE, ("opentelemetry", "prometheus_client", "sqlalchemy")),
        (NO_LOOP, (*HEAVY, "asyncio")),
    ],
    ids=["import", "every name", "middleware", "a ledger in memory"],
)
def test_import_is_light(program: str, heavy: Sequence[str]) -> None:
    """Nobody loads a driver, Spark, what the CLI needs or asyncio without need of it."""
    assert not {*heavy} & {*in_fresh_process(program)["modules"]}


def test_help_is_light() -> None:
    """The help of a command imports nothing that commands work with."""
    modules = set(in_fresh_process(HELP)["modules"])
    assert not {*HEAVY, "oncely.ledger", "oncely.consumer", "oncely.spark"} & modules


def test_names() -> None:
    """Every public name is listed by dir(); one that does not exist is an AttributeError."""
    assert set(oncely.__all__) <= set(dir(oncely))
    with pytest.raises(AttributeError, match="nothing"):
        oncely.nothing  # type: ignore[attr-defined] # noqa: B018
