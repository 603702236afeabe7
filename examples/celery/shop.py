# mypy: disable-error-code="untyped-decorator"
"""A task that is sent twice for one order: the order is charged once, and both have the receipt."""

from pathlib import Path

from celery import Celery

import oncely
from oncely.adapters.celery import once_task

OUT = Path(__file__).parent / "out"
CHARGES = OUT / "charges.txt"

# In place of a broker, files: broker="amqp://guest:guest@localhost/" is all that a real one needs.
QUEUE = OUT / "queue"
QUEUE.mkdir(parents=True, exist_ok=True)
app = Celery("shop", broker="filesystem://", backend=f"file://{QUEUE}")
app.conf.broker_transport_options = {"data_folder_in": QUEUE, "data_folder_out": QUEUE}

ledger = oncely.open_ledger(f"sqlite:///{OUT / 'ledger.db'}")
ledger.migrate()


@app.task(base=once_task(ledger, key=lambda order, cents: order))
def charge(order: str, cents: int) -> str:
    """Charge an order; the receipt is kept, and is the result of every later task for it."""
    with CHARGES.open("a") as charges:
        charges.write(f"{order} {cents}\n")
    return f"receipt {len(CHARGES.read_text().splitlines())}"


def main() -> None:
    """Send the same order twice, as a producer that saw no answer does."""
    for number in (1, 2):
        result = charge.delay("order-17", 9900)
        print(f"task {number}: {result.get(timeout=60)}")
    print(f"charged {len(CHARGES.read_text().splitlines())} time(s)")


if __name__ == "__main__":
    main()
