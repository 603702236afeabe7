"""From RabbitMQ through the bridge's files into a pipeline, whatever is killed on the way."""

import json
import re
import tomllib
from collections import Counter
from contextlib import closing
from datetime import UTC, datetime

import pika
import pyarrow.parquet as pq
import pytest
from tests.cli.conftest import Project
from tests.conditions import wait_until
from tests.docs.pages import DOCS
from tests.kills import killed_at

from oncely import Message, bridge, open_transport
from oncely.sources import open_source

QUEUE = "orders"
POINTS = ("bridge_received", "bridge_written", "bridge_stored", "bridge_acknowledged")
HANDLER = """
import json
from pathlib import Path

def handle(message):
    line = {
        "id": message.id, "type": message.type, "body": message.body.hex(),
        "headers": dict(message.headers), "source": message.source,
        "time": message.time and message.time.isoformat(), "key": message.key,
    }
    with Path(__file__).with_name("effects.jsonl").open("a") as log:
        log.write(json.dumps(line) + "\\n")
"""


@pytest.fixture
def moved(project: Project) -> Project:
    """A pipeline over the files of a bridge, by the tables that the documentation has for it."""
    page = (DOCS / "how-to" / "pipeline.md").read_text()
    [block] = re.findall(r"```toml\n(\[source\][^`]*body_base64.*?)```", page, re.DOTALL)
    project.tables |= tomllib.loads(block)
    project.tables["pipeline"]["handler"] = "moved:handle"
    (project.folder / "moved.py").write_text(HANDLER)
    return project


@pytest.mark.timeout(1_200)
@pytest.mark.in_turn("pipelines")
def test_killed_at_each_point(moved: Project, rabbitmq_url: str) -> None:
    """Each message takes effect once, and its handler is given all that was published; what is not
    a message is quarantined.
    """
    folder = moved.folder / "out" / "messages"
    at = datetime(2025, 3, 1, 12, 30, 0, 123456, UTC)
    whole = Message("é", b"\xff\0\n", "order.made", {"a": "ü\n"}, "shop", at, key="k")
    ids = [f"m{n:03}" for n in range(400)]
    with closing(open_transport(rabbitmq_url)) as transport:
        transport.publish(QUEUE, [whole, *(Message(id_, id_.encode()) for id_ in ids)])
    with closing(pika.BlockingConnection(pika.URLParameters(rabbitmq_url))) as connection:
        properties = pika.BasicProperties(headers={"x-oncely-id": "x" * 256})
        connection.channel().basic_publish("", QUEUE, b"too long", properties)
        connection.channel().basic_publish("", QUEUE, b"no id")

    def work() -> None:
        with closing(open_source(f"{rabbitmq_url}?prefetch=50", QUEUE)) as source:
            bridge(source, files=folder, drain=True)

    def killed(point: str) -> None:
        before = len([*folder.glob("[!.]*")])
        # The broker may still believe that the one before has its messages.
        wait_until(lambda: killed_at(point, work))
        is_whole = point in ("bridge_stored", "bridge_acknowledged")
        assert len([*folder.glob("[!.]*")]) == before + is_whole

    for point in POINTS:
        killed(point)
    first = moved.run()
    for point in POINTS:
        killed(point)

    def are_moved() -> bool:
        work()
        text = "".join(file.read_text() for file in folder.glob("[!.]*"))
        return all(f'"{id_}"' in text for id_ in ids)

    wait_until(are_moved)
    second = moved.run()
    assert first["handled"] + second["handled"] == len(ids) + 1
    assert second["duplicates"]["ledger"] + second["duplicates"]["input"] > 0
    reasons = Counter(first["quarantined"]) + Counter(second["quarantined"])
    assert set(reasons) == {"missing id", "too long id"}
    assert moved.run()["received"] == 0

    lines = [json.loads(line) for line in (moved.folder / "effects.jsonl").read_text().splitlines()]
    effects = {line["id"]: line for line in lines}
    assert sorted(line["id"] for line in lines) == sorted([*ids, whole.id])
    assert effects[whole.id] == {
        "id": "é",
        "type": "order.made",
        "body": whole.body.hex(),
        "headers": {"a": "ü\n"},
        "source": "shop",
        "time": at.isoformat(),
        "key": "k",
    }
    assert all(bytes.fromhex(effects[id_]["body"]).decode() == id_ for id_ in ids)
    files = (moved.folder / "out" / "quarantine").glob("*.parquet")
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    assert {json.loads(row["row"])["body"] for row in rows} == {"too long", "no id"}
    with closing(open_transport(rabbitmq_url)) as transport:
        assert transport.is_drained(QUEUE)
