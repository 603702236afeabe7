"""A batch handler: what it is given, what becomes of a batch, and of its messages."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.conditions import wait_until
from tests.records import record_of
from tests.spark.conftest import drain
from tests.turns import in_turn

from oncely import ConfigError, Key, Ledger, State, StoreUnavailable
from oncely._util.crash_points import watched_by
from oncely.spark import Report, foreach_batch, process
from oncely.spark.batches.staging import StagingFolder

HERE = Path(__file__).parent

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Frame = Callable[..., "DataFrame"]


class Shop:
    """A batch handler with its target: a folder of Parquet for each batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keys: list[str] = []
        self.given: list[set[str]] = []
        self.error: BaseException | None = None
        """What the handler raises once it has written."""

    def __call__(self, messages: "DataFrame", batch_key: str) -> None:
        self.keys.append(batch_key)
        self.given.append({row.id for row in messages.collect()})
        messages.write.mode("overwrite").parquet(str(self.folder / batch_key))
        if self.error is not None:
            raise self.error

    def ids(self, spark: "SparkSession") -> list[str]:
        if not self.folder.exists():
            return []
        return sorted(row.id for row in spark.read.parquet(str(self.folder / "*")).collect())


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path / "target")


@pytest.fixture
def settings(ledger_url: str, tmp_path: Path) -> dict[str, Any]:
    """What `process` is told, if a test wants nothing else."""
    return {
        "consumer": "tests",
        "ledger": ledger_url,
        "quarantine": str(tmp_path / "quarantine"),
        "partitions": 2,
        "backoff": "1ms",
    }


def told(report: Report) -> dict[str, Any]:
    """What of a report's counts is not zero."""
    counts = {
        **report.as_dict(),
        "duplicates": report.duplicates,
        "quarantined": report.quarantined,
    }
    return {
        name: count for name, count in counts.items() if count and name not in ("seconds", "errors")
    }


def states(ledger: Ledger, consumer: str = "tests") -> dict[State, int]:
    return {state: n for (name, state), n in ledger.counts().items() if name == consumer}


@pytest.mark.in_turn("batches")
def test_what_is_new(
    frame: Frame, shop: Shop, settings: dict[str, Any], ledger: Ledger, spark: "SparkSession"
) -> None:
    """The handler gets each new message once; nothing of the batch is left but its record."""
    rows = [(f"m{n:03}", "{}") for n in range(300)]
    messages = frame(*rows, *rows[:50], ("m200", '{"other": 1}'), (None, "{}"), partitions=3)
    report = process(messages, handler_batch=shop, **settings)
    assert told(report) == {"received": 352, "handled": 300, "duplicates": 50, "quarantined": 2}
    assert shop.ids(spark) == [id_ for id_, _ in rows]
    assert states(ledger) == {State.COMPLETED: 300}
    assert states(ledger, "tests/batches") == {State.COMPLETED: 1}
    assert list(Path(f"{settings['quarantine']}-batches").iterdir()) == []
    assert told(process(messages.where("false"), handler_batch=shop, **settings)) == {}
    again = process(messages, handler_batch=shop, **settings)
    assert told(again) == {"received": 352, "duplicates": 350, "quarantined": 2}
    assert len(shop.keys) == 1


@pytest.mark.in_turn("batches")
def test_columns_of_ones_own(
    shop: Shop, settings: dict[str, Any], spark: "SparkSession", tmp_path: Path
) -> None:
    """All columns come through, of whatever type; those of the pipeline's own do not."""
    messages = spark.sql(
        "SELECT 'a' id, 1.50BD amount, array(1, 2) `its parts`,"
        " TIMESTAMP '2026-01-02 03:04:05' time,"
        " map('k', 'v') headers, named_struct('x', DATE '2026-01-01') s, 'raw' oncely_row"
    )
    taken: list[Any] = []
    process(messages, handler_batch=lambda new, _: taken.extend(new.collect()), **settings)
    assert taken == messages.drop("oncely_row").collect()


@pytest.mark.in_turn("batches")
def test_a_batch_that_fails_waits(
    frame: Frame, shop: Shop, settings: dict[str, Any], ledger: Ledger, spark: "SparkSession"
) -> None:
    """A later call hands it over again with the same key; what comes meanwhile is another."""
    shop.error = ValueError("the target is away")
    slow = settings | {"backoff": "1h"}
    assert told(process(frame("a", "b"), handler_batch=shop, **slow)) == {
        "received": 2,
        "waiting": 2,
    }
    shop.error = None
    meanwhile = process(frame("b", "c"), handler_batch=shop, **slow)
    assert told(meanwhile) == {"received": 2, "handled": 1, "waiting": 1}
    assert shop.given == [{"a", "b"}, {"c"}]
    last = process(frame("a", "d"), handler_batch=shop, **settings)
    assert told(last) == {"received": 4, "handled": 3, "duplicates": 1}
    assert shop.given == [{"a", "b"}, {"c"}, {"a", "b"}, {"d"}]
    assert shop.keys[2] == shop.keys[0]
    assert shop.ids(spark) == ["a", "b", "c", "d"]
    assert states(ledger) == {State.COMPLETED: 4}


