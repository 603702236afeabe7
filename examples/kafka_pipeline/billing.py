"""One order in, one charge out: the handler of Spark, and of the consumer that this program is."""

import os
import time
from pathlib import Path

import oncely

CHARGES = Path(__file__).parent / "out" / "charges.txt"


def charge(message: oncely.Message) -> None:
    """Append a line in one write, so that lines of several processes never mix."""
    time.sleep(0.05)  # The payment provider takes its time.
    charges = os.open(CHARGES, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(charges, f"{message.id} {message.key} {message.get('amount')}\n".encode())
    finally:
        os.close(charges)


if __name__ == "__main__":
    ledger = oncely.open_ledger("sqlite:///out/ledger.db")
    ledger.migrate()
    consumer = oncely.Consumer(f"kafka://{os.environ['BROKERS']}", queue="orders")
    # In production it goes on and on, without `drain`.
    done = consumer.idempotent(ledger, "billing").consume(charge, drain=True)
    print(f"live: received {done.received}, handled {done.handled}, duplicates {done.duplicates}")
