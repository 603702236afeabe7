"""RabbitMQ as a source of Spark, to the sink and a ledger in SQLite."""

import pickle
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pika
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from tests.conditions import wait_until
from tests.servers import Rabbitmq
from tests.spark.conftest import HERE

from oncely import Ledger, Message, State, open_transport
from oncely.spark.rabbitmq.rabbitmq_source import RabbitmqDataSource
from oncely.spark.sink.message_rows import MESSAGE_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from tests.spark.conftest import Effects, Write

_DEADLINE_S = 240.0
_QUEUE = "orders"
PASSWORD = "pa55-of-the-broker"

Publish = Callable[[str, Sequence[str]], None]


@pytest.fixture
def publish(effects: "Effects") -> Publish:
    """Put messages into the queue at a URL; their handler writes to `effects`."""

    def put(url: str, ids: Sequence[str]) -> None:
        with closing(open_transport(url)) as transport:
            messages = [Message(id_, b"{}", source=str(effects.path)) for id_ in ids]
            transport.publish(_QUEUE, messages)

    return put


def is_empty(url: str) -> bool:
    with closing(open_transport(url)) as transport:
        return transport.is_drained(_QUEUE)


class Stream:
    """A query from the queue to the sink, with one checkpoint and one spool."""

    def __init__(self, spark: "SparkSession", folder: Path, ledger_url: str) -> None:
        self._spark = spark
        self._ledger_url = ledger_url
        self.spool = folder / "spool"
        self.checkpoint = folder / "checkpoint"
        self.quarantine = folder / "quarantine"

    def start(self, url: str, *, available_now: bool, **options: str) -> "StreamingQuery":
        source = {"url": url, "queue": _QUEUE, "spool": str(self.spool)}
        rows = self._spark.readStream.format("oncely-rabbitmq").options(**source | options).load()
        trigger = {"availableNow": True} if available_now else {"processingTime": "0 seconds"}
        return (
            rows.repartition(4, "id")
            .writeStream.format("oncely")
            .options(
                checkpointLocation=str(self.checkpoint),
                consumer="tests",
                ledger=self._ledger_url,
                handler="handlers:work",
                handler_path=str(HERE),
                quarantine=str(self.quarantine),
            )
            .trigger(**trigger)
            .start()
        )

    def run(self, url: str, **options: str) -> list[int]:
        """Run it through what the queue has; return how many rows each batch had."""
        query = self.start(url, available_now=True, **options)
        assert query.awaitTermination(int(_DEADLINE_S))
        return [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]

    def segments(self) -> list[int]:
        return sorted(int(file.stem[-12:]) for file in self.spool.glob("*.parquet"))


@pytest.fixture
def stream(spark: "SparkSession", tmp_path: Path, ledger_url: str) -> Stream:
    return Stream(spark, tmp_path, ledger_url)


@pytest.mark.in_turn("RabbitMQ into Spark")
def test_everything_takes_effect_once(
    stream: Stream, rabbitmq_url: str, publish: Publish, effects: "Effects", ledger: Ledger
) -> None:
    """Copies, a lost commit and a lost checkpoint change nothing; spooled segments go."""
    ids = [f"m{n}" for n in range(900)]
    publish(rabbitmq_url, ids + ids[:100])
    batches = stream.run(rabbitmq_url, max_messages_per_batch="250", keep_segments="2")
    # A broker that pauses ends a batch before it is full.
    assert (sum(batches), max(batches)) == (1000, 250)
    assert is_empty(rabbitmq_url)
    # The last batch is committed when there is another one.
    last = len(batches)
    assert stream.segments() == [last - 2, last - 1, last]

    publish(rabbitmq_url, ["later"])
    assert stream.run(rabbitmq_url, keep_segments="2") == [1]
    assert stream.segments() == [last - 1, last, last + 1]

    for file in stream.checkpoint.glob(f"commits/*{last}*"):
        file.unlink()
    assert stream.run(rabbitmq_url) == [1]

    shutil.rmtree(stream.checkpoint)
    publish(rabbitmq_url, ["last"])
    assert sum(stream.run(rabbitmq_url)) == sum(batches[-2:]) + 1 + 1
    assert effects.per_message() == dict.fromkeys([*ids, "later", "last"], 1)
    assert ledger.counts() == {("tests", State.COMPLETED): 902}


@pytest.mark.in_turn("RabbitMQ into Spark")
def test_what_was_spooled_and_never_an_offset_is_read_first(
    stream: Stream, rabbitmq_url: str, publish: Publish, effects: "Effects"
) -> None:
    """A driver that dies after it has acknowledged leaves segments that the next one finds."""
    options = {"url": rabbitmq_url, "queue": _QUEUE, "spool": str(stream.spool)}
    publish(rabbitmq_url, ["a", "b"])
    stream.run(rabbitmq_url)
    publish(rabbitmq_url, ["c", "d"])
    reader = RabbitmqDataSource(options).streamReader(MESSAGE_SCHEMA)
    assert reader.latestOffset({"segment": 1}, reader.getDefaultReadLimit()) == {"segment": 2}
    reader.stop()
    assert is_empty(rabbitmq_url)
    publish(rabbitmq_url, ["e"])
    assert stream.run(rabbitmq_url) == [2, 1]
    assert effects.per_message() == dict.fromkeys("abcde", 1)


