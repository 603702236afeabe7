"""Charges over HTTP, and events from Stripe: each is handled once, however often it is sent."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Thread

from fastapi import FastAPI, Request
from pydantic import BaseModel
from sqlalchemy import Connection, create_engine, text
from starlette.routing import Route

import oncely
from oncely.http import IdempotencyKey, stripe, webhook

OUT = Path(__file__).parent / "out"
URL = f"sqlite:///{OUT / 'shop.db'}"
SECRET = os.environ.get("STRIPE_SECRET", "whsec_example")

OUT.mkdir(exist_ok=True)
engine = create_engine(URL)
ledger = oncely.open_ledger(engine)
ledger.migrate()
with engine.begin() as begun:
    begun.execute(text("CREATE TABLE IF NOT EXISTS charges (customer TEXT, cents INTEGER)"))
    begun.execute(text("CREATE TABLE IF NOT EXISTS payments (event TEXT)"))

events = oncely.Consumer(URL, queue="stripe").idempotent(ledger, "stripe").transactional(engine)


@events.handler
def pay(event: oncely.Message, connection: Connection) -> None:
    """The row and the note that the event is handled are one commit."""
    connection.execute(text("INSERT INTO payments VALUES (:id)"), {"id": event.id})


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Handle events as long as the server runs."""
    handling = Thread(target=events.consume)
    handling.start()
    yield
    events.stop()
    handling.join()


class Charge(BaseModel):
    """What a client asks for."""

    customer: str
    cents: int


# A route, for a mount answers this very URL with a redirect, which Stripe does not follow.
hook = Route("/hooks/stripe", webhook(ledger, queue="stripe", verify=stripe(SECRET)))
app = FastAPI(lifespan=lifespan, routes=[hook])
app.add_middleware(IdempotencyKey, ledger=ledger, consumer="shop")


@app.post("/charges", status_code=201)
def charge(asked: Charge, request: Request) -> dict[str, int]:
    """The row and the note that the request is handled are one commit."""
    with engine.begin() as connection, request.state.oncely.transaction(connection):
        connection.execute(text("INSERT INTO charges VALUES (:customer, :cents)"), dict(asked))
        count = connection.scalar(text("SELECT count(*) FROM charges"))
    return {"charge": count or 0}
