"""What a process does with a ledger in SQL, as operators see it."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.conditions import LIMIT_S, wait_until
from tests.conformance.conftest import ledger_url_of
from tests.records import granted, record_of

from oncely import ops
from oncely.core.activity import AuditEntry, Run, Worker, quantile_s
from oncely.core.commands import ClaimOutcome, Granted
from oncely.core.errors import FencedError
from oncely.core.policy import Policy
from oncely.core.record import Claim, Key
from oncely.ledger import recorder
from oncely.ledger.ledger import Ledger, open_ledger


@pytest.fixture
def ledger(request: pytest.FixtureRequest) -> Iterator[Ledger]:
    """An empty ledger in a file, or in the database that is asked for."""
    kind = getattr(request, "param", "sqlite")
    with closing(open_ledger(ledger_url_of(kind, request))) as opened:
        yield opened


on_every_database = pytest.mark.parametrize(
    "ledger", ["sqlite", "postgresql", "mysql"], indirect=True
)


@on_every_database
def test_counts_by_consumer(ledger: Ledger) -> None:
    """Each end of a message is counted for its consumer; told twice, it is counted once."""
    keys = [Key("billing", f"m{n}") for n in range(5)]
    claims = [granted(outcome) for outcome in ledger.claim_many(keys)]
    ledger.complete_many(claims[:3])
    ledger.fail(claims[3], "no")
    ledger.fail(claims[4], "never", final=True)
    ledger.claim_many([keys[0], keys[1]])
    granted(ledger.claim(Key("mail", "m"), lease=0.001))
    again = wait_until(lambda: _granted_to(ledger.claim(Key("mail", "m"))))
    ledger.recorder.tell()
    ledger.recorder.tell()
    billing, mail = ledger.operations.activity(0)
    assert (billing.consumer, mail.consumer) == ("billing", "mail")
    assert (billing.handled, billing.failed_attempts, billing.failed) == (3, 2, 1)
    assert (billing.duplicates, billing.in_doubt) == (2, 0)
    assert sum(billing.seconds) == 5
    assert (quantile_s([billing.seconds], 0.95) or 0) > 0
    assert (mail.handled, mail.in_doubt) == (0, 1)
    [worker] = ledger.operations.workers()
    assert (worker.kind, worker.claims) == ("program", 1)
    assert worker.started <= worker.seen <= ledger.now()
    ledger.complete(again)


def _granted_to(outcome: ClaimOutcome) -> Claim | None:
    return outcome.claim if isinstance(outcome, Granted) else None


def test_each_end_counts_once(ledger: Ledger) -> None:
    """A message that is handled, and then completed, is handled once; so is one that is completed
    again, alone or among others; a claim that is given back is not held any more.
    """
    keys = [Key("billing", f"m{n}") for n in range(5)]
    claims = [granted(outcome) for outcome in ledger.claim_many(keys)]
    ledger.complete(ledger.handled(claims[0]))
    ledger.complete(claims[1])
    ledger.complete(claims[1])
    ledger.complete_many(claims[1:4])
    ledger.release(claims[4])
    lost = granted(ledger.claim(Key("billing", "lost")))
    ledger.end_claim(record_of(ledger, lost.key), by="anna")
    with pytest.raises(FencedError):
        ledger.complete(lost)
    ledger.recorder.tell()
    [billing] = ledger.operations.activity(0)
    assert billing.handled == sum(billing.seconds) == 4
    [worker] = ledger.operations.workers()
    assert worker.claims == 0


@on_every_database
def test_closed_worker_has_stopped(ledger: Ledger) -> None:
    """Closing tells what was not told yet; the worker has stopped, and of those that have stopped
    in one process the last is kept.
    """
    for id_ in ("m", "n", "o"):
        claim = granted(ledger.claim(Key("billing", id_), policy=Policy()))
        if id_ == "o":
            ledger.complete(claim)
        ledger.close()
        # It waits for some seconds only for the thread that tells this.
        wait_until(lambda: {each.state for each in ops.workers(ledger)} == {"stopped"})
    [worker] = ops.workers(ledger)
    assert worker.in_words.endswith("UTC, held 2 claims")
    [billing] = ledger.operations.activity(0)
    assert billing.handled == 1


def test_who_decides_is_not_a_worker(ledger: Ledger) -> None:
    """A person's decision starts nothing that is listed among the workers; a claim does."""
    ledger.claim(key := Key("billing", "m"))
    ledger.close()
    wait_until(lambda: not ledger.recorder.running)
    ledger.end_claim(record_of(ledger, key), by="anna")
    ledger.reset(key, by="anna")
    ledger.forget(key)
    assert not ledger.recorder.running
    ledger.claim(key)
    assert ledger.recorder.running


