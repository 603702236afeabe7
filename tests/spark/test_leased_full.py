"""Mode `leased`: what handlers can do with a message, and what is left where a task dies."""

from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import sessionmaker
from tests.records import granted, record_of
from tests.spark.tasks import append, is_killed_at, key_of, run_task, use

from oncely import Ledger, Message, Relay, State, open_ledger
from oncely.spark.sink.counts import Counts
from oncely.transports.open_transport import open_transport

Run = Callable[..., Counts]


@pytest.fixture
def run(ledger: Ledger, tmp_path: Path) -> Run:
    """Run a task over ids or rows; return what it counted."""

    def run_on(handler: Callable[[Message], Any], *rows: Any, **options: Any) -> Counts:
        return run_task(ledger, handler, tmp_path, rows, **options)

    return run_on


def received(queue: str) -> list[tuple[str, bytes]]:
    """The ids and bodies of what is in a queue, taken out of it."""
    with closing(open_transport(queue)) as transport:
        taken = transport.receive("receipts", 100, 0)
        return [(each.message.id, each.message.body) for each in taken]


# ---- What a handler can do ---------------------------------------------------------------------


def test_steps_are_passed_over(run: Run, ledger: Ledger) -> None:
    """A step that has run is not run by the next try; its result is there."""
    ran: list[str] = []

    def debit(id_: str) -> int:
        ran.append(id_)
        return len(ran)

    def handle(message: Message) -> int:
        number = message.step("debit", debit, message.id)
        if message.claim is not None and message.claim.attempts == 1:
            raise ValueError("the log is away")
        return int(number)

    counts = run(handle, "a", "b", drains=True, backoff="10ms", results="keep")
    assert counts.handled == 2
    assert ran == ["a", "b"]
    assert [record_of(ledger, key_of(id_)).result for id_ in "ab"] == [1, 2]


@pytest.fixture
def queue(tmp_path: Path) -> str:
    """Where the queue `receipts` is: nobody who sends makes it."""
    url = f"sqlite:///{tmp_path / 'queue.db'}"
    with closing(open_transport(url)) as transport:
        transport.subscribe("receipts", [])
    return url


def test_what_is_sent_waits_for_the_end(run: Run, ledger: Ledger, queue: str) -> None:
    """It is stored with the completion of a handler that succeeds; a relay sends it."""

    def handle(message: Message) -> None:
        message.send("receipts", {"for": message.id})
        if message.id == "b":
            raise ValueError("never")

    counts = run(handle, "a", "b", "c", drains=True, tries="2", backoff="10ms")
    assert (counts.handled, counts.failed) == (2, 1)
    assert ledger.mailbox.backlog().waiting == 2
    assert ledger.counts() == {("tests", State.HANDLED): 2, ("tests", State.FAILED): 1}
    with closing(open_transport(queue)) as transport:
        assert Relay(ledger, transport).send_waiting().sent == 2
    assert [body for _, body in received(queue)] == [b'{"for": "a"}', b'{"for": "c"}']
    assert ledger.counts() == {("tests", State.COMPLETED): 2, ("tests", State.FAILED): 1}


