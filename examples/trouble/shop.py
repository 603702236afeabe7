"""A shop on a bad day: handlers that fail, wait, or take their process with them."""

import os
import random
import signal
import time

import oncely

LEDGER = os.environ["TROUBLE_LEDGER"]
QUEUES = os.environ["TROUBLE_QUEUES"]

ledger = oncely.open_ledger(LEDGER)
billing = (
    oncely.Consumer(QUEUES, queue="orders")
    .idempotent(
        ledger,
        "billing",
        policy=oncely.Policy(lease="20s", on_in_doubt="hold", tries=3, backoff=[5, 30]),
    )
    .concurrency(2)
    # What a killed process had claimed is in doubt, also what had not begun.
    .window(4)
)
mailing = oncely.Consumer(QUEUES, queue="mails").idempotent(
    ledger, "mailing", policy=oncely.Policy(lease="30s", tries=2, backoff=["20m"])
)


@billing.handler()
def charge(message: oncely.Message) -> None:
    """Charge a card, by way of a provider that has its moods."""
    order = message.json()
    message.step("reserve", time.sleep, random.expovariate(40))
    if order["mood"] == "declined":
        raise ValueError(f"card ending in {order['card']} was declined for order {message.id}")
    if order["mood"] == "crash" and message.headers.get("demo") != "survived":
        # As the kernel does when memory is short: between the charge and its record.
        os.kill(os.getpid(), signal.SIGKILL)
    if order["mood"] == "flaky" and random.random() < 0.6:
        raise TimeoutError("provider.example took longer than 3 s to answer")
    time.sleep(random.expovariate(25))
    message.send("mails", {"to": order["to"], "total": order["total"]})
    if order["mood"] == "gone":
        message.send("exchange:gone/receipts", {"order": message.id})


@mailing.handler()
def mail(message: oncely.Message) -> None:
    """Send a mail."""
    time.sleep(random.expovariate(60))
    if message.json()["total"] > 480:
        raise ConnectionError(f"smtp-{random.randint(1, 9)}.example refused the connection")
