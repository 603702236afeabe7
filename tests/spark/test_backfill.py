"""A live worker and a backfill on Spark take the same messages at once, with one ledger."""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conditions import wait_until
from tests.spark.conftest import HERE

from oncely import Consumer, Message, at_least_once, open_ledger, open_transport

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from tests.spark.conftest import Effects

MESSAGES = int(os.environ.get("ONCELY_TEST_BACKFILL", "1000"))
"""Without their copies."""


@pytest.mark.in_turn("long on Spark")
@pytest.mark.timeout(1800 + MESSAGES // 10)
def test_a_live_worker_and_a_backfill(
    frame: Callable[..., "DataFrame"],
    effects: "Effects",
    tmp_path: Path,
    postgresql_url: str,
    rabbitmq_url: str,
) -> None:
    """Each message has one effect, and both have had a part in it."""
    from oncely.spark import process

    ids = [f"m{n:05}" for n in range(MESSAGES)]
    published = [*ids, *ids[::5]]

    def backfill() -> None:
        process(
            frame(*published, partitions=2),
            consumer="tests",
            ledger=postgresql_url,
            handler="handlers:slowly",
            handler_path=HERE,
            quarantine=tmp_path / "quarantine",
            partitions=2,
            chunk=20,
            lease="60s",
            on_in_doubt="retry",
        )

    def handle(message: Message) -> None:
        line = json.dumps({"id": message.id, "pid": os.getpid()}) + "\n"
        with effects.path.open("a") as log:
            log.write(line)

    with closing(open_transport(rabbitmq_url)) as transport:
        transport.publish("orders", [Message(each, b"{}") for each in published])
    with closing(open_ledger(postgresql_url)) as ledger, ThreadPoolExecutor(1) as pool:
        ledger.migrate()
        consumer = Consumer(rabbitmq_url, "orders")
        consumer.idempotent(ledger, "tests", policy=at_least_once(lease="60s"))
        backfilling = pool.submit(backfill)
        wait_until(lambda: effects.lines() or backfilling.done())
        consumer.consume(handle, drain=True)
        backfilling.result()
    assert effects.per_message() == dict.fromkeys(ids, 1)
    here = [line["pid"] == os.getpid() for line in effects.lines()]
    assert 0 < sum(here) < len(here)
