"""Orders from RabbitMQ: a row, a mail to be sent, and the note that the order is handled are one
commit, and happen once, however often the order is delivered.
"""

import asyncio
import os
from pathlib import Path
from typing import Annotated

from faststream import Context, FastStream
from faststream.rabbit import RabbitBroker, RabbitQueue, TestRabbitBroker
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

import oncely
from oncely.adapters.faststream import once_middleware

OUT = Path(__file__).parent / "out"
DATABASE = OUT / "shop.db"

OUT.mkdir(exist_ok=True)
ledger = oncely.open_ledger(f"sqlite:///{DATABASE}")
ledger.migrate()
engine = create_async_engine(f"sqlite+aiosqlite:///{DATABASE}")
once = once_middleware(ledger, "shop", transaction=async_sessionmaker(engine))
broker = RabbitBroker(os.environ.get("BROKER_URL", "amqp://localhost/"), middlewares=[once])
app = FastStream(broker)


@broker.subscriber(RabbitQueue("orders", durable=True))
async def take(order: str, session: Annotated[AsyncSession, Context("oncely_session")]) -> None:
    """What is sent here leaves when a relay finds it committed."""
    await session.execute(text("INSERT INTO orders VALUES (:order)"), {"order": order})
    oncely.current().send("mails", {"text": f"we have {order}"})


@app.on_startup
async def create_table() -> None:
    """Before the first order."""
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE IF NOT EXISTS orders (name TEXT)"))


async def try_it() -> None:
    """Deliver an order twice, with FastStream's own broker in memory."""
    await create_table()
    async with TestRabbitBroker(broker):
        for _ in range(2):
            await broker.publish("order 17", "orders", message_id="order-17")
    async with engine.connect() as connection:
        print("orders:", await connection.scalar(text("SELECT count(*) FROM orders")))
    await engine.dispose()


if __name__ == "__main__":
    asyncio.run(try_it())
