"""A consumer's fluent calls return the consumer, and its handlers keep their types."""

from typing import Any, assert_type

from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker

import oncely
from oncely.middleware import CallNext, Logged, RateLimited


def log_it(message: oncely.Message, call_next: CallNext) -> Any:
    return call_next(message)


async def log_it_async(message: oncely.Message, call_next: CallNext) -> Any:
    return await call_next(message)


def fluent(ledger: oncely.Ledger) -> None:
    consumer = (
        oncely.Consumer("amqp://guest:guest@localhost/", queue="notifications")
        .events("notification.sms.send", "notification.email.send")
        .middleware(log_it, log_it_async, Logged(), RateLimited(per_second=5))
        .idempotent(ledger, "notifications", metadata={"environment": "production"})
        .tries(3)
        .backoff([5, "10s", 30.5])
        .catch(lambda error, message: None)
        .failed(lambda error, message: None)
        .error_queue("notifications.error")
        .concurrency(4)
        .window(100)
        .ordered()
        .grace("30s")
    )
    assert_type(consumer, oncely.Consumer)
    assert_type(consumer.consume(lambda message: None, drain=True), oncely.ConsumerReport)
    assert_type(consumer.consume(drain=True).handled, int)


def subclassed(ledger: oncely.Ledger) -> None:
    class Billing(oncely.Consumer):
        """A user's own."""

    assert_type(Billing("memory://shop", "orders").idempotent(ledger, "billing").tries(2), Billing)


async def handlers(consumer: oncely.Consumer) -> None:
    @consumer.handler
    def rest(message: oncely.Message) -> str:
        return message.id

    @consumer.handler("order.placed", "order.paid")
    async def charge(message: oncely.Message, *, is_test: bool = False) -> int:
        return 17

    assert_type(rest(oncely.Message("1")), str)
    rest("1")  # type: ignore[arg-type]
    assert_type(await charge(oncely.Message("1"), is_test=True), int)
    await charge(oncely.Message("1"), is_test=1.5)  # type: ignore[arg-type]


def transactional(ledger: oncely.Ledger, engine: Engine) -> None:
    def charge(message: oncely.Message, session: Session) -> None: ...

    consumer = oncely.Consumer("postgresql://localhost/shop", queue="orders")
    consumer.idempotent(ledger, "billing").transactional(sessionmaker(engine)).consume(charge)
    consumer.transactional(engine, together=True)
    consumer.transactional("postgresql://localhost/shop")  # type: ignore[arg-type]


def misuse(consumer: oncely.Consumer) -> None:
    consumer.tries("three")  # type: ignore[arg-type]
    consumer.middleware("log it")  # type: ignore[arg-type]
    consumer.idempotent("sqlite:///oncely.db", "billing")  # type: ignore[arg-type]
    consumer.consume("handle")  # type: ignore[arg-type]
