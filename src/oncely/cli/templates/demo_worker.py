"""Charges the orders of a queue: the program of the workers of `oncely demo`."""

import os
import signal
from pathlib import Path

import oncely

url = os.environ["ONCELY_LEDGER"]
consumer = oncely.Consumer(f"{url}?visibility=3s", queue="orders").window(1)
# What fails is retried; what is in doubt, because its worker died, waits for a person.
consumer.idempotent(oncely.open_ledger(url), "billing", policy=oncely.effectively_once(lease="3s"))


@consumer.handler
def charge(message: oncely.Message) -> None:
    """What must not happen twice: a line in the bank's book."""
    with Path("bank.txt").open("a") as bank:
        bank.write(f"{message.id} charged {message.get('cents')} cents\n")
    if message.id == os.environ.get("KILLED_AT"):
        os.kill(os.getpid(), signal.SIGKILL)  # kill -9: the ledger does not hear of the charge.
