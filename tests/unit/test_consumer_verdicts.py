"""Consumer: what becomes of a delivery, whatever its handler and its ledger do."""

import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import text
from tests.conditions import wait_until
from tests.meddling import MeddlingStore, away
from tests.records import granted, record_of
from tests.unit.conftest import Deliver, Outage, Queue, Sql

from oncely._util import clock as process_clock
from oncely.consumer import Consumer
from oncely.consumer.turn import DeliveryTurn
from oncely.consumer.window import Window
from oncely.core.cases import Case
from oncely.core.errors import (
    BusyError,
    ConfigError,
    DuplicateError,
    FencedError,
    KeysLocked,
    MismatchError,
    OncelyError,
    StoreError,
    StoreUnavailable,
)
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.record import Key, State
from oncely.core.verdicts import Ack, DeadLetter, Delay
from oncely.ledger.ledger import Ledger
from oncely.ledger.mailbox import Mailbox
from oncely.middleware.chain import CallNext
from oncely.stores.memory_store import MemoryStore
from oncely.testing import ManualClock

KEY = Key("billing", "1")
AGAIN = Delay(1.0)
"""What could not be handled through no fault of its own."""
BACKOFF = Delay(30.0)
"""What has failed for the first time, as a policy has it by default."""


def raising(error: BaseException) -> Callable[..., Any]:
    """A handler that raises."""

    def handle(message: Message) -> None:
        raise error

    return handle


def never(message: Message) -> None:
    """A handler that is not to run."""
    raise AssertionError("the handler ran")


def nothing(message: Message) -> None:
    """A handler with nothing to do."""


# ---- Handled, or not granted -------------------------------------------------------------------


def test_other_content_is_set_aside(deliver: Deliver) -> None:
    """The same id with another body goes to the dead letters, with that reason; or is one."""
    deliver(nothing)
    other = Message("1", b"other")
    verdict = deliver(never, other)
    assert isinstance(verdict, DeadLetter)
    assert "MismatchError" in verdict.reason
    assert deliver(never, other, Policy(on_mismatch="ignore")) == Ack()


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Message(""), "empty id"),
        (Message("x" * 256), "too long id"),
        (Message("1", "text"), "body is not bytes"),  # type: ignore[arg-type]
        (Message("1", headers={"a": 1}), "a header is not text"),  # type: ignore[dict-item]
    ],
)
def test_unusable_is_set_aside(deliver: Deliver, message: Message, reason: str) -> None:
    """What no handler can be given is set aside, with the reason."""
    assert deliver(never, message) == DeadLetter(f"MessageError: {reason}")


# ---- Failures ----------------------------------------------------------------------------------

OUR_OWN: list[OncelyError] = [
    BusyError("another"),
    MismatchError("another"),
    DuplicateError("another"),
    FencedError("another"),
    StoreError("another"),
    ConfigError("another"),
]


@pytest.mark.parametrize("error", [ValueError("no"), *OUR_OWN], ids=lambda e: type(e).__name__)
def test_failures_are_the_handlers_own(
    deliver: Deliver, ledger: Ledger, clock: ManualClock, error: Exception
) -> None:
    """Whatever a handler raises is a failure of its message, with its backoff and its tries.

    So are the errors of another call that it made, which say nothing about this message.
    """
    policy = Policy(tries=2)
    assert deliver(raising(error), policy=policy) == BACKOFF
    assert (record_of(ledger, KEY).state, record_of(ledger, KEY).attempts) == (State.FAILED, 1)
    clock.advance(BACKOFF.delay_s)
    verdict = deliver(raising(error), policy=policy)
    assert isinstance(verdict, DeadLetter)
    assert type(error).__name__ in verdict.reason
    assert record_of(ledger, KEY).exhausted


# ---- The store is away -------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [Policy(), Policy(on_in_doubt=lambda _: "not_happened")])
def test_store_away_before(
    queue: Queue, ledger: Ledger, outage: Outage, policy: Policy, clock: ManualClock
) -> None:
    """While the store is away nothing runs, nothing is settled and no try is spent; when it is
    back, it goes on.
    """
    granted(ledger.claim(KEY, "60s"))
    clock.advance(61)  # The first message is in doubt.
    queue.put("1", "2")
    outage.begin()
    consumer = Consumer(queue, "in").idempotent(ledger, "billing", policy=policy)
    threading.Timer(0.3, outage.end).start()
    report = consumer.consume(nothing, drain=True)
    assert (report.handled, queue.verdicts) == (2, [Ack(), Ack()])
    # Nor does the claim that ran out cost one: nobody knows what its worker died of.
    assert record_of(ledger, KEY).attempts == 1


def test_store_away_and_it_runs(deliver: Deliver, outage: Outage) -> None:
    """Where the policy says so, messages run while the store is away. One that would send waits
    for the store; nothing is lost.
    """
    outage.begin()
    policy = Policy(on_outage="run", tries=1)
    assert deliver(nothing, policy=policy) == Ack()
    assert deliver(lambda message: message.send("post", b""), policy=policy) == AGAIN


