"""Consumer: it is stopped, its handlers are, and nothing is lost or taken for done."""

import asyncio
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import text
from tests.conditions import LIMIT_S, wait_until
from tests.meddling import MeddlingStore
from tests.records import record_of
from tests.unit.conftest import Outage, Queue, Sql, extended

from oncely._util import sqlite_files
from oncely.consumer import Consumer
from oncely.consumer.report import ConsumerReport
from oncely.consumer.sink import DeliverySink
from oncely.consumer.turn import DeliveryTurn
from oncely.core.errors import FencedError
from oncely.core.message import Message
from oncely.core.policy import Policy, at_least_once, at_most_once, effectively_once
from oncely.core.record import Key, State
from oncely.core.turn import Turn
from oncely.core.verdicts import Ack, Delay, Requeue
from oncely.ledger.ledger import Ledger
from oncely.middleware import RateLimited
from oncely.middleware.chain import CallNext, Middleware
from oncely.transports.transport import Delivery


@pytest.fixture
def hang() -> Iterator[threading.Event]:
    """What a handler may wait for that is not to end before the test does."""
    event = threading.Event()
    yield event
    event.set()


def consumer_of(queue: Queue, ledger: Ledger, policy: Policy = Policy()) -> Consumer:
    """Of the queue."""
    return Consumer(queue, "in").idempotent(ledger, "billing", policy=policy)


def waiting(queue: Queue) -> list[str]:
    """The ids of what is in the queue, for anybody."""
    return [delivery.message.id for delivery in queue.receive("in", 100, 0)]


def telling() -> tuple[threading.Event, Middleware]:
    """An event that is set when a consumer with this middleware tells those who wait to stop."""
    stopped = threading.Event()

    def told(message: Message, call_next: CallNext) -> Any:
        return call_next(message)

    told.stop = stopped.set  # type: ignore[attr-defined]  # As a middleware that waits has it.
    return stopped, told


# ---- Told to stop ------------------------------------------------------------------------------


def test_stopped_by_a_handler(queue: Queue, ledger: Ledger) -> None:
    """What runs comes to its end; what has not begun goes back unhandled, without a trace."""
    queue.put(*map(str, range(10)))
    consumer = consumer_of(queue, ledger).window(1)

    def handle(message: Message) -> None:
        if message.id == "3":
            consumer.stop()

    report = consumer.consume(handle)
    assert 4 <= report.handled < 10
    assert ledger.counts() == {("billing", State.COMPLETED): report.handled}
    assert len(waiting(queue)) == 10 - report.handled


@pytest.mark.parametrize("policy", [Policy(), at_most_once()])
def test_claimed_and_not_begun(queue: Queue, ledger: Ledger, policy: Policy) -> None:
    """What is claimed when the consumer stops, and has not begun, does not begin any more."""
    queue.put("1", "2")
    stopped, told = telling()
    consumer = consumer_of(queue, ledger, policy).middleware(told)
    handled = []

    def handle(message: Message) -> None:
        handled.append(message.id)
        wait_until(lambda: ledger.find(Key("billing", "2")) is not None)
        consumer.stop()
        assert stopped.wait(60)

    consumer.consume(handle)
    assert handled == ["1"]
    assert queue.verdicts == [Ack(), Requeue()]
    assert waiting(queue) == ["2"]
    assert ledger.find(Key("billing", "2")) is None


def test_stopped_before(queue: Queue, ledger: Ledger) -> None:
    """Who is stopped before it begins does nothing, and can be used again."""
    queue.put("1")
    consumer = consumer_of(queue, ledger)
    consumer.stop()
    assert consumer.consume(lambda _: None) == ConsumerReport()
    assert consumer.consume(lambda _: None, drain=True).handled == 1


