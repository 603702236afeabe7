"""Messages that fail in a task wait in the ledger: they hold up nothing, and come to an end."""

import itertools
import os
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from contextvars import ContextVar
from inspect import CORO_CLOSED, getcoroutinestate
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Pool, event, make_url
from tests.conditions import wait_until
from tests.logs import events_in
from tests.meddling import MeddlingStore, away
from tests.records import granted, record_of
from tests.spark.tasks import CONSUMER, append, is_killed_at, key_of, run_task, use
from tests.unit.conftest import failing, nothing

from oncely import (
    FencedError,
    Ledger,
    Message,
    Reject,
    Retry,
    open_ledger,
)
from oncely.core.errors import StoreUnavailable
from oncely.core.waiting import retries_of
from oncely.ledger.mailbox import Mailbox
from oncely.spark.sink.counts import Counts
from oncely.stores.open_store import open_sessions

Run = Callable[..., Counts]


@pytest.fixture(params=["leased", "transactional"])
def run(request: pytest.FixtureRequest, ledger: Ledger, ledger_url: str, tmp_path: Path) -> Run:
    """Run a task in each mode with a handler; what its handler is given is a message alone."""

    def run_leased(handler: Callable[[Message], Any], *rows: Any, **options: Any) -> Counts:
        return run_task(ledger, handler, tmp_path, rows, **options)

    begins = open_sessions(ledger_url)

    def run_transactional(handler: Callable[[Message], Any], *rows: Any, **options: Any) -> Counts:
        def handle(message: Message, _: object) -> Any:
            return handler(message)

        return run_task(ledger, handle, tmp_path, rows, 1_000, begins, **options)

    return run_leased if request.param == "leased" else run_transactional


def fail(message: Message) -> None:
    raise ValueError("never")


def fail_b(message: Message) -> None:
    if message.id == "b":
        raise ValueError("never")


def test_a_failure_holds_up_nothing(run: Run, ledger: Ledger) -> None:
    """The task ends while its message waits for the next try; the record tells since when."""
    counts = run(fail_b, "a", "b", "c", backoff="1h")
    assert (counts.handled, counts.waiting, counts.failed) == (2, 1, 0)
    [waiting] = ledger.waiting()
    assert (waiting.key, waiting.attempts) == (key_of("b"), 1)
    assert waiting.error == "ValueError: never"


_CALLER: ContextVar[str] = ContextVar("caller", default="nobody")


def test_a_context_for_each(run: Run) -> None:
    """A context variable that a handler sets is gone before the next message."""
    seen: list[str] = []

    def see(message: Message) -> None:
        seen.append(_CALLER.get())
        _CALLER.set(message.id)

    assert run(see, "a", "b", "c").handled == 3
    assert {*seen} == {"nobody"}


@pytest.mark.parametrize("others", ["", "abcde"])
def test_one_that_the_store_refuses(run: Run, ledger_url: str, others: str) -> None:
    """It goes to the quarantine, with the store's words; the others are handled."""
    no = "CREATE TRIGGER no BEFORE INSERT ON processed_messages WHEN NEW.message_id = 'x'"
    with closing(sqlite3.connect(make_url(ledger_url).database or "")) as connection:
        connection.execute(f"{no} BEGIN SELECT RAISE(ABORT, 'not that'); END")
    counts = run(lambda _: None, *others[:2], "x", *others[2:])
    assert (counts.handled, counts.failed) == (len(others), 0)
    [(reason, count)] = counts.quarantined.items()
    assert (count, "not that" in reason) == (1, True)


def test_a_later_task_takes_what_is_due(run: Run, ledger: Ledger) -> None:
    """Whoever comes when it is due; its delivery counts where it was received before this run."""
    ran: list[int] = []

    def handle(message: Message) -> None:
        assert message.claim is not None
        ran.append(message.claim.attempts)
        assert (message.body, message.headers) == (b"whole", {"as": "it came"})
        if len(ran) == 1:
            raise Retry(delay="200ms")

    a, b = ({"id": id_, "body": "whole", "headers": [("as", "it came")]} for id_ in "ab")
    assert run(handle, a).waiting == 1
    wait_until(lambda: ledger.mailbox.free_in_s(retries_of(CONSUMER)) == 0)
    counts = run(handle, b)
    assert (counts.received, counts.handled, counts.waiting) == (2, 2, 0)
    assert ran == [1, 1, 2]


def test_a_redelivery_of_what_waits_waits(run: Run) -> None:
    """It spends no try, and says that its message is not handled yet."""
    assert run(fail, "a", backoff="1h").waiting == 1
    counts = run(fail_b, "a", "c", backoff="1h")
    assert (counts.handled, counts.waiting) == (1, 1)


@pytest.mark.parametrize("ids", ["a", "aba"])
def test_what_waited_and_was_delivered_again(run: Run, ledger: Ledger, ids: str) -> None:
    """Its delivery counts as waiting until its retry, and once only, in whichever order."""
    own = {*ids}
    assert run(fail, *own, backoff="2s").waiting == len(own)
    failed_at = ledger.now()
    wait_until(lambda: ledger.now() > failed_at)
    counts = run(nothing, *ids, drains=True)
    assert (counts.received, counts.handled, counts.waiting) == (len(ids), len(own), 0)


def test_what_comes_to_an_end_in_its_run(run: Run) -> None:
    """It waits no more in the counts: a message is counted once however often it is tried."""
    counts = run(fail_b, "a", "b", drains=True, tries="3", backoff="10ms")
    assert (counts.received, counts.handled, counts.failed, counts.waiting) == (2, 1, 1, 0)


