"""Consumer: copies of a message, messages of one key, and how many handlers run at a time."""

import asyncio
import threading
from collections import defaultdict

import pytest
from tests.conditions import wait_until
from tests.records import granted, record_of
from tests.unit.conftest import Queue

from oncely.consumer import Consumer
from oncely.core.errors import MessageError
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.record import Key
from oncely.core.verdicts import Ack, Delay
from oncely.ledger.ledger import Ledger


def consumer_of(queue: Queue, ledger: Ledger) -> Consumer:
    """Of the queue, with several threads."""
    return Consumer(queue, "in").idempotent(ledger, "billing").concurrency(4).backoff(0.05)


# ---- Copies ------------------------------------------------------------------------------------


def test_a_storm_of_copies(queue: Queue, ledger: Ledger, meddling_calls: list[str]) -> None:
    """Of a thousand copies of a message one is handled; the others are turned away together."""
    queue.put(*["1"] * 1000)
    handled: list[str] = []
    report = (
        consumer_of(queue, ledger)
        .window(1000)
        .consume(lambda message: handled.append(message.id), drain=True)
    )
    assert handled == ["1"]
    assert (report.received, report.handled, report.duplicates) == (1000, 1, 999)
    assert queue.verdicts == [Ack()] * 1000
    assert len(meddling_calls) < 100


@pytest.fixture
def meddling_calls(meddling: object) -> list[str]:
    """What the store was asked for."""
    calls: list[str] = meddling.calls  # type: ignore[attr-defined]
    return calls


def test_copies_that_fail(queue: Queue, live: Ledger) -> None:
    """Where the first of several copies fails, the next is another try, and never beside it."""
    queue.put(*["1"] * 400)
    running = threading.Lock()
    runs = []

    def handle(message: Message) -> None:
        assert running.acquire(blocking=False)
        try:
            runs.append(message)
            if len(runs) < 4:
                raise ValueError("not yet")
        finally:
            running.release()

    report = consumer_of(queue, live).window(1000).tries(4).consume(handle, drain=True)
    assert (len(runs), report.handled, report.retried) == (4, 1, 3)
    assert Delay(1.0) not in queue.verdicts


def test_copies_of_what_no_handler_takes(queue: Queue, ledger: Ledger) -> None:
    """Copies that fail for good, one after another, are all set aside."""
    queue.put(*["1"] * 500)
    report = consumer_of(queue, ledger).window(1000).tries(1).consume(raise_error, drain=True)
    assert (report.failed, report.dead_lettered) == (1, 500)


def raise_error(message: Message) -> None:
    """A handler that fails."""
    raise ValueError("no")


# ---- Order -------------------------------------------------------------------------------------


def put_rounds(queue: Queue, rounds: int) -> None:
    """Publish messages of four keys by turns, each numbered within its key."""
    for number in range(rounds):
        for key in "abcd":
            queue.put(f"{key}{number}", key=key)


def test_in_order(queue: Queue, live: Ledger) -> None:
    """Messages of one key are handled one after another, as they were published; a failed one
    holds up those behind it, and those of no other key.
    """
    put_rounds(queue, 10)
    done: dict[str | None, list[str]] = defaultdict(list)
    running: set[str | None] = set()
    failures = {"a0", "a1", "b5", "c9"}

    def handle(message: Message) -> None:
        assert message.key not in running
        running.add(message.key)
        try:
            if message.id in failures:
                failures.remove(message.id)
                raise ValueError("not yet")
            done[message.key].append(message.id)
        finally:
            running.remove(message.key)

    report = consumer_of(queue, live).ordered().consume(handle, drain=True)
    assert done == {key: [f"{key}{number}" for number in range(10)] for key in "abcd"}
    assert (report.handled, report.retried, report.dead_lettered) == (40, 4, 0)


def test_given_up_holds_nobody_up(queue: Queue, live: Ledger) -> None:
    """Behind what is set aside the next of its key is handled."""
    queue.put("1", "2", key="a")
    done = []

    def handle(message: Message) -> None:
        if message.id == "1":
            raise ValueError("no")
        done.append(message.id)

    report = consumer_of(queue, live).ordered().tries(2).consume(handle, drain=True)
    assert (done, report.dead_lettered) == (["2"], 1)