@pytest.mark.in_turn("batches")
def test_a_batch_that_fails_permanently(
    frame: Frame, shop: Shop, settings: dict[str, Any], ledger: Ledger
) -> None:
    """Its messages are dead letters; those that are retried are in the next batch."""
    shop.error = ValueError("password=hunter2 is wrong")
    messages = frame(("a", '{"n": 1}'), "b")
    report = process(messages, handler_batch=shop, **settings | {"tries": 1})
    assert told(report) == {"received": 2, "failed": 2}
    assert report.as_dict()["errors"] == [{"text": "ValueError: password=*** is wrong", "count": 2}]
    again = process(messages, handler_batch=shop, **settings | {"tries": 1})
    assert told(again) == {"received": 2, "failed": 2}
    assert len(shop.keys) == 1
    letters = {letter.key.message_id: letter for letter in ledger.dead("tests")}
    assert letters.keys() == {"a", "b"}
    assert letters["a"].message.body == b'{"n": 1}'
    assert "ValueError: password=*** is wrong" in (letters["a"].error or "")
    assert shop.keys[0] in (record_of(ledger, Key("tests", "a")).error or "")
    shop.error = None
    ledger.retry_dead([letter.id for letter in letters.values()])
    last = process(frame("c"), handler_batch=shop, **settings)
    assert told(last) == {"received": 3, "handled": 3}
    assert shop.given[-1] == {"a", "b", "c"}
    assert states(ledger) == {State.COMPLETED: 3}
    assert list(ledger.waiting("tests")) == []


_IN_DOUBT: list[tuple[str, dict[str, int], int]] = [
    ("retry", {"received": 4, "handled": 2, "duplicates": 2}, 2),
    ("hold", {"received": 4, "in_doubt": 4}, 1),
    ("dead_letter", {"received": 4, "failed": 4}, 1),
    ("handlers:batch_happened", {"received": 4, "handled": 2, "duplicates": 2}, 1),
    ("handlers:batch_down", {"received": 4, "in_doubt": 4}, 1),
]


@pytest.mark.in_turn("batches")
@pytest.mark.parametrize(
    ("policy", "becomes", "calls"),
    in_turn("policies of batches in doubt", _IN_DOUBT, 2),
)
def test_in_doubt(
    policy: str,
    becomes: dict[str, int],
    calls: int,
    frame: Frame,
    shop: Shop,
    settings: dict[str, Any],
    ledger: Ledger,
) -> None:
    """The policy or a probe of its key decides, for the batch and each of its messages."""
    told_all = settings | {"handler_batch": shop, "on_in_doubt": policy, "handler_path": HERE}
    shop.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        process(frame("a", "b"), **told_all)
    shop.error = None
    assert told(process(frame("a", "b"), **told_all)) == becomes
    assert len(shop.keys) == calls
    assert len(set(shop.keys)) == 1
    if "in_doubt" in becomes:
        assert told(process(frame("a"), **told_all)) == {"received": 1, "in_doubt": 1}
        ledger.reset(Key("tests/batches", shop.keys[0]))
        assert process(frame("a"), **told_all).handled == 2
        assert shop.given == [{"a", "b"}, {"a", "b"}]


@pytest.mark.in_turn("batches")
@pytest.mark.parametrize("policy", ["hold", "handlers:batch_happened"])
def test_an_error_after_which_nobody_knows(
    frame: Frame, shop: Shop, settings: dict[str, Any], policy: str
) -> None:
    """The batch and its messages are in doubt at once; a probe is asked about the batch."""
    settings |= {"handler_batch": shop, "in_doubt_on": (TimeoutError,), "handler_path": HERE}
    shop.error = TimeoutError("no answer")
    assert process(frame("a", "b"), on_in_doubt=policy, **settings).in_doubt == 2
    shop.error = None
    report = process(frame("c"), on_in_doubt=policy, **settings)
    assert report.handled == (1 if policy == "hold" else 3)
    assert [len(given) for given in shop.given] == [2, 1]


