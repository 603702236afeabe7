"""The adapter for Celery: a task of one id runs once."""

from celery import Celery

import oncely
from oncely.adapters.celery import once_task

ledger = oncely.open_ledger("memory://")
ledger.migrate()
app = Celery("shop")
charged: list[int] = []


@app.task(base=once_task(ledger))  # type: ignore[untyped-decorator]
def charge(order: int) -> str:
    """Count the order."""
    charged.append(order)
    return "receipt"


results = [charge.apply(args=[17], task_id="order-17").get() for _ in range(2)]
assert results == ["receipt", "receipt"]
assert charged == [17]
