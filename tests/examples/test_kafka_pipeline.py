"""The starter of a backfill: a consumer and a pipeline on Spark share a topic and a ledger."""

from pathlib import Path

import pytest
from tests.examples.running import Starter
from tests.server_fixtures import available
from tests.servers import spark_kafka_jars

PACKAGES = '"spark.jars.packages" = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0"'


@pytest.mark.in_turn("a Spark of its own")
def test_kafka_pipeline(tmp_path: Path, kafka_url: str) -> None:
    """Each order is charged once, though two programs read each record, and some are copies."""
    jars = available(spark_kafka_jars)
    starter = Starter("kafka_pipeline", tmp_path)
    file = starter.folder / "pipeline.toml"
    before, after = file.read_text().split(PACKAGES)
    file.write_text(f'{before}"spark.jars" = "{jars}"{after}')
    said = starter.make(BROKERS=kafka_url.removeprefix("kafka://").partition("?")[0])
    assert "live: received 250, " in said
    assert ["received", "250"] in [line.split() for line in said.splitlines()]
    charged = [line.split()[0] for line in starter.lines("charges.txt")]
    assert sorted(charged) == sorted(f"order-{n}" for n in range(200))
