"""Consumer: the fluent API, the decorator style, what handlers can do, and users' mistakes."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine
from tests.logs import events_in
from tests.unit.conftest import Queue, Sql

from oncely import open_ledger, open_transport
from oncely.consumer import Consumer
from oncely.core.commands import Acquire, Company
from oncely.core.errors import ConfigError
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.record import Key, State
from oncely.ledger.ledger import Ledger
from oncely.middleware import TimeLimit
from oncely.middleware.chain import CallNext
from oncely.testing import ManualClock

# ---- A flow ------------------------------------------------------------------------------------


@pytest.mark.parametrize("queue_url", ["memory://{}", "sqlite:///{}/queue.db"])
@pytest.mark.parametrize("ledger_url", ["memory://", "sqlite:///{}/ledger.db"])
def test_each_message_once(tmp_path: Path, queue_url: str, ledger_url: str) -> None:
    """On every embedded queue and ledger each message is handled once; nothing is left."""
    url = queue_url.format(tmp_path)
    ids = [str(number) for number in range(100)]
    with (
        closing(open_transport(url)) as transport,
        closing(open_ledger(ledger_url.format(tmp_path))) as ledger,
    ):
        ledger.migrate()
        transport.publish("in", [Message(each) for each in ids + ids[:20]])
        handled: list[str] = []
        consumer = Consumer(url, "in").idempotent(ledger, "billing")
        report = consumer.consume(lambda message: handled.append(message.id), drain=True)
        assert handled == ids
        assert (report.received, report.handled, report.duplicates) == (120, 100, 20)
        assert (report.failed, report.retried, report.dead_lettered) == (0, 0, 0)
        assert transport.is_drained("in")
        assert ledger.counts() == {("billing", State.COMPLETED): 100}


# ---- Handlers by type --------------------------------------------------------------------------


def test_handlers_by_type(queue: Queue, ledger: Ledger) -> None:
    """Each type has its handler; a decorated function stays what it was."""
    consumer = Consumer(queue, "in").idempotent(ledger, "billing")
    taken: list[tuple[str, str]] = []

    @consumer.handler("sms.send", "sms.*.again")
    def sms(message: Message) -> None:
        taken.append(("sms", message.id))

    @consumer.handler("mail.#")
    async def mail(message: Message) -> None:
        taken.append(("mail", message.id))

    @consumer.handler
    def rest(message: Message) -> None:
        taken.append(("rest", message.id))

    for number, type_ in enumerate(["sms.send", "sms.x.again", "mail", "mail.a.b", "", "sms"]):
        queue.put(str(number), type=type_)
    consumer.consume(drain=True)
    by = [who for who, _ in sorted(taken, key=lambda pair: pair[1])]
    assert by == ["sms", "sms", "mail", "mail", "rest", "rest"]
    assert sms.__name__ == "sms"


def test_what_nobody_takes(queue: Queue, ledger: Ledger) -> None:
    """A message of a type that nobody takes is set aside with that reason; nothing vanishes."""
    queue.put("1", type="sms.send")
    queue.put("2", type="fax")
    consumer = Consumer(queue, "in").events("sms.*", "mail").idempotent(ledger, "billing")
    report = consumer.consume(lambda _: None, drain=True)
    assert (report.handled, report.dead_lettered, report.failed) == (1, 1, 0)
    assert "nothing here takes messages of the type 'fax'" in queue.put_aside()["2"]
    assert ledger.find(Key("billing", "2")) is None


def test_async_and_not(queue: Queue, ledger: Ledger) -> None:
    """Async handlers run on a loop of their own, the others beside them in threads."""
    consumer = Consumer(queue, "in").idempotent(ledger, "billing").concurrency(2)
    both = threading.Event()
    names: list[str] = []

    @consumer.handler("a")
    async def on_loop(message: Message) -> None:
        names.append(threading.current_thread().name)
        while not both.is_set():  # noqa: ASYNC110 - it is set in another thread.
            await asyncio.sleep(0.001)

    @consumer.handler("b")
    def in_thread(message: Message) -> None:
        names.append(threading.current_thread().name)
        both.set()
        assert message.step("one", lambda: 1) == 1

    queue.put("1", type="a")
    queue.put("2", type="b")
    assert consumer.consume(drain=True).handled == 2
    assert len(set(names)) == 2
    assert threading.current_thread().name not in names


_CALLER: ContextVar[str] = ContextVar("caller", default="nobody")


@pytest.mark.parametrize("how", ["thread", "loop", "transactions", "together"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_context_for_each(queue: Queue, sql: Sql, how: str, count: int) -> None:
    """A context variable that a handler sets is gone before the next message. What was set around
    `consume` is there.
    """
    seen: list[str] = []

    def see(message: Any, *_: Any) -> None:
        seen.append(_CALLER.get())
        _CALLER.set(f"handler of {message}")

    async def see_on_loop(message: Message) -> None:
        see(message)

    consumer = Consumer(queue, "in").idempotent(sql.ledger, "billing").concurrency(count)
    if how in ("transactions", "together"):
        consumer.transactional(sql.engine, together=how == "together")
    queue.put(*map(str, range(20)))
    token = _CALLER.set("consume")
    try:
        report = consumer.consume(see_on_loop if how == "loop" else see, drain=True)
    finally:
        _CALLER.reset(token)
    assert report.handled == 20
    assert {*seen} == {"consume"}


# ---- Idempotence, retries, what is told --------------------------------------------------------


def test_metadata(queue: Queue, ledger: Ledger) -> None:
    """Metadata is kept with the record: the same for all, or what a function tells."""
    queue.put("1")
    Consumer(queue, "in").idempotent(ledger, "a", {"environment": "test"}).consume(
        lambda _: None, drain=True
    )
    queue.put("1", source="shop")
    Consumer(queue, "in").idempotent(ledger, "b", lambda message: {"of": message.source}).consume(
        lambda _: None, drain=True
    )
    records = [ledger.find(Key(consumer, "1")) for consumer in "ab"]
    assert [record and record.metadata for record in records] == [
        {"environment": "test"},
        {"of": "shop"},
    ]


def test_metadata_that_cannot_be_told(queue: Queue, ledger: Ledger) -> None:
    """What has no metadata, or such as cannot be kept, is set aside alone, with the reason."""
    queue.put("1")
    queue.put("2", source="shop")
    queue.put("3", source="object")
    found = {"shop": "metadata", "object": object()}
    consumer = Consumer(queue, "in").concurrency(3)
    consumer.idempotent(ledger, "billing", lambda message: {"of": found[message.source]})
    report = consumer.consume(lambda _: None, drain=True)
    assert (report.handled, report.dead_lettered) == (1, 2)
    reasons = queue.put_aside()
    assert "KeyError" in reasons["1"]
    assert "MessageError" in reasons["3"]


def test_tries_and_listeners(queue: Queue, live: Ledger) -> None:
    """`catch` hears of each retry, `failed` of the last failure; their errors change nothing."""
    queue.put("1")
    told: list[tuple[str, str]] = []

    def tell(what: str) -> Callable[[Exception, Message], None]:
        def listener(error: Exception, message: Message) -> None:
            told.append((what, f"{message.id}: {error}"))
            raise KeyError("of the listener's own")

        return listener

    def handle(_: Message) -> None:
        raise ValueError("no")

    consumer = Consumer(queue, "in").tries(3).backoff([0.01, 0.02])
    consumer.idempotent(live, "billing", policy=Policy(tries=9))
    consumer.catch(tell("catch")).failed(tell("failed"))
    report = consumer.consume(handle, drain=True)
    assert told == [("catch", "1: no"), ("catch", "1: no"), ("failed", "1: no")]
    assert (report.received, report.retried, report.failed, report.dead_lettered) == (3, 2, 1, 1)
    # A copy that comes later is set aside, too, and nobody is told again.
    queue.put("1")
    assert consumer.consume(handle, drain=True).dead_lettered == 1
    assert len(told) == 3


def test_poison_is_told_once(queue: Queue, ledger: Ledger, clock: ManualClock) -> None:
    """Of a message that has killed its workers `failed` is told when it is given up."""
    for token in range(2):
        ledger._settle_one(
            Acquire(Key("billing", "1"), Policy(), 10.0, token, company=Company.ALONE)
        )
        clock.advance(11)
    queue.put("1", "1")
    told: list[Exception] = []
    consumer = Consumer(queue, "in").idempotent(ledger, "billing").tries(2)
    report = consumer.failed(lambda error, _: told.append(error)).consume(print, drain=True)
    assert report.dead_lettered == 2
    assert ["its worker died 2 times" in str(error) for error in told] == [True]


def test_middleware_in_order(queue: Queue, ledger: Ledger) -> None:
    """In the order registered; a duplicate runs what is before `idempotent`, with its result."""
    queue.put("1", "1")
    seen: list[Any] = []

    def around(name: str) -> Callable[[Message, CallNext], Any]:
        def middleware(message: Message, call_next: CallNext) -> Any:
            seen.append(name)
            result = call_next(message)
            seen.append((name, result))
            return result

        return middleware

    consumer = Consumer(queue, "in").middleware(around("a"), around("b"))
    consumer.idempotent(ledger, "billing", policy=Policy(results="keep")).middleware(around("c"))
    report = consumer.consume(lambda _: 7, drain=True)
    assert report.duplicates == 1
    assert seen == ["a", "b", "c", ("c", 7), ("b", 7), ("a", 7), "a", "b", ("b", 7), ("a", 7)]


def test_middleware_that_fails(queue: Queue, ledger: Ledger) -> None:
    """What a middleware raises before the handler is a failure; after it, the end is known."""
    queue.put("1", "2")

    def before_or_after(message: Message, call_next: CallNext) -> None:
        if message.id == "1":
            raise ValueError("before")
        call_next(message)
        raise ValueError("after")

    consumer = Consumer(queue, "in").middleware(before_or_after).tries(1)
    report = consumer.idempotent(ledger, "billing").consume(lambda _: None, drain=True)
    assert (report.handled, report.failed) == (1, 1)
    assert queue.put_aside() == {"1": "ValueError: before"}


def test_middleware_that_does_not_go_on(queue: Queue, ledger: Ledger) -> None:
    """A middleware that leaves a message out lets it be acknowledged, and leaves no record."""
    queue.put("1")
    consumer = Consumer(queue, "in").middleware(lambda message, call_next: None)
    report = consumer.idempotent(ledger, "billing").consume(print, drain=True)
    assert (report.received, report.handled, report.duplicates) == (1, 0, 0)
    assert ledger.find(Key("billing", "1")) is None


def test_middleware_that_calls_next_twice(queue: Queue, ledger: Ledger) -> None:
    """What the handler sends in any of its runs leaves with the message's end."""
    queue.put("1")
    queue.make("out")
    runs: list[str] = []

    def twice(message: Message, call_next: CallNext) -> None:
        call_next(message)
        call_next(message)

    def handle(message: Message) -> None:
        runs.append(message.id)
        if len(runs) == 1:
            message.send("out", b"")

    consumer = Consumer(queue, "in").middleware(twice).idempotent(ledger, "billing")
    report = consumer.consume(handle, drain=True)
    assert (len(runs), report.handled, report.deferred_sent) == (2, 1, 1)


