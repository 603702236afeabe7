"""Paths are the driver's, and what cannot be used is refused before anything runs."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException
from tests.spark.conftest import HERE

from oncely import ConfigError
from oncely.spark import process
from oncely.spark.sink.sink_options import read_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from tests.spark.conftest import Effects

Frame = Callable[..., "DataFrame"]
Settings = dict[str, str]


@pytest.fixture
def settings(ledger_url: str, tmp_path: Path) -> Settings:
    """What the sink is told, if a test wants nothing else."""
    return {
        "consumer": "tests",
        "ledger": ledger_url,
        "handler": "handlers:work",
        "handler_path": str(HERE),
        "quarantine": str(tmp_path / "quarantine"),
    }


WRONG: list[tuple[dict[str, str], str]] = [
    ({"handler": "handlers:gone"}, "handler: 'handlers:gone' cannot be imported: AttributeError"),
    ({"handler": "nowhere:f"}, "handler: 'nowhere:f' cannot be imported: ModuleNotFoundError"),
    ({"quarantine": "s3a://bucket/quarantine"}, "option quarantine: 's3a://bucket/quarantine' can"),
    ({"quarantine": "nowhere://bucket"}, "option quarantine: 'nowhere://bucket' cannot be opened:"),
    ({"quarantine": "/proc/quarantine"}, "option quarantine: '/proc/quarantine' cannot be written"),
    ({"quarantine": "FILE/below"}, "/file/below' cannot be written: Not a directory"),
    ({"handler": "handlers:book"}, "handler: book takes (message: oncely.core.message.Message, s"),
    (
        {"quarantine": "/dev/shm/x/", "archive": "/dev/shm/x/y"},
        "'/dev/shm/x/y' is in the folder of",
    ),
    ({"quarantine": "/x", "checkpointLocation": "/x"}, "quarantine: '/x' is in the folder of opt"),
    ({"archive": "s3a://bucket/archive"}, "archive: 's3a://bucket/archive' is not a folder that c"),
    ({"archive": "/nowhere/archive"}, " sees no folder '/nowhere/archive'"),
]


def jobs_of(spark: "SparkSession", group: str, work: Callable[[], object]) -> int:
    spark.sparkContext.setJobGroup(group, "")
    try:
        work()
    finally:
        spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]
    return len(spark.sparkContext.statusTracker().getJobIdsForGroup(group))


def said_of(work: Callable[[], object]) -> str:
    with pytest.raises((ConfigError, PySparkException)) as caught:
        work()
    return str(caught.value)


@pytest.mark.parametrize(("options", "said"), WRONG)
def test_what_cannot_be_used_is_refused_before_any_job(
    spark: "SparkSession",
    settings: Settings,
    tmp_path: Path,
    options: dict[str, str],
    said: str,
) -> None:
    """On the driver, in one line, whichever way it is written. Of a write by the format, Spark
    shuffles before it asks: here there is nothing to shuffle.
    """
    (tmp_path / "file").touch()
    told: dict[str, Any] = settings | {
        name: value.replace("FILE", str(tmp_path / "file")) for name, value in options.items()
    }
    messages = spark.range(2).selectExpr("string(id) AS id")
    heard = []

    def write_both_ways() -> None:
        heard.append(said_of(lambda: process(messages, **told)))
        heard.append(
            said_of(lambda: messages.write.format("oncely").options(**told).mode("append").save())
        )

    assert jobs_of(spark, said, write_both_ways) == 0
    by_process, by_format = heard
    assert said in by_process
    assert "\n" not in by_process
    assert said in by_format


def test_relative_paths_are_the_drivers(
    frame: Frame, effects: "Effects", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger, the handler and the quarantine are found from where the program is now."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "own_handlers.py").write_text((HERE / "handlers.py").read_text())
    monkeypatch.chdir(tmp_path)
    told: dict[str, Any] = {
        "ledger": "sqlite:///relative.db",
        "handler": "own_handlers:work",
        "handler_path": "here",
        "quarantine": "aside",
    }
    report = process(frame("a", "b", None, partitions=2), consumer="tests", **told)
    assert (report.handled, report.quarantined) == (2, 1)
    assert effects.per_message() == {"a": 1, "b": 1}
    assert (tmp_path / "relative.db").is_file()
    assert list((tmp_path / "aside").rglob("*.parquet"))


def test_what_a_secret_names_is_absolute_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the driver has it; one of the executors' alone is left to them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LEDGER_SECRET", "sqlite:///kept.db")
    (tmp_path / "url").write_text("postgresql://localhost/ledger")
    places = {
        "env:LEDGER_SECRET": f"sqlite:///{tmp_path}/kept.db",
        "env:NOT_SET_ANYWHERE": "env:NOT_SET_ANYWHERE",
        "file:url": f"file:{tmp_path}/url",
        "file:gone": f"file:{tmp_path}/gone",
        "sqlite:///plain.db": f"sqlite:///{tmp_path}/plain.db",
        "postgresql://localhost/ledger": "postgresql://localhost/ledger",
    }
    for given, absolute in places.items():
        read = read_options({"consumer": "c", "handler": "a:b", "ledger": given})
        assert read.address.location == absolute
