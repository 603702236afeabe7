"""Pipelines over topics of a real Kafka, beside consumers of the same topics."""

import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.cli.conftest import HANDLERS, Project
from tests.cli.test_pipeline_runs import kill, wait_for_effects
from tests.conditions import wait_until
from tests.integration.test_kafka import Broker, produce_raw
from tests.server_fixtures import available
from tests.servers import spark_kafka_jars

from oncely import Consumer, ConsumerReport, Message, open_ledger

TELL = """

def tell(message):
    said = [message.id, message.type, message.body.hex(), message.headers, message.source]
    said += [message.time and message.time.timestamp(), message.key]
    with LOG.open("a") as log:
        log.write(json.dumps(said) + "\\n")
"""


@pytest.fixture
def broker(kafka: str, project: Project) -> Iterator[Broker]:
    """A topic of three partitions, which the project's pipeline reads."""
    project.tables["spark"]["spark.jars"] = available(spark_kafka_jars)
    with ExitStack() as opened:
        broker = Broker(kafka, opened)
        broker.create(3)
        project.tables["source"] = {"format": "kafka"}
        project.tables["source.options"] = {
            "kafka.bootstrap.servers": broker.settings["bootstrap.servers"],
            "subscribe": broker.queue,
            "startingOffsets": "earliest",
        }
        del project.tables["message"]
        yield broker


def produce(broker: Broker, numbers: range, *again: int) -> None:
    """Publish messages with these numbers, and some twice."""
    broker.produce(*({"value": b"{}", "headers": {_ID: f"m{n}"}} for n in (*numbers, *again)))


def consume(project: Project, broker: Broker, pause_s: float = 0) -> ConsumerReport:
    """Let a consumer with the pipeline's ledger and name come to the end of the topic."""

    def handle(message: Message) -> None:
        time.sleep(pause_s)
        with (project.folder / "effects.jsonl").open("a") as log:
            log.write(json.dumps({"id": message.id}) + "\n")

    with closing(open_ledger(f"sqlite:///{project.folder}/out/ledger.db")) as ledger:
        consumer = Consumer(broker.url, broker.queue).idempotent(ledger, "tests")
        return consumer.consume(handle, drain=True)


_ID = "message-id"
_EVENT = {"ce_specversion": "1.0", "ce_id": 'a"\x1f\u00e9', "ce_type": "placed", "ce_source": "/s"}
ODD: list[tuple[bytes | None, Any]] = [
    (b"", {_ID: "empty"}),
    (None, {_ID: "tombstone"}),
    (b"\xff\x00", [(_ID, b"bytes"), ("a", b"\xff"), ("b", None)]),
    (b"1", [(_ID, b"twice"), (_ID, b"2"), ("a", b""), ("a", b"b")]),
    (b"2", {_ID: "\u00e9 fields", "type": "t", "source": "s", "content-type": "text/plain"}),
    (b"3", {_ID: "time", "x-oncely-time": "2020-02-03T04:05:06+07:00"}),
    (b"4", {_ID: "no time", "x-oncely-time": "", "x-oncely-a": "b"}),
    (b"{}", _EVENT),
    (b"{}", _EVENT | {"ce_id": "i" * 600}),
    (b"{}", _EVENT | {"ce_specversion": "0.3"}),
    (b"{}", _EVENT | {_ID: "before the event's"}),
    (b"5", None),
    (b"7", {_ID: b"\xff"}),
]


@pytest.mark.in_turn("pipelines")
def test_odd_records(project: Project, broker: Broker) -> None:
    """Spark and the transport make the same messages of any record, and refuse the same ones."""
    broker.produce(*({"value": each, "headers": told, "key": each} for each, told in ODD))
    produce_raw(broker, b"\xff")
    deliveries = broker.received(broker.open(), len(ODD) + 1)
    good = [each.message for each in deliveries if each.message.id and each.problem is None]
    assert len(good) == 10
    (project.folder / "handlers.py").write_text(HANDLERS + TELL)
    project.tables["pipeline"]["handler"] = "handlers:tell"
    assert project.run()["handled"] == len(good)
    lines = (project.folder / "effects.jsonl").read_text().splitlines()
    told = {fields[0]: fields for fields in map(json.loads, lines)}
    for each in good:
        others = dict(each.headers)
        if each.id == "\u00e9 fields":
            others["content-type"] = each.content_type  # There is no column for it.
        fields = [each.id, each.type, each.body.hex(), others, each.source]
        assert told[each.id] == [*fields, each.time and each.time.timestamp(), each.key]
    reasons = pq.read_table(project.folder / "out" / "quarantine")["reason"].to_pylist()
    problems = [each.problem or "empty id" for each in deliveries if each.message not in good]
    assert sorted(reasons) == sorted(problems)


@pytest.mark.in_turn("pipelines")
def test_a_backfill_beside_a_consumer(project: Project, broker: Broker) -> None:
    """One effect of a producer's copies, of a consumer's messages, and without the checkpoint."""
    produce(broker, range(50), *range(10))
    project.tables["source.options"]["maxOffsetsPerTrigger"] = 20
    first = project.run()
    assert (first["handled"], first["duplicates"]) == (50, {"input": 10, "ledger": 0})
    assert len([*(project.folder / "out" / "checkpoint" / "commits").glob("[0-9]*")]) >= 3
    assert consume(project, broker).duplicates == 60
    produce(broker, range(45, 70))
    live = consume(project, broker)
    assert (live.received, live.duplicates, live.handled) == (25, 5, 20)
    assert project.run()["duplicates"] == {"input": 0, "ledger": 25}
    shutil.rmtree(project.folder / "out" / "checkpoint")
    assert project.run()["duplicates"] == {"input": 0, "ledger": 85}
    assert project.effects() == {f"m{n}": 1 for n in range(70)}


@pytest.mark.in_turn("Spark is killed")
@pytest.mark.timeout(900)
def test_queries_and_a_consumer_at_once(project: Project, broker: Broker) -> None:
    """A query whose driver is killed and whose checkpoint is lost, another query and a consumer
    share a topic and a ledger: each message has one effect.
    """
    count = 1_000
    produce(broker, range(count), *range(0, count, 20))
    slow = project.start("--json", PAUSE_S="0.05")
    wait_for_effects(project, 20, slow)

    def kill_slow() -> None:
        wait_until(lambda: project.effects().total() >= count // 4)
        kill(slow, all_of_it=False)

    with ThreadPoolExecutor() as threads:
        live, killed = threads.submit(consume, project, broker, 0.02), threads.submit(kill_slow)
        project.tables["pipeline"] |= {"name": "another", "checkpoint": "out/another"}
        project.run()
        for each in (killed, live):
            each.result()
    project.tables["pipeline"]["checkpoint"] = "out/checkpoint"
    shutil.rmtree(project.folder / "out" / "checkpoint")
    assert project.run()["handled"] == 0
    assert project.effects() == {f"m{n}": 1 for n in range(count)}
