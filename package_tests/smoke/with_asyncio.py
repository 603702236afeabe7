"""A coroutine whose rows commit with its claim, by an async engine. The driver is aiosqlite."""

import asyncio

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

import oncely


async def main() -> None:
    """Insert one row by two calls."""
    ledger = oncely.open_ledger("sqlite:///oncely.db")
    await oncely.AsyncLedger(ledger).migrate()
    engine = create_async_engine("sqlite+aiosqlite:///oncely.db")
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE receipts (name TEXT)"))

    @oncely.once(ledger, consumer="billing", key=lambda order, *_: order, transaction=engine)
    async def charge(order: str, connection: AsyncConnection) -> None:
        await connection.execute(text("INSERT INTO receipts VALUES (:order)"), {"order": order})

    await charge("order-17")
    await charge("order-17")
    async with engine.connect() as connection:
        assert list(await connection.scalars(text("SELECT name FROM receipts"))) == ["order-17"]
    await engine.dispose()


asyncio.run(main())