def test_others_are_not_ordered(queue: Queue, ledger: Ledger) -> None:
    """Messages without a key do not wait for each other, nor any where order is not asked for."""
    queue.put("1", "2")
    both = threading.Barrier(2, timeout=60)
    consumer_of(queue, ledger).ordered().consume(lambda _: both.wait(), drain=True)
    queue.put("3", "4", key="a")
    consumer_of(queue, ledger).consume(lambda _: both.wait(), drain=True)


# ---- How many at a time ------------------------------------------------------------------------


def test_so_many_at_a_time(queue: Queue, ledger: Ledger) -> None:
    """As many threads work as are asked for, and no more."""
    queue.put(*map(str, range(40)))
    four = threading.Barrier(4, timeout=60)
    running = most = 0
    lock = threading.Lock()

    def handle(_: Message) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        four.wait()
        with lock:
            running -= 1

    consumer_of(queue, ledger).consume(handle, drain=True)
    assert most <= 8  # Those that have met, and those that are to meet.
    names = {thread.name for thread in threading.enumerate()}
    wait_until(lambda: not any("handler-5" in name for name in names))


def test_so_many_tasks_at_a_time(queue: Queue, ledger: Ledger) -> None:
    """Async handlers run side by side on one loop, so many at a time."""
    queue.put(*map(str, range(40)))
    running = most = 0
    met = asyncio.Event()

    async def handle(_: Message) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 4:
            met.set()
        await met.wait()
        await asyncio.sleep(0)
        running -= 1

    consumer_of(queue, ledger).consume(handle, drain=True)
    assert (running, most) == (0, 4)


@pytest.mark.parametrize("count", [1, 3])
def test_no_task_is_forgotten(queue: Queue, ledger: Ledger, count: int) -> None:
    """Async handlers that end at the moment at which others come leave none of these waiting."""

    async def handle(message: Message) -> None:
        if int(message.id) < 600:
            queue.put(str(int(message.id) + 3))

    queue.put("0", "1", "2")
    consumer = Consumer(queue, "in").idempotent(ledger, "billing").concurrency(count)
    assert consumer.consume(handle, drain=True).handled == 603


def test_a_slow_handler_keeps_nothing_back(queue: Queue, ledger: Ledger) -> None:
    """What has ended is stored while another of its window still runs."""
    queue.put(*map(str, range(200)))
    consumer = Consumer(queue, "in").idempotent(ledger, "billing", policy=Policy(tries=1))

    def handle(message: Message) -> None:
        if message.id == "199":
            wait_until(lambda: queue.verdicts == [Ack()] * 199)

    consumer.consume(handle, drain=True)
    assert not queue.put_aside()


def test_the_wrong_id(queue: Queue, ledger: Ledger) -> None:
    """A middleware before `idempotent` cannot make another message of one."""
    queue.put("1")
    consumer = Consumer(queue, "in").middleware(lambda _, call_next: call_next(Message("2")))
    consumer.idempotent(ledger, "billing", policy=Policy(tries=1))
    assert consumer.consume(raise_error, drain=True).dead_lettered == 1
    assert MessageError.__name__ in queue.put_aside()["1"]
    assert Delay(1.0) not in queue.verdicts


def test_a_suspect_runs_alone(queue: Queue, live: Ledger) -> None:
    """A message whose claim ran out runs while nothing else does, and is claimed for that."""
    key = Key("billing", "x")
    granted(live.claim(key, lease="1ms"))
    until = record_of(live, key).lease_until or 0.0
    wait_until(lambda: live.now() > until)
    lock, running, beside = threading.Lock(), set[str](), dict[str, set[str]]()
    x_runs, is_alone = threading.Event(), list[bool]()

    def handle(message: Message) -> None:
        with lock:
            running.add(message.id)
            beside[message.id] = {*running}
        if message.id == "a":
            # Where it runs beside this one it begins before that has ended.
            x_runs.wait(0.2)
        if message.id == "x":
            x_runs.set()
            record = record_of(live, key)
            is_alone.append((record.metadata or {}).get("claimed_alone") == record.fence)
        with lock:
            beside[message.id] |= running
            running.remove(message.id)

    queue.put(*"abxcdefgh")
    assert consumer_of(queue, live).consume(handle, drain=True).handled == 9
    assert (beside["x"], is_alone) == ({"x"}, [True])
    assert record_of(live, key).attempts == 1
