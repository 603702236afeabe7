"""Functions keep their types under the decorators, and misuse is an error."""

from typing import assert_type

from sqlalchemy import Connection, Engine

import oncely
from oncely.barrier import idempotent_consumer


def by_once(ledger: oncely.Ledger) -> None:
    @oncely.once(ledger, consumer="billing", key=lambda amount, *, currency="": f"{amount}")
    def charge(amount: int, *, currency: str = "EUR") -> str:
        return currency

    assert_type(charge(17, currency="USD"), str)
    charge("ten")  # type: ignore[arg-type]
    charge(17, curency="USD")  # type: ignore[call-arg]
    charge()  # type: ignore[call-arg]


async def by_once_async(ledger: oncely.Ledger) -> None:
    @oncely.once(ledger, consumer="billing", key=lambda amount: amount, keep_result=True)
    async def charge(amount: int) -> str:
        return "charged"

    assert_type(await charge(17), str)
    await charge("ten")  # type: ignore[arg-type]


def by_once_method(ledger: oncely.Ledger) -> None:
    class Billing:
        @oncely.once(ledger, consumer="billing", key=lambda self, amount: amount)
        def charge(self, amount: int) -> float:
            return 1.5

    assert_type(Billing().charge(17), float)
    Billing().charge("ten")  # type: ignore[arg-type]


def by_once_in_a_transaction(ledger: oncely.Ledger, engine: Engine) -> None:
    """The connection is the last argument of the function, and not of its callers."""

    @oncely.once(ledger, consumer="billing", key=lambda amount: amount, transaction=engine)
    def charge(amount: int, connection: Connection) -> str:
        return "charged"

    assert_type(charge(17), str)


def by_idempotent_consumer(ledger: oncely.Ledger) -> None:
    @idempotent_consumer(ledger)
    def on_order(order: dict[str, int]) -> str:
        return "charged"

    on_order({"amount": 17})
    on_order(17)  # type: ignore[arg-type]


def misuse(ledger: oncely.Ledger) -> None:
    oncely.once(ledger, consumer="billing", key=lambda amount: 7.5)  # type: ignore[arg-type, return-value]
    oncely.once(ledger, consumer="billing")  # type: ignore[call-overload]
    oncely.once("sqlite:///oncely.db", consumer="billing", key=str)  # type: ignore[call-overload]


def in_a_block(ledger: oncely.Ledger) -> None:
    with oncely.claimed(ledger, oncely.Key("billing", "order-17")) as work:
        assert_type(work, oncely.Work)
        assert_type(work.is_new, bool)
    oncely.claimed(ledger, "order-17")  # type: ignore[arg-type]