def swallow(message: Message, call_next: CallNext) -> None:
    """A middleware that lets no error through."""
    with suppress(ValueError):
        call_next(message)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("has_ledger", [False, True])
def test_middleware_that_makes_a_success(
    queue: Queue, ledger: Ledger, is_async: bool, has_ledger: bool
) -> None:
    """What a middleware catches is no failure where no record says so: untracked, or no ledger."""
    queue.put("")
    runs: list[str] = []

    def fail(message: Message) -> None:
        runs.append(message.id)
        raise ValueError("no")

    async def fail_async(message: Message) -> None:
        fail(message)

    consumer = Consumer(queue, "in").tries(1).middleware(swallow)
    if has_ledger:
        consumer.idempotent(ledger, "billing", policy=Policy(on_missing_id="untracked"))
    report = consumer.consume(fail_async if is_async else fail, drain=True)
    assert (report.handled, report.retried, report.failed) == (1, 0, 0)
    assert (runs, queue.put_aside()) == ([""], {})


def test_middleware_before_the_ledger_undoes_no_failure(queue: Queue, ledger: Ledger) -> None:
    """What the ledger has recorded as failed is a failure, whatever is caught before it."""
    queue.put("1")

    def fail(message: Message) -> None:
        raise ValueError("no")

    consumer = Consumer(queue, "in").middleware(swallow).idempotent(ledger, "billing").tries(1)
    assert consumer.consume(fail, drain=True).failed == 1
    assert queue.put_aside() == {"1": "ValueError: no"}


