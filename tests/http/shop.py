"""A shop behind uvicorn: each order is a line of a file, and its answer says which."""

import os
import time
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from oncely.core.policy import Policy
from oncely.http import IdempotencyKey
from oncely.ledger.ledger import open_ledger

EFFECTS = Path(os.environ["SHOP_EFFECTS"])
WORK_S = float(os.environ.get("SHOP_WORK_S", "0"))


def _order(number: str) -> None:
    # One write of a few bytes at the end is whole, whoever else writes.
    with EFFECTS.open("ab", buffering=0) as file:
        file.write(f"{number}\n".encode())
    time.sleep(WORK_S)


async def order(request: Request) -> JSONResponse:
    """Take an order."""
    number = (await request.json())["number"]
    await run_in_threadpool(_order, number)
    return JSONResponse({"ordered": number, "by": os.getpid()}, 201)


def application() -> Any:
    """Made in each process of the server."""
    app = Starlette(routes=[Route("/orders", order, methods=["POST"])])
    policy = Policy(on_in_doubt=os.environ.get("SHOP_IN_DOUBT", "retry"))  # type: ignore[arg-type]
    ledger = open_ledger(os.environ["SHOP_LEDGER"])
    return IdempotencyKey(app, ledger, consumer="shop", lease="1s", policy=policy)