def test_retold_after_an_outage(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be told is told later, and once."""
    ledger.complete(granted(ledger.claim(Key("billing", "m"))))
    with monkeypatch.context() as patched:
        patched.setattr(type(ledger.operations), "keep_worker", _unreachable)
        ledger.recorder.tell()
    assert ledger.operations.activity(0) == []
    ledger.recorder.tell()
    [billing] = ledger.operations.activity(0)
    assert billing.handled == 1


def test_closed_while_the_store_answers_nobody(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is frozen keeps nobody from closing for ever."""
    answers = threading.Event()
    monkeypatch.setattr(recorder, "_END_S", 0.01)
    monkeypatch.setattr(type(ledger.operations), "keep_worker", lambda *_: answers.wait())
    others = set(threading.enumerate())
    ledger.complete(granted(ledger.claim(Key("billing", "m1"))))
    [thread] = set(threading.enumerate()) - others
    ledger.close()
    assert thread.is_alive()
    answers.set()
    # Else it takes a connection from the pool that the fixture gives up.
    thread.join(LIMIT_S)


@on_every_database
def test_runs(ledger: Ledger) -> None:
    """A run is kept in place of what it was before."""
    run = Run("r1", "nightly", "billing", 1.0, None, {})
    ledger.operations.keep_run(run)
    ledger.operations.keep_run(run._replace(ended=2.0, totals={"handled": 3}))
    ledger.operations.keep_run(run._replace(id="r2", began=5.0))
    assert [(each.id, each.ended, each.totals) for each in ledger.operations.runs()] == [
        ("r2", None, {}),
        ("r1", 2.0, {"handled": 3}),
    ]


@on_every_database
def test_purged(ledger: Ledger) -> None:
    """Old runs, workers and activity go; the audit stays."""
    ledger.operations.keep_run(Run("r1", "nightly", "billing", 1.0, 2.0, {}))
    ledger.operations.note(AuditEntry(0, 0.0, "anna", "reset", "billing", "m", 1, 1, 0, ""))
    ledger.recorder.tell()
    assert ledger.operations.purge_operations(3_600) == 1
    assert ledger.operations.runs() == []
    assert len(ledger.operations.audit()) == len(ops.workers(ledger)) == 1


def _unreachable(*_: object) -> None:
    raise OSError("away")


# ---- What brokers hold -------------------------------------------------------------------------


def test_lags(tmp_path: Path) -> None:
    """As the workers that live have said last, the highest of each queue; not as those that have
    stopped, or are silent.
    """
    file = tmp_path / "ledger.db"
    with closing(open_ledger(f"sqlite:///{file}")) as ledger:
        ledger.migrate()
        told: dict[str, dict[str, int] | None] = {"a": {"x": 5, "y": 1}, "b": {"x": 7}, "c": None}
        for id_, lags in told.items():
            worker = Worker(id_, "consumer", "billing", "host", 1, "1.0", 0.0, 0.0, 0, lags=lags)
            ledger.operations.keep_worker(worker, [])

        def waiting() -> dict[str, int]:
            found = ledger.mailbox.broker_backlogs()
            return {name: backlog.waiting for name, backlog in found.items()}

        assert waiting() == {"x": 7, "y": 1}
        ledger.operations.end_worker("b")
        assert waiting() == {"x": 5, "y": 1}
        with closing(sqlite3.connect(file)) as connection, connection:
            connection.execute("UPDATE message_workers SET seen = seen - 60")
        assert waiting() == {}