def test_store_away_after(deliver: Deliver, outage: Outage, clock: ManualClock) -> None:
    """What has run is not acknowledged before the ledger knows that: else a duplicate would run."""

    def handle(_: Message) -> None:
        outage.begin()

    policy = Policy(on_in_doubt="hold", lease="500ms")
    assert deliver(handle, policy=policy) == AGAIN
    outage.end()
    assert deliver(never, policy=policy) == AGAIN
    clock.advance(1)
    assert isinstance(deliver(never, policy=policy), DeadLetter)


def test_store_refuses(queue: Queue, ledger: Ledger, meddling: MeddlingStore) -> None:
    """An error of the store that no waiting mends ends the run, at once."""
    queue.put("1", "2")

    def refuse() -> None:
        raise StoreError("permission denied")

    def handle(_: Message) -> None:
        meddling.meddle = refuse

    with pytest.raises(StoreError, match="permission denied"):
        Consumer(queue, "in").idempotent(ledger, "billing").consume(handle)


class Locking(MeddlingStore):
    """In which somebody holds the key of "25", for so many writes."""

    left = 5

    def update(self, case: Case) -> set[Key]:
        free = [row for row in case.rows if row[0].message_id != "25" or not self.left]
        written: set[Key] = super().update(case._replace(rows=free))
        if len(free) < len(case.rows):
            self.left -= 1
            raise KeysLocked("locked", {Key("billing", "25")}, written)
        return written


@pytest.mark.usefixtures("hurried")
def test_one_locked_key(queue: Queue) -> None:
    """What another transaction holds is stored when it is free, all others before that."""
    store = Locking(MemoryStore())
    queue.put(*map(str, range(50)))
    ledger = Ledger(store)
    Consumer(queue, "in").idempotent(ledger, "billing").consume(nothing, drain=True)
    assert (store.left, ledger.counts()) == (0, {("billing", State.COMPLETED): 50})


# ---- Another worker ----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [None, ValueError("no")])
def test_taken_over_comes_again(
    deliver: Deliver, rival: Ledger, clock: ManualClock, error: Exception | None
) -> None:
    """What another worker took over while it ran comes again, to be seen as theirs."""

    def handle(_: Message) -> None:
        clock.advance(301)
        rival.complete(granted(rival.claim(KEY)))
        if error:
            raise error

    assert deliver(handle) == AGAIN
    assert deliver(never) == Ack()


@pytest.mark.parametrize("suspects", [1, 2])
def test_nothing_runs_beside_a_suspect(
    queue: Queue,
    ledger: Ledger,
    rival: Ledger,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    suspects: int,
) -> None:
    """Not even beside the last one: what comes while it runs waits."""
    go_on, at = Window.go_on, 0

    def counted(window: Window[DeliveryTurn]) -> bool:
        nonlocal at
        at += 1
        return go_on(window)

    monkeypatch.setattr(Window, "go_on", counted)
    ids = [str(number) for number in range(suspects)]
    for each in ids:
        granted(rival.claim(Key("billing", each)))
    clock.advance(301)
    queue.put(*ids)
    steps: list[str] = []

    def handle(message: Message) -> None:
        steps.append(message.id)
        if message.id == ids[-1]:
            queue.put("a", "b")
            until = at + 20
            wait_until(lambda: at > until)
        steps.append("ended")

    consumer = Consumer(queue, "in").idempotent(ledger, "billing").concurrency(4)
    report = consumer.consume(handle, drain=True)
    assert report.handled == suspects + 2
    assert steps[: 2 * suspects] == [step for each in ids for step in (each, "ended")]


@pytest.mark.usefixtures("hurried")
def test_not_begun_when_the_lease_may_be_over(queue: Queue, ledger: Ledger, outage: Outage) -> None:
    """What was claimed, and waits in a process that stands still, is not begun afterwards: another
    worker may have it by then.
    """
    queue.put("1", "2")
    handled: list[str] = []

    def watch(message: Message, call_next: CallNext) -> None:
        try:
            call_next(message)
        except FencedError:
            outage.end()
            raise

    def handle(message: Message) -> None:
        handled.append(message.id)
        wait_until(lambda: ledger.find(Key("billing", "2")) is not None)
        outage.begin()  # No claim can be extended from now on.
        process_clock.sleep(301)

    consumer = Consumer(queue, "in").middleware(watch)
    consumer.idempotent(ledger, "billing")
    consumer.consume(
        handle, on_progress=lambda _: consumer.stop() if len(queue.verdicts) == 2 else None
    )
    assert handled == ["1"]
    assert sorted(queue.verdicts, key=repr) == [Ack(), AGAIN]
    assert ledger.find(Key("billing", "2")) is None


