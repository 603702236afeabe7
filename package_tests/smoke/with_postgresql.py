"""A ledger in PostgreSQL, and a queue in the same database."""

import sys

import oncely

ledger = oncely.open_ledger(sys.argv[1])
ledger.migrate()
charged: list[str] = []


@oncely.once(ledger, consumer="billing", key=lambda order: order)
def charge(order: str) -> None:
    """Count the order."""
    charged.append(order)


charge("order-17")
charge("order-17")
assert charged == ["order-17"]
ledger.close()

transport = oncely.open_transport(sys.argv[1])
transport.publish("orders", [oncely.Message("order-18")])
[delivery] = transport.receive("orders", max_messages=2, wait_s=10)
assert delivery.message.id == "order-18"
transport.close()