# ---- What handlers can do ----------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
def test_sends_and_steps(queue: Queue, sql: Sql, is_async: bool) -> None:
    """What a handler sends leaves when it has succeeded, once; a finished step is not repeated. Its
    message has the claim, which no other message has.
    """
    queue.make("post")
    queue.put("1", "2")
    debits: list[str] = []
    failures = ["1"]

    def handle(message: Message) -> None:
        message.step("debit", debits.append, message.id)
        message.send("post", message.id)
        assert message.claim is not None
        assert message.claim.fence == sql.record(message.id).fence
        assert Message("other").claim is None
        if message.id in failures:
            failures.remove(message.id)
            raise ValueError("not yet")

    async def debit(message_id: str) -> None:
        debits.append(message_id)

    async def handle_async(message: Message) -> None:
        await message.step("debit", debit, message.id)
        handle(message)

    consumer = Consumer(queue, "in").idempotent(sql.ledger, "billing").backoff(0.01)
    report = consumer.consume(handle_async if is_async else handle, drain=True)
    sent = sorted(delivery.message.body for delivery in queue.receive("post", 10, 0))
    assert sent == [b"1", b"2"]
    assert (report.deferred_sent, report.retried, sorted(debits)) == (2, 1, ["1", "2"])
    assert sql.ledger.counts() == {("billing", State.COMPLETED): 2}


