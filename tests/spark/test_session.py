"""Sessions that are there already: worked beside, and left as they were."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from pyspark.sql import SparkSession

from oncely.core.errors import OncelyError
from oncely.spark.session import session

_ANSI = "spark.sql.ansi.enabled"
_PARTITIONS = "spark.sql.shuffle.partitions"


def test_it_is_left_running_with_its_settings(spark: SparkSession) -> None:
    """Settings that are asked for hold beside it; it goes on with its own."""
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
