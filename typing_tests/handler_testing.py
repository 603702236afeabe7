"""What a test calls a handler with is checked as a call of the handler is."""

from typing import assert_type

import oncely
from oncely.testing import kill_at, redeliver, runs_once


def handlers(ledger: oncely.Ledger) -> None:
    @oncely.once(ledger, consumer="billing", key=lambda amount, *, currency="": f"{amount}")
    def charge(amount: int, *, currency: str = "EUR") -> str:
        return currency

    @oncely.once(ledger, consumer="billing", key=lambda amount: amount)
    async def charge_async(amount: int) -> str:
        return "charged"

    assert_type(redeliver(charge, 10, currency="EUR"), str)
    assert_type(redeliver(charge_async, 10), str)
    kill_at("after_claim", charge, 10)
    runs_once(charge_async, 10)
    runs_once(charge, 10, currency="EUR")
    kill_at("after_claim", charge, "ten")  # type: ignore[arg-type]
    redeliver(charge)  # type: ignore[call-overload]
    runs_once(charge, "ten")  # type: ignore[misc]