@pytest.mark.parametrize("has_ledger", [False, True])
def test_nothing_protects(
    queue: Queue, ledger: Ledger, has_ledger: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A consumer without a ledger says at its start what that means."""
    consumer = Consumer(queue, "in")
    if has_ledger:
        consumer.idempotent(ledger, "billing")
    consumer.consume(print, drain=True)
    assert ("no_ledger" in events_in(caplog)) is not has_ledger


# ---- Mistakes ----------------------------------------------------------------------------------


async def awaited(error: Exception, message: Message) -> None:
    """A listener that nobody would await."""


def of_one(one: Any) -> None:
    """A function of one argument."""


async def awaited_one(one: Any) -> None:
    """An async function of one argument."""


async def of_two(one: Any, two: Any) -> None:
    """An async function of two arguments."""


ENGINE = create_engine("sqlite://")


def joined(consumer: Consumer, ledger: Ledger, handler: Callable[..., Any]) -> None:
    """Consume in transactions."""
    consumer.idempotent(ledger, "a").transactional(ENGINE).consume(handler)


MISTAKES: list[tuple[Callable[[Any, Any], Any], str]] = [
    (lambda c, _: Consumer("memory://a", ""), "queue:"),
    (lambda c, _: c.events(""), "events:"),
    (lambda c, _: c.events("a..b"), "events:"),
    (lambda c, _: c.handler(3), "events:"),
    (lambda c, _: [c.handler(of_one), c.handler(of_one)], "takes all messages already"),
    (lambda c, _: [c.handler("a")(of_one), c.handler("a")(of_one)], "has a handler already"),
    (lambda c, _: c.idempotent("sqlite:///a.db", "billing"), "open_ledger"),
    (lambda c, ledger: c.idempotent(ledger, ""), "consumer"),
    (lambda c, ledger: c.idempotent(ledger, "a").idempotent(ledger, "a"), "has a ledger already"),
    (lambda c, ledger: c.idempotent(ledger, "a", 3), "metadata:"),
    (lambda c, ledger: c.idempotent(ledger, "a", awaited), "metadata:"),
    (lambda c, ledger: c.idempotent(ledger, "a", policy=Policy), "policy:"),
    (
        lambda c, ledger: c.idempotent(ledger, "a" * 241).consume(of_one, drain=True),
        "a shorter name",
    ),
    (lambda c, _: c.tries(0), "tries"),
    (lambda c, _: c.backoff("soon"), "backoff"),
    (lambda c, _: c.backoff([5, -1]), "backoff"),
    (lambda c, _: c.catch(None), "catch:"),
    (lambda c, _: c.catch(awaited), "without async"),
    (lambda c, _: c.failed(of_one), "write `def of_one(error, message):`"),
    (lambda c, _: c.concurrency(0), "concurrency:"),
    (lambda c, _: c.window(True), "window:"),
    (lambda c, _: c.grace("long"), "grace:"),
    (lambda c, _: c.transactional("sqlite:///a.db"), "transactional:"),
    (lambda c, _: c.error_queue("errors").consume(of_one, drain=True), "error_queue: "),
    (lambda c, _: c.consume(), "consume(handler)"),
    (lambda c, _: c.consume(of_two), "write `def of_two(message):`"),
    (lambda c, _: [c.handler(of_one), c.consume(of_one)], "takes all messages already"),
    (lambda c, _: c.middleware(print).middleware(of_one).consume(of_one), "of_one"),
    (lambda c, _: c.middleware(TimeLimit).consume(of_one, drain=True), "TimeLimit is a class"),
    (lambda c, _: c.middleware(TimeLimit("1s")).consume(of_one, drain=True), "of_one is not async"),
    (
        lambda c, ledger: [
            c.handler("a")(awaited_one),
            c.idempotent(ledger, "a").middleware(TimeLimit("1s")).consume(of_one, drain=True),
        ],
        "of_one is not async",
    ),
    (lambda c, _: c.transactional(ENGINE).consume(lambda m, c: None), "no ledger is known"),
    (lambda c, ledger: joined(c, ledger, of_one), "write `def of_one(message, connection):`"),
    (lambda c, ledger: joined(c, ledger, of_two), "AsyncEngine"),
    (
        lambda c, ledger: joined(c.middleware(of_two), ledger, lambda m, c: 1),
        "a middleware is asyn",
    ),
]


@pytest.mark.parametrize(("mistake", "says"), MISTAKES)
def test_mistakes(
    queue: Queue, ledger: Ledger, mistake: Callable[[Any, Any], Any], says: str
) -> None:
    """What cannot be meant is told in one line, which says what to write instead."""
    with pytest.raises(ConfigError) as raised:
        mistake(Consumer(queue, "in"), ledger)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
