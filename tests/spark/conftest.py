"""Ways to write to the sink and to look at its effects."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.conditions import LIMIT_S
from tests.spark.programs import ConnectServer

from oncely import Ledger, open_ledger
from oncely.spark.sink.channel import DriverChannel
from oncely.spark.sink.counts import Counts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[2]
SCHEMA = "id string, body string, source string"


class Effects:
    """What handlers did, as they wrote it down: one line for each effect."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def per_message(self) -> Counter[str]:
        return Counter(line["id"] for line in self.lines())


@pytest.fixture
def _empty_databases() -> list[str]:
    """None that another test has left: Spark's workers remember what they have migrated."""
    return []


@pytest.fixture
def effects(tmp_path: Path) -> Effects:
    """The log of the handlers in handlers.py, whose path travels in a message's source."""
    return Effects(tmp_path / "effects.jsonl")


@pytest.fixture
def ledger_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/ledger.db"


@pytest.fixture
def ledger(sqlite_ledger_url: str, ledger_url: str) -> Iterator[Ledger]:
    """The ledger that the sink of a test writes to."""
    assert sqlite_ledger_url == ledger_url
    with closing(open_ledger(ledger_url)) as opened:
        yield opened


@pytest.fixture
def frame(spark: "SparkSession", effects: Effects) -> Callable[..., "DataFrame"]:
    """A DataFrame of messages from ids, or from (id, body)."""

    def make(*rows: Any, partitions: int = 1) -> "DataFrame":
        given = [row if isinstance(row, tuple) else (row, "{}") for row in rows]
        made = [(id_, body, str(effects.path)) for id_, body in given]
        return spark.createDataFrame(made, SCHEMA).coalesce(1).repartition(partitions)

    return make


Write = Callable[..., Counts]


@pytest.fixture
def write(tmp_path: Path, ledger: Ledger, ledger_url: str) -> Iterator[Write]:
    """Write a DataFrame of messages to the sink; return what it counted."""
    channels: list[DriverChannel] = []

    def write_once(messages: "DataFrame", function: str = "work", **options: str) -> Counts:
        channel = DriverChannel("127.0.0.1")
        channels.append(channel)
        settings = {
            "consumer": "tests",
            "ledger": ledger_url,
            "handler": f"handlers:{function}",
            "handler_path": str(HERE),
            "quarantine": str(tmp_path / "quarantine"),
            "lease": "30s",
            "channel": channel.address,
            "channel_token": channel.token,
        }
        messages.write.format("oncely").options(**settings | options).mode("append").save()
        return channel.committed()

    yield write_once
    for channel in channels:
        channel.close()


def drain(writer: "DataStreamWriter", checkpoint: Path) -> None:
    """Write what there is to be read, and no more. Raises what ends the query."""
    writer = writer.option("checkpointLocation", str(checkpoint))
    assert writer.trigger(availableNow=True).start().awaitTermination(int(LIMIT_S))


@pytest.fixture(scope="session")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Spark Connect server, one for all tests of a process."""
    server = ConnectServer(tmp_path_factory.mktemp("server"))
    try:
        yield server.start()
    finally:
        server.kill()
