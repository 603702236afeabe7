"""One word for each count: status, runs, activity, metrics and dashboard agree on one ledger."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from tests.conditions import wait_until
from tests.records import granted
from tests.spark import handlers
from tests.web.conftest import Reader, as_user, text

from oncely import Consumer, Key, Ledger, Message, Policy, ops, publish
from oncely.locations import LedgerAddress
from oncely.metrics import Metrics
from oncely.spark import process
from oncely.spark.ledgers import migrated_ledger
from oncely.web import dashboard

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

IDS = ["a", "b", "c", "a", "b", "fails", "waits-1", "waits-2", "doubtful"]
NAMES = ("handled", "duplicates", "failed_attempts", "failed", "waiting", "in_doubt")
COUNTS = dict(zip(NAMES, (3, 2, 3, 1, 2, 1), strict=True))
POLICY: dict[str, Any] = {"on_in_doubt": "hold", "count_duplicates": "each", "backoff": "1h"}
METRICS = (
    *("oncely_completed_total", "duplicate_messages_blocked_total", "oncely_failed_total"),
    *("oncely_exhausted_total", "oncely_waiting", "oncely_in_doubt"),
)


def in_status(ledger: Ledger, consumer: str) -> dict[str, int]:
    """What status says, and the page that shows it; of attempts they say nothing."""
    found = ops.status(ledger).as_dict()["consumers"][consumer]
    found |= {"handled": found["handled"] + found["completed"], "failed_attempts": 3}
    return {name: found[name] for name in NAMES}


def test_they_agree(
    frame: Callable[..., "DataFrame"], ledger: Ledger, ledger_url: str, tmp_path: Path
) -> None:
    """A consumer and a run on Spark are given the same mix of all outcomes."""
    ledger.recorder.metrics = metrics = Metrics(registry := CollectorRegistry())
    metrics.watch(ledger)
    for consumer in ("plain", "spark"):
        granted(ledger.claim(Key(consumer, "doubtful"), "1ms"))
    wait_until(lambda: ops.status(ledger).total.in_doubt == 2)

    plain = Consumer("memory://mixed", queue="all")
    plain.idempotent(ledger, "plain", policy=Policy(**POLICY))
    publish("memory://mixed", "all", [Message(id_) for id_ in IDS])
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(plain.consume, handlers.mixed)
        wait_until(lambda: in_status(ledger, "plain") == COUNTS)
        plain.stop()
    report = running.result()
    assert (report.received, report.handled, report.duplicates) == (9, 3, 2)
    assert (report.retried, report.failed, report.dead_lettered) == (2, 1, 2)
    assert sum(report.errors.values()) == 4
    options = POLICY | {"ledger": ledger_url, "quarantine": tmp_path / "quarantine"}
    process(frame(*IDS), consumer="spark", handler=handlers.mixed, **options)
    assert in_status(ledger, "spark") == COUNTS

    [(run, _)] = ops.runs(ledger, 5)
    totals = {**run.totals, "duplicates": sum(run.totals["duplicates"].values())}
    errors = sum(error["count"] for error in totals.pop("errors"))
    assert {name: totals.get(name, errors) for name in NAMES} == COUNTS
    assert totals["received"] == len(IDS)
    for each in (ledger, migrated_ledger(LedgerAddress(ledger_url))):
        each.recorder.tell()
    page = text(Reader(dashboard(ledger, auth=as_user())).get("/consumers"))
    for consumer in ("plain", "spark"):
        rates = asdict(ops.activity(ledger).day[consumer]) | {"waiting": 2}
        assert {name: rates[name] for name in NAMES} == COUNTS
        assert f"in doubt of {consumer} 0 3 1 2 2 waiting of {consumer} 2 dead letters" in page
        assert f"{consumer} day 3 2 3 1 1 " in page
    for metric, count in zip(METRICS, COUNTS.values(), strict=True):
        labels = {"provider" if "duplicate" in metric else "consumer": "plain"}
        assert registry.get_sample_value(metric, labels) == count, metric
    for metric, count in (("oncely_waiting", 2), ("oncely_in_doubt", 1)):
        assert registry.get_sample_value(metric, {"consumer": "spark"}) == count
