"""The adapter for FastStream, with its broker for tests."""

import asyncio

from faststream.rabbit import RabbitBroker, TestRabbitBroker

import oncely
from oncely.adapters.faststream import once_middleware

ledger = oncely.open_ledger("memory://")
ledger.migrate()
broker = RabbitBroker("amqp://localhost/", middlewares=[once_middleware(ledger, "shop")])
charged: list[str] = []


@broker.subscriber("orders")
async def charge(order: str) -> None:
    """Count the order."""
    charged.append(order)


async def main() -> None:
    """Publish one message twice."""
    async with TestRabbitBroker(broker, connect_only=False):
        for _ in range(2):
            await broker.publish("order 17", "orders", message_id="order-17")


asyncio.run(main())
assert charged == ["order 17"]
