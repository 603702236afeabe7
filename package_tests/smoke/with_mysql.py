"""A ledger in MariaDB."""

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
