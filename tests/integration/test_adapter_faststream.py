"""The adapter for FastStream: a broker's subscribers on a real RabbitMQ."""

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Any, cast

import pytest
from faststream import AckPolicy, Context
from faststream.exceptions import AckMessage
from faststream.rabbit import (
    Channel,
    ExchangeType,
    RabbitBroker,
    RabbitExchange,
    RabbitMessage,
    RabbitQueue,
)
from sqlalchemy import NullPool
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from tests.conditions import LIMIT_S, wait_until_async
from tests.integration.adapting import (
    WRITE,
    channel_to,
    declare,
    found,
    publish,
    waiting,
)
from tests.integration.callers import Place
from tests.logs import of_event
from tests.meddling import MeddlingStore, away
from tests.records import granted

from oncely._util import clock
from oncely.adapters.faststream import SESSION, once_middleware
from oncely.core import turn
from oncely.core.control import Unrecoverable
from oncely.core.errors import ConfigError
from oncely.core.policy import Policy, effectively_once
from oncely.core.record import Key, State
from oncely.ledger.ledger import Ledger

WORK = RabbitQueue("work", declare=False)


@pytest.fixture
def url(rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a RabbitMQ on which the queue `work` is declared."""
    monkeypatch.setattr(turn, "AGAIN_S", 0.1)
    with channel_to(rabbitmq_url) as channel:
        declare(channel, "work", "dead")
    return rabbitmq_url


def left(url: str) -> tuple[int, int]:
    """How many messages are in the queue, and how many are dead letters."""
    return waiting(url, "work"), waiting(url, "dead")


Until = Callable[[], object]


def deliver(broker: RabbitBroker, until: Until, *ids: str) -> None:
    """Let the broker work until it is so, with a message of each of these ids as its body, too."""

    async def run() -> None:
        async with broker:
            await broker.start()
            for message_id in ids:
                await broker.publish(message_id, "work", message_id=message_id)
            await wait_until_async(until)

    asyncio.run(run())


def noting(url: str, ledger: Ledger, **options: Any) -> tuple[RabbitBroker, list[str]]:
    """A broker whose handler notes each body that it is given; what fails would come again."""
    broker = RabbitBroker(url, middlewares=[once_middleware(ledger, "shop", **options)])
    handled: list[str] = []

    @broker.subscriber(WORK, ack_policy=AckPolicy.NACK_ON_ERROR)
    async def charge(body: str) -> None:
        handled.append(body)

    return broker, handled


def ends(ledger: Ledger, state: State) -> Until:
    """Whether the message "a" has come to this state."""
    return lambda: (r := ledger.find(Key("shop.charge", "a"))) and r.state is state


def test_duplicates(url: str, ledger: Ledger) -> None:
    """Of three deliveries one is handled; nothing is published for the others, and all are
    acknowledged.
    """
    broker = RabbitBroker(url, middlewares=[once_middleware(ledger, "shop")])
    handled, answers = [], []

    # One after another: of duplicates at the same time, not all are counted.
    @broker.subscriber(WORK, channel=Channel(prefetch_count=1))
    @broker.publisher("answers")
    async def charge(body: str) -> str:
        handled.append(body)
        return f"receipt for {body}"

    @broker.subscriber("answers")
    async def answer(body: str) -> None:
        answers.append(body)

    def is_through() -> bool:
        record = ledger.find(Key("shop.charge", "a"))
        return record is not None and record.duplicates == len(answers) == 2

    deliver(broker, is_through, "a", "a", "b", "a")
    assert sorted(handled) == ["a", "b"]
    assert sorted(answers) == ["receipt for a", "receipt for b"]
    assert left(url) == (0, 0)


def test_kept_results(url: str, ledger: Ledger) -> None:
    """Where results are kept, one that was handled and not published before is published; else a
    duplicate publishes nothing, but answers a request, whose answer is not a message itself.
    """
    middleware = once_middleware(ledger, "shop", keep_result=True, key=lambda m: m.body.decode())
    broker = RabbitBroker(url)
    orders = RabbitBroker(url, middlewares=[middleware])
    numbers, answers = [], []
    # Its worker died before it was published.
    ledger.handled(granted(ledger.claim(Key("shop.charge", "lost"))), result={"receipt": 7})

    @orders.subscriber(WORK)
    @orders.publisher("answers")
    async def charge(body: str) -> dict[str, int]:
        numbers.append(body)
        return {"receipt": len(numbers)}

    @broker.subscriber("answers")
    async def answer(body: dict[str, int]) -> None:
        answers.append(body)

    async def run() -> None:
        async with broker, orders:
            await broker.start()
            await orders.start()
            for duplicates in ([0, 1], [1, 2]):
                await broker.publish("order", "work")
                await broker.publish("lost", "work")
                # Copies that are on their way together may both publish what was handled.

                def are_through(counts: list[int] = duplicates) -> bool:
                    done = [each for each in ledger.scan() if each.state is State.COMPLETED]
                    return bool(answers[1:]) and sorted(each.duplicates for each in done) == counts

                await wait_until_async(are_through)
            answer = await broker.request("other", "work", timeout=LIMIT_S)
            again = await orders.request("other", "work", timeout=LIMIT_S)
            assert await answer.decode() == await again.decode() == {"receipt": 2}
            await wait_until_async(lambda: answers[2:])

    asyncio.run(run())
    assert numbers == ["order", "other"]
    assert [answers.count({"receipt": each}) for each in (1, 7)] == [1, 1]
    assert {record.state for record in ledger.scan()} == {State.COMPLETED}


def test_subscribers_have_records_of_their_own(url: str, ledger: Ledger) -> None:
    """One message that goes to two subscribers of a broker is handled by both."""
    broker = RabbitBroker(url, middlewares=[once_middleware(ledger, "shop")])
    exchange = RabbitExchange("orders", type=ExchangeType.FANOUT)
    handled = []

    @broker.subscriber("first", exchange)
    async def charge(body: str) -> None:
        handled.append("charge")

    @broker.subscriber("second", exchange)
    def mail(body: str) -> None:
        handled.append("mail")

    async def run() -> None:
        async with broker:
            await broker.start()
            await broker.publish("order", exchange=exchange, message_id="a")
            await wait_until_async(lambda: len(handled) == 2)

    asyncio.run(run())
    assert sorted(handled) == ["charge", "mail"]


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    ("fails", "error", "dead", "runs"),
    [
        (2, ValueError("no such account"), 0, 3),
        (9, ValueError("no such account"), 1, 3),
        (9, Unrecoverable("no such account"), 1, 1),
    ],
)
def test_backoff(
    url: str,
    ledger: Ledger,
    fails: int,
    error: Exception,
    dead: int,
    runs: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where the policy sets tries, its delays lie between them, whatever the AckPolicy says; in the
    end the message is rejected. The broker delivers it once. Each failure is logged.
    """
    policy = Policy(tries=3, backoff=["1m", "5m"])
    broker = RabbitBroker(url, middlewares=[once_middleware(ledger, "shop", policy=policy)])
    times, redelivered = [], []

    @broker.subscriber(WORK, ack_policy=AckPolicy.NACK_ON_ERROR)
    async def charge(body: str, message: RabbitMessage) -> None:
        times.append(clock.monotonic())
        redelivered.append(message.raw_message.redelivered)
        if len(times) <= fails:
            raise error

    is_done = ends(ledger, State.COMPLETED)
    deliver(broker, lambda: is_done() or waiting(url, "dead"), "a")
    waited_s = [later - earlier for earlier, later in pairwise(times)]
    assert all(waited >= delay for waited, delay in zip(waited_s, (60, 300), strict=False))
    assert redelivered == [False] * runs
    assert left(url) == (0, dead)
    logged = [vars(each) for each in of_event(caplog, "handler_failed")]
    delays_s = [60.0, 300.0, None] if runs == 3 else [None]
    assert [each["next_try_in_s"] for each in logged] == delays_s[: runs - (not dead)]
    assert [each["attempt"] for each in logged] == [*range(1, len(logged) + 1)]
    assert {each["message_id"] for each in logged} <= {"a"}
    record = found(ledger, "shop.charge", "a")
    assert (record.attempts, record.exhausted) == (runs, bool(dead))


def test_an_error_after_which_nobody_knows(url: str, ledger: Ledger) -> None:
    """What is held is rejected; a probe is asked when the message is due."""
    policy = effectively_once(backoff="10ms", on_in_doubt=lambda message: message.id)
    broker = RabbitBroker(url, middlewares=[once_middleware(ledger, "shop", policy=policy)])
    handled = []

    @broker.subscriber(WORK)
    async def charge(body: str) -> None:
        handled.append(body)
        raise TimeoutError(body)

    deliver(broker, lambda: left(url) == (0, 1), "happened", "unknown")
    assert len(handled) == 2


def test_stopped_while_it_waits(url: str, ledger: Ledger) -> None:
    """A message that waits for its next try does not hold up the end: the broker has it again."""
    once = once_middleware(ledger, "shop", policy=Policy(tries=3, backoff="1h"))
    broker = RabbitBroker(url, middlewares=[once], graceful_timeout=3_600)

    @broker.subscriber(WORK)
    async def charge(body: str) -> None:
        raise ValueError("no such account")

    deliver(broker, ends(ledger, State.FAILED), "a")
    assert left(url) == (1, 0)


def test_transaction(url: str, bank: Place) -> None:
    """Rows and records are stored together or not at all: a handler that fails after it has written
    leaves no row, and its try is recorded; a duplicate writes nothing.
    """
    engine = create_async_engine(bank.engine.url, poolclass=NullPool)
    policy = Policy(tries=2, backoff="10ms")
    once = once_middleware(
        bank.ledger, "shop", policy=policy, transaction=async_sessionmaker(engine)
    )
    broker = RabbitBroker(url, middlewares=[once])
    runs = []

    @broker.subscriber(WORK, channel=Channel(prefetch_count=1))
    async def charge(body: str, oncely_session: Annotated[AsyncSession, Context(SESSION)]) -> None:
        runs.append(body)
        await oncely_session.execute(WRITE, {"name": f"{body} {len(runs)}"})
        if body == "poison" or runs.count(body) < 2:
            raise ValueError("no such account")

    deliver(broker, lambda: waiting(url, "dead"), "order", "order", "poison")
    assert runs == ["order", "order", "poison", "poison"]
    assert bank.rows() == ["order 2"]
    order = found(bank.ledger, "shop.charge", "order")
    assert (order.state, order.attempts, order.duplicates) == (State.COMPLETED, 2, 1)
    poison = found(bank.ledger, "shop.charge", "poison")
    assert (poison.attempts, poison.exhausted) == (2, True)
    assert left(url) == (0, 1)


def test_transaction_and_ack_policy(url: str, bank: Place) -> None:
    """Where the policy sets no tries, the AckPolicy decides of a failed transaction; what is busy
    waits, and what its handler has acknowledged is stored.
    """
    engine = create_async_engine(bank.engine.url)
    broker = RabbitBroker(
        url, middlewares=[once_middleware(bank.ledger, "shop", transaction=engine)]
    )
    claim = granted(bank.ledger.claim(Key("shop.charge", "b"), "60s"))

    @broker.subscriber(WORK)
    async def charge(body: str, connection: Annotated[Any, Context(SESSION)]) -> None:
        await connection.execute(WRITE, {"name": body})
        if body == "a":
            raise ValueError("no such account")
        raise AckMessage

    async def run() -> None:
        async with broker:
            await broker.start()
            await broker.publish("a", "work", message_id="a")
            await broker.publish("b", "work", message_id="b")
            await wait_until_async(lambda: waiting(url, "dead"))
            assert bank.rows() == []
            # Not on the loop, on which a transaction that has locked the record is to end.
            await asyncio.to_thread(bank.ledger.release, claim)
            await wait_until_async(bank.rows)
        await engine.dispose()

    asyncio.run(run())
    assert bank.rows() == ["b"]
    assert found(bank.ledger, "shop.charge", "a").state is State.FAILED
    assert found(bank.ledger, "shop.charge", "b").state is State.COMPLETED
    assert left(url) == (0, 1)


def test_transaction_of_what_is_not_async(url: str, bank: Place) -> None:
    """A source or a handler that is not async is refused."""
    with pytest.raises(ConfigError, match="hand over an AsyncEngine or async_sessionmaker"):
        once_middleware(bank.ledger, "shop", transaction=bank.engine)
    engine = create_async_engine(bank.engine.url)
    once = once_middleware(bank.ledger, "shop", transaction=engine)
    broker = RabbitBroker(url, middlewares=[once])

    @broker.subscriber(WORK)
    def charge(body: str) -> None: ...

    with pytest.raises(ConfigError, match="charge is not async, and its session is"):
        asyncio.run(once.start(broker))


def test_refused(url: str, ledger: Ledger) -> None:
    """No id, another body under a known one, or a key that raises: rejected, whatever the AckPolicy
    says of errors, and the handler does not run.
    """

    def key(message: Any) -> str | None:
        if message.body == b"no key":
            raise KeyError("order")
        return cast(str | None, message.raw_message.message_id)

    broker, handled = noting(url, ledger, key=key)

    async def run() -> None:
        async with broker:
            await broker.start()
            # FastStream's own client gives every message an id.
            with channel_to(url) as channel:
                publish(channel, "work", None)
            await broker.publish("1", "work", message_id="a")
            await wait_until_async(lambda: handled)
            await broker.publish("2", "work", message_id="a")
            await broker.publish("no key", "work", message_id="b")
            await wait_until_async(lambda: waiting(url, "dead") == 3)

    asyncio.run(run())
    assert handled == ["1"]
    assert left(url) == (0, 3)


def test_busy_and_store_away(url: str, ledger: Ledger, meddling: MeddlingStore) -> None:
    """While another worker has the message, and while the store is away, its delivery waits, and no
    try is spent; then it is handled.
    """
    broker, handled = noting(url, ledger)
    claim = granted(ledger.claim(Key("shop.charge", "a"), "60s"))

    async def run() -> None:
        async with broker:
            await broker.start()
            await broker.publish("order", "work", message_id="a")
            await wait_until_async(lambda: waiting(url, "work") == 0)
            ledger.release(claim)
            await wait_until_async(lambda: handled == ["order"])
            meddling.meddle = away
            await broker.publish("another", "work", message_id="b")
            before = len(meddling.calls)
            await wait_until_async(lambda: meddling.calls[before:].count("insert") >= 2)
            assert handled == ["order"]
            meddling.meddle = lambda: None
            await wait_until_async(lambda: handled[1:])

    asyncio.run(run())
    assert found(ledger, "shop.charge", "b").attempts == 1
    assert left(url) == (0, 0)
