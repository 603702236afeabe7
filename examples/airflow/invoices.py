"""A DAG that writes each customer's invoice of a day once, however often its tasks run again.

Airflow is needed by the DAG alone, which stands at the end: the function above it can be called,
and tested, without.
"""

import os
from pathlib import Path

import oncely

OUT = Path(__file__).parent / "out"
INVOICES = OUT / "invoices.txt"

# Opened when a task asks for it: to parse this file costs no connection.
ledger = oncely.open_ledger(os.environ.get("ONCELY_LEDGER", f"sqlite:///{OUT / 'ledger.db'}"))


@oncely.once(
    ledger, consumer="invoices", key=lambda customer, day: f"{day}/{customer}", keep_result=True
)
def write_invoice(customer: str, day: str) -> str:
    """Write an invoice, and return its number: a retry, a clear and a backfill return the same."""
    with INVOICES.open("a") as invoices:
        invoices.write(f"{day} {customer}\n")
    return f"invoice {len(INVOICES.read_text().splitlines())}"


if __name__ == "__main__":
    for run in (1, 2):
        numbers = [write_invoice(customer, "2026-11-20") for customer in ("anna", "ben")]
        print(f"run {run}: {', '.join(numbers)}")
else:
    from datetime import UTC, datetime

    from airflow.sdk import dag, task

    @dag(schedule="@daily", start_date=datetime(2026, 11, 20, tzinfo=UTC), catchup=True)  # type: ignore[untyped-decorator]
    def invoices() -> None:
        """One task for each customer; `ds` is the day of the run."""
        write = task(retries=3)(write_invoice).partial(day="{{ ds }}")
        write.expand(customer=["anna", "ben"])

    invoices()