def test_the_loop_goes_on_while_the_store_is_away(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many ends are to be stored; so whoever asks for its pulse does not restart it. What
    has succeeded is stored, too, where the loop is interrupted before the store is back.
    """
    store, go_on, at, ended = MeddlingStore(MemoryStore()), Window.go_on, 0, list[str]()
    all_begun = threading.Barrier(4, lambda: setattr(store, "meddle", away))

    def let_rounds_pass() -> None:
        until = at + 20
        wait_until(lambda: at > until)

    def handle(message: Message) -> None:
        all_begun.wait()
        wait_until(lambda: len(ended) == int(message.id))
        let_rounds_pass()  # Each ends by itself.
        ended.append(message.id)

    def interrupt() -> None:
        wait_until(lambda: len(ended) == 4)
        let_rounds_pass()
        interrupted.set()

    interrupted = threading.Event()

    def counted(window: Window[DeliveryTurn]) -> bool:
        nonlocal at
        at += 1
        if interrupted.is_set():
            store.meddle = lambda: None
            raise KeyboardInterrupt
        return go_on(window)

    monkeypatch.setattr(Window, "go_on", counted)
    queue.put(*map(str, range(4)))
    with closing(Ledger(store)) as ledger:
        consumer = Consumer(queue, "in").idempotent(ledger, "billing").concurrency(4)
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            consumer.consume(handle)
        assert ledger.counts() == {("billing", State.COMPLETED): 4}


# ---- What the store does not take --------------------------------------------------------------

_REFUSES = (
    "CREATE TRIGGER no BEFORE INSERT ON processed_messages"
    " WHEN {} BEGIN SELECT RAISE(ABORT, 'not that'); END"
)


@pytest.mark.parametrize("how", ["plain", "transactions", "together"])
@pytest.mark.parametrize("others", [0, 9])
def test_one_that_the_store_refuses(queue: Queue, sql: Sql, how: str, others: int) -> None:
    """Where the store refuses one message, alone or among others, that becomes a dead letter of
    the broker, with the store's words; the others are handled.
    """
    with sql.engine.begin() as connection:
        connection.execute(text(_REFUSES.format("NEW.message_id = 'x'")))
    ids = [str(number) for number in range(others)]
    queue.put(*ids[:5], "x", *ids[5:])
    consumer = Consumer(queue, "in").idempotent(sql.ledger, "billing")
    if how != "plain":
        consumer.transactional(sql.engine, together=how == "together")
    report = consumer.consume(lambda *_: None, drain=True)
    assert (report.handled, report.dead_lettered) == (others, 1)
    assert "not that" in queue.put_aside()["x"]
    # What was written to find that out is gone.
    expected = {("billing", State.COMPLETED): others} if others else {}
    assert sql.ledger.counts() == expected


@pytest.mark.parametrize("how", ["plain", "transactions", "together"])
@pytest.mark.parametrize("others", [0, 9])
def test_one_that_the_store_cannot_keep(queue: Queue, sql: Sql, how: str, others: int) -> None:
    """Not as a dead letter either: it is one of the broker's, and nothing is lost."""
    with sql.engine.begin() as connection:
        for table in ("processed_messages", "waiting_messages"):
            refused = _REFUSES.replace(" no ", f" no_{table} ").replace("processed_messages", table)
            connection.execute(text(refused.format("NEW.message_id = 'x'")))
    ids = [str(number) for number in range(others)]
    queue.put(*ids[:5], "x", *ids[5:])
    consumer = Consumer(queue, "in").idempotent(sql.ledger, "billing")
    if how != "plain":
        consumer.transactional(sql.engine, together=how == "together")
    report = consumer.consume(lambda *_: None, drain=True)
    assert (report.handled, report.dead_lettered) == (others, 1)
    assert [each.message.id for each in queue.receive("in.dead", 10, 0)] == ["x"]


def test_an_outage_while_one_that_the_store_refuses_is_kept(
    queue: Queue, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It and what is kept beside it are redelivered, and become dead letters then."""
    with sql.engine.begin() as connection:
        connection.execute(text(_REFUSES.format("NEW.message_id = 'x'")))
    queue.put("y")
    consumer = Consumer(queue, "in").idempotent(sql.ledger, "billing").concurrency(4)
    consumer.consume(lambda _: None, drain=True)
    queue.publish("in", [Message("x", b"{}"), Message("y", b"other content")])
    keep, is_away = Mailbox.keep, [True]

    def fails_once(*given: Any) -> Any:
        if is_away:
            is_away.clear()
            raise StoreUnavailable("away for a moment")
        return keep(*given)

    monkeypatch.setattr(Mailbox, "keep", fails_once)
    consumer.consume(lambda _: None, drain=True)
    dead = sql.ledger.mailbox.dead(None, 10)
    assert sorted(letter.key.message_id for letter in dead) == ["x", "y"]


@pytest.mark.parametrize("count", [1, 10])
def test_a_store_that_refuses_all(queue: Queue, sql: Sql, count: int) -> None:
    """A store that takes no message ends the consumer, with its words: no message is to blame."""
    with sql.engine.begin() as connection:
        connection.execute(text(_REFUSES.format("true")))
    queue.put(*map(str, range(count)))
    with pytest.raises(StoreError, match="not that"):
        Consumer(queue, "in").idempotent(sql.ledger, "billing").consume(lambda _: None, drain=True)
    assert queue.put_aside() == {}
