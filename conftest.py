"""The Python in README.md and docs/ runs as tests, each file in a folder of its own; and which
tests run in one process.
"""

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from prometheus_client.registry import Collector
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# The suites of stores are not files of tests themselves.
pytest.register_assert_rewrite("tests.conformance")

_SCOPES = {
    "spark": (
        *(
            f"docs/how-to/spark{name}.md"
            for name in (
                *("", "-failures", "-kafka", "-local"),
                *("-read", "-settings", "-tables"),
            )
        ),
        *(
            f"tests/spark/test_{name}.py"
            for name in (
                *("archive", "backfill", "counts_agree", "fronts", "handler_process", "places"),
                *("reader", "rows", "secrets", "session", "sink", "stores", "transactional"),
            )
        ),
    ),
    "spark pipelines": (
        *("tests/cli/test_pipeline_modes.py", "tests/cli/test_pipeline_bridge.py"),
        "tests/cli/test_pipeline_runs.py",
        *("tests/spark/test_batches.py", "tests/spark/test_lake_rows.py"),
    ),
    "kafka": ("tests/integration/test_kafka.py", "tests/integration/test_faststream_brokers.py"),
    "spark connect": (
        *(f"tests/spark/test_{name}.py" for name in ("batches_killed", "connect", "lake_killed")),
    ),
}
"""Files whose tests share a Spark or a Kafka, which takes longer to start than most tests take."""

_SCOPE_OF = {file: scope for scope, files in _SCOPES.items() for file in files}

_FIRST = (
    *_SCOPES,
    *("tests/conformance/test_stores.py", "tests/conformance/test_transports.py"),
    *("tests/chaos/test_chaos.py", "tests/crash/test_crashes.py"),
    "tests/spark_faults/test_spark_faults.py",
    *(
        "tests/integration/test_consumer_waiting.py",
        "tests/integration/test_hostile_handlers.py",
        "tests/integration/test_rabbitmq_faults.py",
        "tests/spark/test_submit.py",
    ),
    *("tests/web/test_browser.py", "tests/web/test_command.py"),
)
"""What takes longest, the longest first: none of it is to be left alone at the end."""


def _scope_of(nodeid: str) -> str:
    """Files stay together where tests run in several processes."""
    file = nodeid.partition("::")[0]
    return _SCOPE_OF.get(file, file)


class _ByScope(LoadScopeScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        return _scope_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _ByScope:
    """Whatever `--dist` says."""
    return _ByScope(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays to the end: a search for garbage would find none of it, neither now
    nor later, and goes through the tests' own objects alone.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The processes take the tests in this order."""
    for item in items:
        needs_spark = "shared_spark" in getattr(item, "fixturenames", ())
        if needs_spark and _scope_of(item.nodeid) not in _SCOPES:
            raise pytest.UsageError(f"{item.nodeid} needs Spark: put its file into _SCOPES")
    places = {scope: place for place, scope in enumerate(_FIRST)}
    items.sort(key=lambda item: places.get(_scope_of(item.nodeid), len(places)))


@pytest.fixture(scope="session", autouse=True)
def found_by_spark() -> Iterator[None]:
    """Spark's Python finds the tests' modules, and what is to be run first: Java keeps the
    environment that it began with, which may be an example's.
    """
    tests = Path(__file__).with_name("tests")
    with pytest.MonkeyPatch.context() as patched:
        for folder in (tests.parent, tests / "python_start"):
            patched.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def in_a_folder_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Examples may write beside themselves. The folder stays: Spark may have been started in it."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("docs"))
    yield
    os.chdir(before)


@pytest.fixture(scope="module", autouse=True)
def metrics_of_their_own() -> Iterator[None]:
    """What a file puts into the default registry, others of this process do not find there.
    Automatic for functions; examples ask for it.
    """
    registered: list[Collector] = []
    register = REGISTRY.register

    def noted(collector: Collector) -> None:
        register(collector)
        registered.append(collector)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(REGISTRY, "register", noted)
        yield
    for collector in registered:
        REGISTRY.unregister(collector)


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser()],
    patterns=["*.md"],
    fixtures=["found_by_spark", "in_a_folder_of_its_own", "metrics_of_their_own"],
).pytest()
