"""Sessions that are there already: worked beside, and left as they were."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from oncely.core.errors import OncelyError
from oncely.spark.session import session

_ANSI = "spark.sql.ansi.enabled"
_PARTITIONS = "spark.sql.shuffle.partitions"
_TOLD = """
import json, sys
from oncely.spark.session import open_session

spark = open_session("told", {"spark.sql.shuffle.partitions": "5"})
names = ("spark.master", "spark.sql.ansi.enabled", "spark.sql.shuffle.partitions")
more = ("spark.sql.session.timeZone", "spark.driver.host", "spark.ui.showConsoleProgress")
print(json.dumps([spark.conf.get(name) for name in names + more]))
spark.stop()
"""


def test_what_a_configuration_says_holds(tmp_path: Path) -> None:
    """Spark's own file of defaults comes before ours, in which nobody has to be told the rest."""
    (tmp_path / "spark-defaults.conf").write_text(
        f"spark.master local[1]\n{_ANSI} true\n{_PARTITIONS} 3\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", _TOLD],
        env=os.environ | {"SPARK_CONF_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout) == ["local[1]", "true", "5", "UTC", "127.0.0.1", "false"]


def test_it_is_left_running_with_its_settings(spark: SparkSession) -> None:
    """What it was told holds beside it, under the settings that are asked for there; the user's
    session goes on with its own.
    """
    spark.conf.set(_ANSI, "true")
    try:
        with session("another", {_PARTITIONS: "5"}) as beside:
            assert beside.sparkContext is spark.sparkContext
            assert beside.conf.get(_ANSI) == "true"
            assert beside.conf.get(_PARTITIONS) == "5"
            assert SparkSession.getActiveSession().conf.get(_PARTITIONS) == "5"  # type: ignore[union-attr]
        assert SparkSession.getActiveSession().conf.get(_PARTITIONS) == "2"  # type: ignore[union-attr]
        assert spark.conf.get(_PARTITIONS) == "2"
        assert spark.range(3).count() == 3
    finally:
        spark.conf.set(_ANSI, "false")


def test_what_it_was_started_with_holds_over_our_defaults(spark: SparkSession) -> None:
    """Also a master that cannot be changed any more: it is passed over."""
    with session("another", {"spark.master": "local[7]"}) as beside:
        assert beside.conf.get(_PARTITIONS) == "2"
        assert beside.sparkContext.master == "local[2,4]"
    assert spark.range(1).count() == 1


def test_another_thread_has_none_of_its_own(spark: SparkSession) -> None:
    """What there is is used there, too, and not stopped."""

    def work() -> str:
        with session("another", {}) as beside:
            return beside.sparkContext.applicationId

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result() == spark.sparkContext.applicationId
    assert spark.range(1).count() == 1


def test_what_spark_raises_is_told_and_leaves_it(spark: SparkSession) -> None:
    """An error inside leaves the user's session the thread's own."""
    with pytest.raises(OncelyError), session("another", {}) as beside:
        beside.sql("SELECT no_such_column").collect()
    assert SparkSession.getActiveSession().conf.get(_ANSI) == spark.conf.get(_ANSI)  # type: ignore[union-attr]
