"""The Python in README.md and docs/ runs as tests, each file in a folder of its own; and which
tests run in one process.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from prometheus_client.registry import Collector
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

_SHARING_SPARK = {
    *("test_pipeline_modes.py", "test_pipeline_runs.py", "test_reconcile.py", "test_report.py"),
    *(
        "test_archive.py",
        "test_batches.py",
        "test_fronts.py",
        "test_rabbitmq_source.py",
        "test_reader.py",
    ),
    *("test_rows.py", "test_secrets.py", "test_session.py", "test_sink.py", "test_stores.py"),
    *("test_transactional.py", "spark.md", "spark-kafka.md", "spark-local.md"),
}


class _ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """Files stay together where tests run in several processes; and all that share a Spark do, of
    which one is enough.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        folder, _, name = file.rpartition("/")
        is_near = folder in ("tests/spark", "tests/cli", "docs/how-to")
        return "spark" if is_near and name in _SHARING_SPARK else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _ByFile:
    """Whatever `--dist` says."""
    return _ByFile(config, log)


@pytest.fixture(scope="module")
def in_a_folder_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Examples may write beside themselves. The folder stays: Spark may have been started in it."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("docs"))
    yield
    os.chdir(before)


@pytest.fixture(scope="module")
def metrics_of_their_own() -> Iterator[None]:
    """What they put into the default registry, others of this process do not find there."""
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
    fixtures=["in_a_folder_of_its_own", "metrics_of_their_own"],
).pytest()