@pytest.mark.in_turn("Spark is killed")
def test_rabbitmq_restarted_in_the_middle(
    stream: Stream, private_rabbitmq: Rabbitmq, publish: Publish, effects: "Effects"
) -> None:
    """A query goes on when the broker is back: all that was confirmed has its one effect."""
    url = private_rabbitmq.url
    ids = [f"m{n}" for n in range(600)]
    publish(url, ids[:300])
    query = stream.start(url, available_now=False, max_messages_per_batch="100", wait="0.2s")
    try:
        _wait(lambda: len(effects.per_message()) >= 100, query)
        private_rabbitmq.kill()
        private_rabbitmq.start()
        publish(url, ids[300:])
        _wait(lambda: len(effects.per_message()) == 600, query)
    finally:
        query.stop()
    assert set(effects.per_message().values()) == {1}
    assert is_empty(url)


@pytest.mark.in_turn("RabbitMQ into Spark")
def test_what_is_no_message_is_set_aside(
    stream: Stream, rabbitmq_url: str, publish: Publish, effects: "Effects"
) -> None:
    """Messages of other programs: without an id, with one that cannot be, and a large one."""
    publish(rabbitmq_url, ["good"])
    app = str(effects.path)
    properties = [
        pika.BasicProperties(),
        pika.BasicProperties(message_id="a\0b"),
        pika.BasicProperties(headers={"x-oncely-id": "x" * 256}),
        pika.BasicProperties(message_id="large", app_id=app),
        pika.BasicProperties(
            message_id="odd", app_id=app, headers={"x": {"y": b"\xff"}, "time": 7}
        ),
    ]
    with closing(pika.BlockingConnection(pika.URLParameters(rabbitmq_url))) as connection:
        channel = connection.channel()
        for each in properties:
            body = b"x" * (5 << 20) if each.message_id == "large" else b"\xff"
            channel.basic_publish("", _QUEUE, body, each)
    assert stream.run(rabbitmq_url) == [6]
    rows = [
        row
        for file in stream.quarantine.glob("*.parquet")
        for row in pq.read_table(file).to_pylist()
    ]
    assert sorted(row["reason"] for row in rows) == ["id with NUL", "missing id", "too long id"]
    assert effects.per_message() == {"good": 1, "large": 1, "odd": 1}


@pytest.mark.in_turn("RabbitMQ into Spark")
def test_a_batch_is_read_again_until_its_spool_is_removed(
    spark: "SparkSession",
    rabbitmq_url: str,
    publish: Publish,
    write: "Write",
    effects: "Effects",
    tmp_path: Path,
) -> None:
    """A job that failed finds its messages in the spool, and what has come meanwhile."""
    reader = spark.read.format("oncely-rabbitmq").options(
        url=rabbitmq_url, queue=_QUEUE, spool=str(tmp_path / "spool"), max_messages_per_batch="40"
    )
    assert reader.load().count() == 0
    publish(rabbitmq_url, [f"m{n}" for n in range(100)])
    with pytest.raises(PySparkException):
        write(reader.load(), "no_such_handler")
    assert is_empty(rabbitmq_url)
    publish(rabbitmq_url, ["m0", "later"])
    counts = write(reader.load(), since="0")
    assert (counts.handled, counts.duplicates_input) == (101, 1)
    shutil.rmtree(tmp_path / "spool")
    assert reader.load().count() == 0
    assert set(effects.per_message().values()) == {1}


def test_mistakes_are_told_when_it_is_loaded(spark: "SparkSession") -> None:
    """Before anything runs."""
    wrong = {"url": "amqp://localhost", "queue": "orders", "spool": "spool", "path": "x"}
    for reader in (spark.read, spark.readStream):
        with pytest.raises(PySparkException, match="option path: there is no such key"):
            reader.format("oncely-rabbitmq").options(**wrong).load()


def test_executors_are_not_handed_the_url() -> None:
    """What is pickled for them has no option."""
    options = {"url": "amqp://user:secret@h", "queue": "secret-queue", "spool": "spool"}
    source = RabbitmqDataSource(options)
    for reader in (source.reader(MESSAGE_SCHEMA), source.streamReader(MESSAGE_SCHEMA)):
        assert b"secret" not in pickle.dumps(reader)


def _wait(until: Callable[[], bool], query: "StreamingQuery") -> None:
    """Until that is so; the query must not be over before."""

    def is_so() -> bool:
        assert query.isActive, query.exception()
        return until()

    wait_until(is_so)