@pytest.mark.in_turn("batches")
def test_such_an_error_of_a_batch_that_was_taken_up(
    frame: Frame, shop: Shop, settings: dict[str, Any]
) -> None:
    """A batch whose program ended before its handler runs again; then the policy counts for it."""
    settings |= {"handler_batch": shop, "in_doubt_on": (TimeoutError,), "on_in_doubt": "hold"}

    def end(point: str) -> None:
        if point == "members_claimed":
            raise KeyboardInterrupt

    with watched_by(end), pytest.raises(KeyboardInterrupt):
        process(frame("a", "b"), **settings)
    assert not shop.keys
    shop.error = TimeoutError("no answer")
    assert process(frame("c"), **settings).in_doubt == 3
    shop.error = None
    assert process(frame("d"), **settings).handled == 1
    assert sorted(map(sorted, shop.given)) == [["a", "b"], ["c"], ["d"]]


@pytest.mark.in_turn("batches")
def test_an_outage_after_the_claim_of_a_batch(
    frame: Frame,
    shop: Shop,
    settings: dict[str, Any],
    ledger: Ledger,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The batch is let go: the next call takes it up, though this process has claimed it."""
    settings |= {"handler_batch": shop, "lease": "8s"}
    shop.error = ValueError("the target is away")
    process(frame("a", "b"), **settings)
    shop.error = None

    def away(*_: Any) -> None:
        raise StoreUnavailable("away for a moment")

    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "steps", away)
        with pytest.raises(StoreUnavailable):
            process(frame("c"), **settings)
    assert process(frame("c"), **settings).handled == 3
    assert states(ledger) == {State.COMPLETED: 3}


@pytest.mark.in_turn("batches")
def test_two_programs_end_one_batch(
    frame: Frame,
    shop: Shop,
    settings: dict[str, Any],
    ledger: Ledger,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other one may remove the folder before this one has read the report of its job."""
    told_by = StagingFolder.told

    def removed(staging: StagingFolder, name: str) -> Any:
        told = told_by(staging, name)
        if not told["files"]:
            staging.remove()
        return told_by(staging, name)

    monkeypatch.setattr(StagingFolder, "told", removed)
    assert process(frame("a", "b"), handler_batch=shop, **settings).handled == 2
    assert states(ledger, "tests/batches") == {State.COMPLETED: 1}


@pytest.mark.in_turn("batches")
@pytest.mark.parametrize("policy", ["hold", "retry"])
def test_an_operator_settles_a_batch(
    frame: Frame, shop: Shop, settings: dict[str, Any], ledger: Ledger, policy: str
) -> None:
    """Its messages are completed by the next call, also if none has found it in doubt before."""
    settings |= {"handler_batch": shop, "on_in_doubt": policy}
    shop.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        process(frame("a", "b"), **settings)
    shop.error = None
    if policy == "hold":
        assert process(frame("c"), **settings).in_doubt == 2
    ledger.happened(Key("tests/batches", shop.keys[0]))
    assert told(process(frame("a"), **settings)) == {"received": 3, "handled": 2, "duplicates": 1}
    assert states(ledger) == {State.COMPLETED: 3 if policy == "hold" else 2}
    assert len(shop.keys) == (2 if policy == "hold" else 1)
    assert list(Path(f"{settings['quarantine']}-batches").iterdir()) == []


@pytest.mark.in_turn("batches")
def test_a_folder_that_is_not_removed(
    frame: Frame,
    shop: Shop,
    settings: dict[str, Any],
    ledger: Ledger,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program that ends before it has removed the folder has completed the batch; the next one
    removes it.
    """

    def end(_: StagingFolder) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(StagingFolder, "remove", end)
        with pytest.raises(KeyboardInterrupt):
            process(frame("a", "b"), handler_batch=shop, **settings)
    assert states(ledger, "tests/batches") == {State.COMPLETED: 1}
    process(frame("a"), handler_batch=shop, **settings)
    assert len(shop.keys) == 1
    assert list(Path(f"{settings['quarantine']}-batches").iterdir()) == []


@pytest.mark.in_turn("batches")
@pytest.mark.parametrize(
    "at", ["members_claimed", "before_batch_handler", "after_batch_handler", "batch_handled"]
)
def test_a_folder_that_is_not_to_be_seen(
    frame: Frame, shop: Shop, settings: dict[str, Any], ledger: Ledger, at: str
) -> None:
    """A batch that is in doubt, waits, or has messages to be completed, is not taken for a settled
    one; where the folder is seen, it goes on.
    """
    settings |= {"handler_batch": shop}
    shop.error = ValueError("away") if at == "after_batch_handler" else None

    def end(point: str) -> None:
        if point == at != "after_batch_handler":
            raise KeyboardInterrupt

    with watched_by(end), suppress(KeyboardInterrupt):
        process(frame("a", "b"), **settings)
    shop.error = None
    staging = Path(f"{settings['quarantine']}-batches")
    elsewhere = staging.rename(staging.with_name("elsewhere"))
    for _ in range(2):
        with pytest.raises(ConfigError, match="name a folder that all machines share"):
            process(frame("c"), **settings)
    elsewhere.rename(staging)
    assert process(frame("c"), **settings).handled == 3
    assert states(ledger) == {State.COMPLETED: 3}


@pytest.mark.in_turn("batches")
def test_a_waiting_batch_that_is_purged(
    frame: Frame, shop: Shop, settings: dict[str, Any], ledger: Ledger
) -> None:
    """It runs again with the same key and the same messages, which are held for it: not with what
    was a duplicate, and was purged, too.
    """
    settings |= {"handler_batch": shop}
    process(frame("old"), **settings)
    shop.error = ValueError("the target is away")
    process(frame("old", "a", "b"), **settings)
    shop.error = None
    old = ledger.now() + 0.001
    wait_until(lambda: ledger.now() > old)
    assert ledger.purge("1ms") == 3
    assert process(frame("a", "c"), **settings).handled == 3
    assert shop.given == [{"old"}, {"a", "b"}, {"a", "b"}, {"c"}]
    assert shop.keys[1] == shop.keys[2]
    assert states(ledger) == {State.COMPLETED: 3}
    assert list(Path(f"{settings['quarantine']}-batches").iterdir()) == []


@pytest.mark.in_turn("batches")
def test_a_settled_batch_that_is_reset(
    frame: Frame, shop: Shop, settings: dict[str, Any], ledger: Ledger
) -> None:
    """Nothing of it runs: its messages are dead letters, and can be retried themselves."""
    settings |= {"handler_batch": shop}
    shop.error = ValueError("away")
    assert process(frame("a"), **settings | {"tries": 1}).failed == 1
    ledger.reset(Key("tests/batches", shop.keys[0]))
    shop.error = None
    assert process(frame("b"), **settings).handled == 1


@pytest.mark.in_turn("batches")
def test_in_a_stream(
    spark: "SparkSession", shop: Shop, settings: dict[str, Any], tmp_path: Path
) -> None:
    """`foreach_batch` takes it as `process` does; each batch of the query has a key of its own."""
    source = tmp_path / "in"
    source.mkdir()
    (source / "0.json").write_text('{"id": "a"}\n{"id": "b"}\n')
    (source / "1.json").write_text('{"id": "b"}\n{"id": "c"}\n')
    reports: list[Report] = []
    rows = spark.readStream.schema("id string").option("maxFilesPerTrigger", 1).json(str(source))
    batch = foreach_batch(handler_batch=shop, on_report=lambda r, _: reports.append(r), **settings)
    drain(rows.writeStream.foreachBatch(batch), tmp_path / "checkpoint")
    assert sorted(map(sorted, shop.given)) in ([["a", "b"], ["c"]], [["a"], ["b", "c"]])
    assert sum(report.handled for report in reports) == 3
    assert len(set(shop.keys)) == 2


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"handler": "a:b"}, "option handler: a batch handler runs in its place"),
        ({"mode": "transactional"}, 'option handler_batch: mode "transactional" calls none'),
        ({"ledger": "redis://localhost"}, "ledger: redis has no transactions"),
        ({"handler_batch": "no_such:thing"}, "handler_batch: 'no_such:thing' cannot be imported"),
        ({"handler_batch": lambda messages: None}, "takes (messages); write `def"),
        ({"handler_batch": None, "staging": "x", "handler": "a:b"}, "option staging: only a batch"),
    ],
)
def test_mistakes(
    frame: Frame, shop: Shop, settings: dict[str, Any], wrong: dict[str, Any], words: str
) -> None:
    """Each is one line, before anything runs."""
    with pytest.raises(ConfigError) as raised:
        process(frame("a"), **{**settings, "handler_batch": shop, **wrong})
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_sink_calls_none(frame: Frame, settings: dict[str, Any]) -> None:
    """Tasks cannot call what is to be called on the driver."""
    settings = {name: str(value) for name, value in settings.items() if name != "partitions"}
    writer = frame("a").write.format("oncely").options(**settings, handler_batch="a:b")
    with pytest.raises(Exception, match="by your program, not by tasks"):
        writer.mode("append").save()