def test_ended_before_an_error(
    queue: Queue, ledger: Ledger, hang: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has ended when an error ends the consumer is stored; all else is given back."""
    go, c_runs, receive = threading.Event(), threading.Event(), queue.receive

    def handle(message: Message) -> None:
        if message.id == "a":
            assert go.wait(LIMIT_S)
            return
        if message.id == "c":
            c_runs.set()
        hang.wait(LIMIT_S)

    def receive_until_claimed(*how: Any) -> Sequence[Delivery]:
        if ledger.find(Key("billing", "c")) is None:
            return receive(*how)
        go.set()
        # In the thread in which "a" has run.
        assert c_runs.wait(LIMIT_S)
        raise ValueError("no more messages")

    def noting(_: DeliverySink, turns: Sequence[DeliveryTurn]) -> None:
        given_back.update(turn.message.id for turn in turns)

    given_back: set[str] = set()
    monkeypatch.setattr(DeliverySink, "give_back", noting)
    monkeypatch.setattr(queue, "receive", receive_until_claimed)
    queue.put("a", "b", "c")
    with pytest.raises(ValueError, match="no more messages"):
        consumer_of(queue, ledger).concurrency(2).consume(handle)
    monkeypatch.undo()
    assert ledger.counts() == {("billing", State.COMPLETED): 1}
    assert queue.verdicts == [Ack()]
    assert {*waiting(queue)} == given_back == {"b", "c"}


@pytest.mark.parametrize("grace", [0, 0.1])
@pytest.mark.parametrize("is_async", [False, True])
def test_released_after_the_grace(
    queue: Queue, ledger: Ledger, hang: threading.Event, is_async: bool, grace: float
) -> None:
    """What runs on when the grace is over is released, as if it had never been claimed."""
    queue.put("1")
    consumer = consumer_of(queue, ledger, at_least_once()).grace(grace)

    def handle(message: Message) -> None:
        consumer.stop()
        hang.wait()

    async def handle_async(message: Message) -> None:
        consumer.stop()
        await asyncio.sleep(3600)

    report = consumer.consume(handle_async if is_async else handle)
    assert (report.received, report.handled, queue.verdicts) == (1, 0, [])
    assert ledger.find(Key("billing", "1")) is None
    assert waiting(queue) == ["1"]


@pytest.mark.parametrize("policy", [at_least_once(), effectively_once()])
@pytest.mark.parametrize("together", [False, True])
def test_a_retry_in_a_transaction_after_the_grace(
    queue: Queue, sql: Sql, monkeypatch: pytest.MonkeyPatch, policy: Policy, together: bool
) -> None:
    """Its claim is older than its transaction, and was given back: so nothing of it is committed,
    since the message runs again.
    """
    # The handler's transaction locks the file.
    monkeypatch.setattr(sqlite_files, "BUSY_TIMEOUT_S", 0.1)
    queue.put("1")
    consumer = Consumer(queue, "in").idempotent(sql.ledger, "billing", policy=policy)
    consumer.transactional(sql.engine, together=together).backoff(0.01).grace(0.1)
    closed, threads = threading.Event(), []

    def handle(message: Message | Sequence[Message], connection: Any) -> None:
        threads.append(threading.current_thread())
        if len(threads) == 1:
            raise ValueError("not yet")
        consumer.stop()
        assert closed.wait(LIMIT_S)
        connection.execute(text("INSERT INTO effects (name) VALUES ('1')"))

    consumer.consume(handle)
    closed.set()
    threads[-1].join(LIMIT_S)
    assert sql.effects() == []
    assert sql.record("1").state is not State.COMPLETED


def test_what_may_not_repeat_stays_claimed(
    queue: Queue, ledger: Ledger, hang: threading.Event
) -> None:
    """Where an effect must never repeat, what runs on is in doubt when its lease is over."""
    queue.put("1")
    consumer = consumer_of(queue, ledger, at_most_once()).grace(0.1)

    def handle(message: Message) -> None:
        consumer.stop()
        hang.wait()

    consumer.consume(handle)
    assert record_of(ledger, Key("billing", "1")).state is State.PROCESSING


@pytest.mark.parametrize("when", ["stopped", "while it is released", "released"])
def test_middleware_goes_on_when_it_is_too_late(
    queue: Queue,
    ledger: Ledger,
    meddling: MeddlingStore,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
) -> None:
    """A middleware that goes on after its message was given back is told so, and nothing runs."""
    queue.put("1")
    consumer = Consumer(queue, "in")
    go_on, done = threading.Event(), threading.Event()
    raised: list[type[BaseException]] = []

    def go_on_now() -> None:
        go_on.set()
        assert done.wait(LIMIT_S)

    def slow(message: Message, call_next: CallNext) -> None:
        if when == "while it is released":
            meddling.once(go_on_now)
        consumer.stop()
        assert go_on.wait(LIMIT_S)
        try:
            call_next(message)
        except FencedError as error:
            raised.append(type(error))
        finally:
            done.set()

    def stopped(turn: Turn, policy: Policy) -> None:
        stop(turn, policy)
        go_on_now()

    stop = Turn.stopped
    if when == "stopped":
        monkeypatch.setattr(Turn, "stopped", stopped)
    consumer.middleware(slow).idempotent(ledger, "billing").grace(0.1).consume(pytest.fail)
    go_on_now()
    assert raised == [FencedError]
    assert ledger.find(Key("billing", "1")) is None
    assert extended(ledger) == []


@pytest.mark.parametrize("is_before", [True, False])
def test_waiting_for_its_turn(queue: Queue, ledger: Ledger, is_before: bool) -> None:
    """What waits in a middleware is told of the stop: it has not begun, whatever the policy."""
    queue.put("1", "2")
    consumer = Consumer(queue, "in")

    def stopped(stopping: threading.Event, seconds: float) -> bool:
        consumer.stop()
        return stopping.wait(seconds)

    limit = RateLimited(1 / 3600, wait=stopped)
    if is_before:
        consumer.middleware(limit)
    consumer.idempotent(ledger, "billing", policy=at_most_once())
    if not is_before:
        consumer.middleware(limit)

    consumer.concurrency(2).consume(lambda _: None)
    assert sorted(queue.verdicts, key=repr) == [Ack(), Delay(1.0)]
    assert sum(ledger.counts().values()) == 1


@pytest.mark.parametrize(("calls", "grace"), [(3, 60), (math.inf, 0.2)])
def test_stopped_while_the_store_is_away(
    queue: Queue, ledger: Ledger, outage: Outage, calls: float, grace: float
) -> None:
    """What ends while the store is away is stored within the grace, where it comes back; where it
    does not, the grace is the end of waiting for it.
    """
    queue.put("1")
    consumer = consumer_of(queue, ledger).grace(grace)

    def handle(_: Message) -> None:
        outage.begin(calls)
        consumer.stop()

    is_back = calls == 3
    assert consumer.consume(handle).handled == is_back
    outage.end()
    state = record_of(ledger, Key("billing", "1")).state
    assert state is (State.COMPLETED if is_back else State.PROCESSING)


def test_transactions_that_run_on(queue: Queue, sql: Sql, hang: threading.Event) -> None:
    """A transaction that runs on after the grace is left alone: its claim is not to be seen."""
    queue.put("1")
    consumer = consumer_of(queue, sql.ledger).transactional(sql.engine).grace(0.1)
    ended = threading.Event()

    def handle(message: Message, connection: Any) -> None:
        consumer.stop()
        hang.wait()
        ended.set()

    assert consumer.consume(handle).handled == 0
    hang.set()
    ended.wait()
    wait_until(lambda: sql.ledger.find(Key("billing", "1")) is not None)
    assert consumer.consume(handle, drain=True).duplicates == 1


# ---- Handlers that end by what is not an Exception ----------------------------------------------


def exits(message: Message) -> None:
    """A handler that wants its process to end."""
    raise SystemExit


async def is_cancelled(message: Message) -> None:
    """A handler that somebody cancels."""
    raise asyncio.CancelledError


async def exits_async(message: Message) -> None:
    """The same, awaited."""
    raise SystemExit


async def exits_in_a_task(message: Message) -> None:
    """The same, in a task of its own."""
    await asyncio.create_task(exits_async(message))


def pass_on(message: Message, call_next: CallNext) -> Any:
    """A middleware that is not async."""
    return call_next(message)


@pytest.mark.parametrize("handler", [exits, exits_async, exits_in_a_task, is_cancelled])
@pytest.mark.parametrize("policy", [at_least_once(), at_most_once()])
@pytest.mark.parametrize("middlewares", [[], [pass_on]])
def test_handler_ends_itself(
    queue: Queue,
    live: Ledger,
    handler: Callable[..., Any],
    policy: Policy,
    middlewares: list[Middleware],
) -> None:
    """A handler that ends by whatever it may be has failed: its tries are counted, and the consumer
    goes on.
    """
    queue.put("1")
    policy = replace(policy, tries=2, backoff="1ms")
    report = consumer_of(queue, live, policy).middleware(*middlewares).consume(handler, drain=True)
    tries = 2 if policy.on_failed == "retry" else 1
    assert (report.retried, report.failed, report.dead_lettered) == (tries - 1, 1, 1)
    record = record_of(live, Key("billing", "1"))
    assert (record.state, record.attempts) == (State.FAILED, tries)


def test_transaction_of_a_handler_that_ends_itself(queue: Queue, sql: Sql) -> None:
    """In a transaction, too: it is rolled back, and its failure recorded."""
    queue.put("1")
    policy = Policy(tries=2, backoff="1ms")
    consumer = consumer_of(queue, sql.ledger, policy).transactional(sql.engine)

    def handle(message: Message, connection: Any) -> None:
        raise SystemExit

    report = consumer.consume(handle, drain=True)
    assert (report.retried, report.failed) == (1, 1)
    record = sql.record("1")
    assert record.attempts == 2


def test_a_handler_forks(queue: Queue, ledger: Ledger) -> None:
    """A child that returns out of the handler of its parent handles no other message."""
    queue.put("1", "2", "3", "4")
    read, write = os.pipe()
    children = []

    def handle(message: Message) -> None:
        os.write(write, f"{message.id} in {os.getpid()}\n".encode())
        if message.id == "1":
            wait_until(lambda: ledger.find(Key("billing", "2")) is not None)
            child = os.fork()
            if child:
                children.append(child)
                os.waitpid(child, 0)

    consumer_of(queue, ledger).consume(handle, drain=True)
    os.close(write)
    ran = os.read(read, 1000).decode().splitlines()
    os.close(read)
    assert ran == [f"{number} in {os.getpid()}" for number in range(1, 5)]