def test_a_dead_letter_has_the_body(run: Run, ledger: Ledger) -> None:
    """And the error; a retry of it makes a later task run it."""
    row = {"id": "b", "body": "whole", "headers": [("as", "it came")]}
    assert run(fail_b, row, tries="1").failed == 1
    [letter] = ledger.dead()
    assert (letter.key, letter.message.body) == (key_of("b"), b"whole")
    assert letter.message.headers == {"as": "it came"}
    assert "ValueError: never" in (letter.error or "")
    ledger.retry_dead(letter.id)
    seen: list[bytes] = []
    counts = run(lambda message: seen.append(message.body))
    assert (counts.received, counts.handled) == (1, 1)
    assert seen == [b"whole"]
    assert not [*ledger.dead()]


def test_what_is_in_doubt_is_kept_for_people(
    tmp_path: Path, ledger: Ledger, ledger_url: str
) -> None:
    """With its body, as its delivery is over; where a person lets it run again, a task does."""
    use(tmp_path)
    rows = [{"id": "a", "body": "whole"}]
    hold: dict[str, Any] = {"on_in_doubt": "hold", "lease": "300ms"}

    def work() -> None:
        run_task(open_ledger(ledger_url), append, tmp_path, rows, **hold)

    assert is_killed_at("in_handler", 1, work)
    assert run_task(ledger, append, tmp_path, rows, **hold).in_doubt == 1
    [letter] = ledger.dead()
    assert (letter.key, letter.message.body) == (key_of("a"), b"whole")
    ledger.retry_dead(letter.id)
    assert run_task(ledger, append, tmp_path, [], **hold).handled == 1
    assert (tmp_path / "effects").read_text().split() == ["a", "a"]


def test_a_dead_letter_that_cannot_be_kept_yet(
    run: Run, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others of its chunk are handled; the task comes back to it, and keeps it then."""
    granted(ledger.claim(key_of("b"), "1ms"))
    lease_until = ledger.now() + 0.001
    wait_until(lambda: ledger.now() > lease_until)
    monkeypatch.setattr(Mailbox, "keep", failing(1, StoreUnavailable("gone"), Mailbox.keep))
    counts = run(fail_b, "a", "b", "c", on_in_doubt="hold")
    assert (counts.handled, counts.in_doubt) == (2, 1)
    [letter] = ledger.dead()
    assert letter.key == key_of("b")


def test_a_step_that_is_not_awaited_beside_an_error(run: Run) -> None:
    """The error is what it was, and Python warns of nothing."""
    made: list[Any] = []

    async def debit() -> None:
        pytest.fail("it ran")

    def handle(message: Message) -> None:
        made.append(message.step("debit", debit))
        raise Reject("too late")

    assert run(handle, "a").quarantined == {"too late": 1}
    assert [getcoroutinestate(each) for each in made] == [CORO_CLOSED]


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), FencedError("of another")]
)
def test_whatever_a_handler_raises_is_a_failure(
    run: Run, ledger: Ledger, error: BaseException
) -> None:
    """It counts as an attempt, and those behind it run."""

    def handle(message: Message) -> None:
        if message.id == "b":
            raise error

    counts = run(handle, "a", "b", "c", drains=True, tries="2", backoff="10ms")
    assert (counts.handled, counts.failed) == (2, 1)
    record = record_of(ledger, key_of("b"))
    assert (record.attempts, record.exhausted) == (2, True)


@pytest.mark.in_turn("Spark is killed")
@pytest.mark.parametrize("way", ["exit", "return", "raise"])
def test_a_forked_child_goes_no_further(run: Run, tmp_path: Path, way: str) -> None:
    """A child that leaves the handler ends there: what follows is its parent's."""
    log = tmp_path / "ran"

    def handle(message: Message) -> None:
        with log.open("a") as file:
            file.write(f"{message.id}\n")
        child = os.fork()
        if child == 0:
            if way == "exit":
                sys.exit(0)
            if way == "raise":
                raise ValueError("of the child")
            return
        os.waitpid(child, 0)

    assert run(handle, *"abcdef").handled == 6
    assert Counter(log.read_text().split()) == dict.fromkeys("abcdef", 1)


# ---- While the store is away -------------------------------------------------------------------


def test_a_full_disk(ledger: Ledger, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is told once, with its reason, however often a task tries to store what it has done. Of
    consumers, functions and relays: tests/unit/test_outages.
    """
    tries = itertools.count()

    def limit(connection: Any, *_: object) -> None:
        connection.execute(f"PRAGMA max_page_count = {1 if next(tries) < 20 else 1_000_000}")

    event.listen(Pool, "checkout", limit)
    try:
        counts = run_task(ledger, lambda _: "x" * 10_000, tmp_path, ["a", "b"], results="keep")
    finally:
        event.remove(Pool, "checkout", limit)
    assert counts.handled == 2
    assert events_in(caplog) == ["store_unavailable", "store_available"]
    assert "database or disk is full" in caplog.messages[0]


def test_leases_that_cannot_be_extended(
    meddling: MeddlingStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of two outages is told once when it begins, with its reason and no traceback, and once
    when it ends, however many claims and failed beats: consumers and functions have this heartbeat.
    """
    told = ["lease_extension_failed", "lease_extension_recovered"]

    def handle(message: Message) -> None:
        if message.id in ("m03", "m07"):
            meddling.meddle, more = away, len(meddling.calls) + 3
            wait_until(lambda: len(meddling.calls) >= more)
            meddling.meddle, ends = nothing, events_in(caplog).count(told[1])
            wait_until(lambda: events_in(caplog).count(told[1]) > ends, limit_s=60)

    rows = [f"m{n:02}" for n in range(40)]
    assert run_task(Ledger(meddling), handle, tmp_path, rows, lease="1s").handled == 40
    assert events_in(caplog) == told * 2
    assert caplog.text.count("the store is away") == 2
    assert "Traceback" not in caplog.text
