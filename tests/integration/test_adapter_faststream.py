"""The adapter for FastStream: a broker's subscribers on a real RabbitMQ."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from faststream import AckPolicy
from faststream.rabbit import Channel, ExchangeType, RabbitBroker, RabbitExchange, RabbitQueue
from tests.integration.adapting import channel_to, declare, fail_to_store, found, publish, waiting

from oncely.adapters.faststream import once_middleware
from oncely.core import rules
from oncely.core.policy import Policy
from oncely.core.record import Key, State
from oncely.ledger import Ledger
from oncely.testing import MeddlingStore, granted

_DEADLINE_S = 60
WORK = RabbitQueue("work", declare=False)


@pytest.fixture
def url(rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a RabbitMQ on which the queue `work` is declared."""
    monkeypatch.setattr(rules, "AGAIN_S", 0.1)
    with channel_to(rabbitmq_url) as channel:
        declare(channel, "work", "dead")
    return rabbitmq_url


async def until(is_so: Callable[[], object]) -> None:
    """Return as soon as it is so. Raises TimeoutError where it never is."""
    async with asyncio.timeout(_DEADLINE_S):
        while not is_so():  # noqa: ASYNC110 - what is waited for is another program's.
            await asyncio.sleep(0.02)


def left(url: str) -> tuple[int, int]:
    """How many messages are in the queue, and how many are dead letters."""
    return waiting(url, "work"), waiting(url, "dead")


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

    async def run() -> None:
        async with broker:
            await broker.start()
            for message_id in ("a", "a", "b", "a"):
                await broker.publish(f"order {message_id}", "work", message_id=message_id)
            key = Key("shop.charge", "a")
            await until(lambda: (r := ledger.find(key)) and r.duplicates == 2)
            await until(lambda: len(answers) == 2)

    asyncio.run(run())
    assert sorted(handled) == ["order a", "order b"]
    assert sorted(answers) == ["receipt for order a", "receipt for order b"]
    assert left(url) == (0, 0)


def test_kept_results(url: str, ledger: Ledger) -> None:
    """Where results are kept, what a duplicate publishes is what the first delivery did."""
    middleware = once_middleware(ledger, "shop", keep_result=True, key=lambda m: m.body.decode())
    broker = RabbitBroker(url)
    orders = RabbitBroker(url, middlewares=[middleware])
    numbers, answers = [], []

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
            await broker.publish("order", "work")
            await broker.publish("order", "work")
            await until(lambda: len(answers) == 2)

    asyncio.run(run())
    assert answers == [{"receipt": 1}, {"receipt": 1}]


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
            await until(lambda: len(handled) == 2)

    asyncio.run(run())
    assert sorted(handled) == ["charge", "mail"]


@pytest.mark.parametrize(("fails", "dead", "tries"), [(1, 0, 2), (2, 1, 2)])
def test_failures(url: str, ledger: Ledger, fails: int, dead: int, tries: int) -> None:
    """An error is recorded, and FastStream's AckPolicy decides; when the tries are spent, the
    message is rejected and not handled any more.
    """
    once = once_middleware(ledger, "shop", policy=Policy(tries=tries))
    broker = RabbitBroker(url, middlewares=[once])
    handled = []

    @broker.subscriber(WORK, ack_policy=AckPolicy.NACK_ON_ERROR)
    async def charge(body: str) -> None:
        handled.append(body)
        if len(handled) <= fails:
            raise ValueError("no such account")

    def is_over() -> bool:
        record = ledger.find(Key("shop.charge", "a"))
        return record is not None and (record.state is State.COMPLETED or waiting(url, "dead") > 0)

    async def run() -> None:
        async with broker:
            await broker.start()
            await broker.publish("order", "work", message_id="a")
            await until(is_over)

    asyncio.run(run())
    assert len(handled) == 2
    assert left(url) == (0, dead)
    record = found(ledger, "shop.charge", "a")
    assert record.exhausted is bool(dead)
    assert dead == 0 or record.error == "ValueError: no such account"


def test_refused(url: str, ledger: Ledger) -> None:
    """No id, or another body under a known one: rejected, and the handler does not run."""
    broker = RabbitBroker(url, middlewares=[once_middleware(ledger, "shop")])
    handled = []

    @broker.subscriber(WORK)
    async def charge(body: str) -> None:
        handled.append(body)

    async def run() -> None:
        async with broker:
            await broker.start()
            # FastStream's own client gives every message an id.
            with channel_to(url) as channel:
                publish(channel, "work", None)
            await broker.publish("1", "work", message_id="a")
            await until(lambda: handled)
            await broker.publish("2", "work", message_id="a")
            await until(lambda: waiting(url, "dead") == 2)

    asyncio.run(run())
    assert handled == ["1"]
    assert left(url) == (0, 2)


def test_key_that_raises(url: str, ledger: Ledger) -> None:
    """A message of which no id can be told is rejected, whatever the AckPolicy says of errors."""
    middleware = once_middleware(ledger, "shop", key=lambda message: message.headers["order"])
    broker = RabbitBroker(url, middlewares=[middleware])
    handled = []

    @broker.subscriber(WORK, ack_policy=AckPolicy.NACK_ON_ERROR)
    async def charge(body: str) -> None:
        handled.append(body)

    async def run() -> None:
        async with broker:
            await broker.start()
            await broker.publish("none", "work")
            await broker.publish("a", "work", headers={"order": "a"})
            await until(lambda: handled and waiting(url, "dead"))

    asyncio.run(run())
    assert handled == ["a"]
    assert left(url) == (0, 1)


def test_busy(url: str, ledger: Ledger) -> None:
    """While another worker has the message, its delivery waits; then it is handled."""
    broker = RabbitBroker(url, middlewares=[once_middleware(ledger, "shop")])
    claim = granted(ledger.claim(Key("shop.charge", "a"), "60s"))
    handled = []

    @broker.subscriber(WORK)
    async def charge(body: str) -> None:
        handled.append(body)

    async def run() -> None:
        async with broker:
            await broker.start()
            await broker.publish("order", "work", message_id="a")
            await until(lambda: waiting(url, "work") == 0)
            assert not handled
            ledger.release(claim)
            await until(lambda: handled)

    asyncio.run(run())
    assert left(url) == (0, 0)


def test_store_away(url: str, ledger: Ledger, meddling: MeddlingStore) -> None:
    """While the store is away nothing is acknowledged, and no try is spent."""
    broker = RabbitBroker(url, middlewares=[once_middleware(ledger, "shop")])
    handled = []

    @broker.subscriber(WORK)
    async def charge(body: str) -> None:
        handled.append(body)

    async def run() -> None:
        async with broker:
            await broker.start()
            meddling.meddle = fail_to_store
            await broker.publish("order", "work", message_id="a")
            await until(lambda: meddling.calls.count("insert") >= 2)
            assert not handled
            meddling.meddle = lambda: None
            await until(lambda: handled)

    asyncio.run(run())
    assert found(ledger, "shop.charge", "a").attempts == 1
    assert left(url) == (0, 0)


def test_answers_to_requests(url: str, ledger: Ledger) -> None:
    """What answers a request is no message of a subscriber: it comes back as it is."""
    broker = RabbitBroker(url, middlewares=[once_middleware(ledger, "shop")])

    @broker.subscriber(WORK)
    async def charge(body: str) -> str:
        return f"receipt for {body}"

    async def run() -> Any:
        async with broker:
            await broker.start()
            answer = await broker.request("order", "work", message_id="a", timeout=_DEADLINE_S)
            return await answer.decode()

    assert asyncio.run(run()) == "receipt for order"