def test_a_task_sends_where_it_is_told_to(
    run: Run, ledger: Ledger, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a transport it sends what its handlers sent, and completes."""
    monkeypatch.setenv("QUEUE_URL", queue)
    ids = [f"m{number}" for number in range(30)]
    counts = run(lambda message: message.send("receipts", {}), *ids, transport="env:QUEUE_URL")
    assert counts.handled == 30
    assert len(received(queue)) == 30
    assert ledger.counts() == {("tests", State.COMPLETED): 30}


def test_what_an_earlier_task_left_is_sent(run: Run, ledger: Ledger, queue: str) -> None:
    """The next task that meets the message sends; its handler does not run again."""

    def handle(message: Message) -> None:
        message.send("receipts", {})

    assert run(handle, "a", "b").handled == 2
    again = run(handle, "a", "b", transport=queue)
    assert (again.handled, again.duplicates_ledger) == (0, 2)
    assert len(received(queue)) == 2
    assert ledger.counts() == {("tests", State.COMPLETED): 2}


# ---- Copies and replays ------------------------------------------------------------------------


def test_copies_in_other_chunks_wait_as_well(ledger: Ledger, tmp_path: Path) -> None:
    """A copy of what waits for another try spends none, and counts as a copy."""
    tried: list[str] = []

    def fail(message: Message) -> None:
        tried.append(message.id)
        raise ValueError("not yet")

    counts = run_task(ledger, fail, tmp_path, ["a"] * 3, 1, tries="3", backoff="1h")
    assert (counts.failed, counts.duplicates_input, counts.waiting) == (0, 2, 1)
    assert tried == ["a"]


# ---- Fences ------------------------------------------------------------------------------------


def test_who_was_taken_over_stores_nothing(run: Run, ledger: Ledger, ledger_url: str) -> None:
    """The end of its handler is refused, with all that it sent; the other one counts."""
    engine = create_engine(ledger_url)

    def handle(message: Message) -> str:
        message.send("receipts", {})
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM processed_messages"))
        ledger.complete(granted(ledger.claim(key_of(message.id))), "theirs")
        return "ours"

    counts = run(handle, "a", results="keep", since="0", tries="1")
    engine.dispose()
    assert (counts.handled, counts.duplicates_input) == (0, 1)
    assert ledger.mailbox.backlog().waiting == 0
    record = record_of(ledger, key_of("a"))
    assert (record.state, record.result) == (State.COMPLETED, "theirs")


# ---- In doubt ----------------------------------------------------------------------------------


@pytest.mark.parametrize("on_in_doubt", ["tests.spark.tasks:probe", "hold", "retry"])
def test_a_crash_in_the_midst_of_a_chunk(
    ledger: Ledger, ledger_url: str, tmp_path: Path, on_in_doubt: str
) -> None:
    """A probe tells which effects have happened; hold doubles none; retry loses none."""
    use(tmp_path)
    ids = [f"m{number}" for number in range(10)]

    def work() -> None:
        run_task(open_ledger(ledger_url), append, tmp_path, ids, 5, lease="1s", chunk="5")

    assert is_killed_at("in_handler", 3, work)
    counts = run_task(
        ledger, append, tmp_path, ids, 5, lease="1s", since="0", on_in_doubt=on_in_doubt
    )
    effects = (tmp_path / "effects").read_text().split()
    # Three of five that were claimed have happened; of the last five nobody knew.
    match on_in_doubt:
        case "hold":
            assert effects == [*ids[:3], *ids[5:]]
            assert (counts.handled, counts.in_doubt) == (5, 5)
        case "retry":
            assert sorted(effects) == sorted([*ids[:3], *ids])
            assert (counts.handled, counts.in_doubt) == (10, 0)
        case _:
            assert sorted(effects) == ids
            assert (counts.handled, counts.duplicates_input) == (7, 3)


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("policy", ["tests.spark.tasks:probe", "hold", "retry"])
def test_an_error_after_which_nobody_knows(
    ledger: Ledger, ledger_url: str, tmp_path: Path, policy: str, joins: bool
) -> None:
    """It is counted as in doubt, and repeats its effect only under `retry`."""
    use(tmp_path)

    def handle(message: Message, _: Any = None) -> None:
        append(message)
        raise TimeoutError("no answer")

    begins = sessionmaker(create_engine(ledger_url)) if joins else None
    rules: Any = {"on_in_doubt": policy, "backoff": "10ms", "tries": "2", "drains": True}
    rules["in_doubt_on"] = "tests.spark.tasks:Message, ValueError, oncely.Unanswered"
    counts = run_task(ledger, handle, tmp_path, "ab", 5, begins, **rules)
    is_retry = policy == "retry"
    assert (len((tmp_path / "effects").read_text().split()) == 2) is not is_retry
    assert (counts.failed, counts.in_doubt) == (2 * is_retry, 2 * (policy == "hold"))


# ---- Too old -----------------------------------------------------------------------------------


def aged(id_: str, days: float) -> dict[str, Any]:
    return {"id": id_, "time": datetime.now(UTC) - timedelta(days=days)}


def forget(ledger: Ledger, age: timedelta) -> None:
    ledger._store.forget_until({"tests": ledger.now() - age.total_seconds()})


def test_too_old_is_set_aside(run: Run, ledger: Ledger) -> None:
    """What the ledger may have forgotten is not run; what it knows, however old, is a duplicate."""
    forget(ledger, timedelta(days=7))
    ledger.complete(granted(ledger.claim(key_of("known"))))
    while ledger.now() == record_of(ledger, key_of("known")).first_seen:
        pass  # It is of before the run, also by a clock that goes by milliseconds.
    rows = [aged("new", 6.9), aged("old", 7.1), aged("known", 40), {"id": "timeless"}]
    rows.append({"id": "naive", "time": datetime.now(UTC).replace(tzinfo=None)})
    ran: list[str] = []
    counts = run(lambda message: ran.append(message.id), *rows)
    [(reason, count)] = counts.quarantined.items()
    assert reason.startswith("too old: sent before ")
    assert (count, counts.handled, counts.duplicates_ledger) == (1, 3, 1)
    assert sorted(ran) == ["naive", "new", "timeless"]
    assert ledger.find(key_of("old")) is None
    assert run(lambda _: None, aged("old", 7.1), on_too_old="run").handled == 1
