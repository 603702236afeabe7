"""`import oncely` is light, and every public name comes when it is asked for."""

import json
from collections.abc import Sequence

import pytest
from tests.processes import printed

import oncely

HEAVY = (
    *("sqlalchemy", "alembic", "psycopg", "pymysql", "redis", "prometheus_client"),
    *("pyspark", "pydantic", "rich", "pyarrow", "cloudevents", "pika"),
)

IMPORT = """
import json, sys
before = {*sys.modules}
import oncely
print(json.dumps(sorted({*sys.modules} - before)))
"""
ALL_NAMES = """
import json, sys
import oncely
for name in oncely.__all__:
    getattr(oncely, name)
print(json.dumps(sorted(sys.modules)))
"""
HELP = """
import contextlib, io, json, sys
from oncely.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    main(["dead", "list", "--help"])
print(json.dumps(sorted(sys.modules)))
"""


def modules_of(program: str) -> set[str]:
    """The modules that the program says it has loaded, in a process of its own."""
    return {*json.loads(printed(program))}


def test_import_is_quick() -> None:
    """The import loads few modules, of which each takes its time."""
    assert len(modules_of(IMPORT)) < 100


MIDDLEWARE = """
import json, sys
from oncely.middleware import Logged, RateLimited, TimeLimit, Idempotent
print(json.dumps(sorted(sys.modules)))
"""
NO_LOOP = """
import json, sys
import oncely
ledger = oncely.open_ledger("memory://")
ledger.complete(ledger.claim(oncely.Key("billing", "1")).claim)
modules = sorted(sys.modules)
# Its idle threads keep no program running.
oncely.AsyncLedger(ledger)
print(json.dumps(modules))
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
    assert not {*heavy} & modules_of(program)


def test_help_is_light() -> None:
    """The help of a command imports nothing that commands work with."""
    heavy = {*HEAVY, "oncely.ledger", "oncely.consumer", "oncely.spark"}
    assert not heavy & modules_of(HELP)


def test_names() -> None:
    """Every public name is listed by dir(); one that does not exist is an AttributeError."""
    assert set(oncely.__all__) <= set(dir(oncely))
    with pytest.raises(AttributeError, match="nothing"):
        oncely.nothing  # type: ignore[attr-defined] # noqa: B018
