"""Charges the orders of a queue, each once, however often it is delivered."""

import os

import oncely

ledger = oncely.open_ledger(os.environ["ONCELY_LEDGER"])  # set by: . ./oncely.env
transport = os.environ["ONCELY_TRANSPORT"]
consumer = (
    oncely.Consumer(transport, queue="orders")
    .idempotent(ledger, "billing")
    .tries(3)
    .backoff(["5s", "1m"])
)


@consumer.handler
def charge(message: oncely.Message) -> None:
    """What must not happen twice. If it raises, the message is retried."""
    print(f"charging {message.id}: {message.get('amount')}")


if __name__ == "__main__":
    order = oncely.Message("order-17", b'{"amount": 99}')
    oncely.publish(transport, "orders", [order, order])
    print("published order-17, twice")
