"""A shop on FastAPI whose OpenAPI schema says what idempotency keys add to it."""

from collections import Counter
from itertools import count
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Header, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse
from pydantic import BaseModel, Field

from oncely.http import IdempotencyKey
from oncely.ledger import Ledger


class Problem(BaseModel):
    """What oncely answers itself."""

    type: str
    title: str
    status: int
    detail: str
    code: str


class Order(BaseModel):
    """What is ordered."""

    customer: str
    cents: int = Field(ge=1, le=10**9)
    notes: dict[str, Any] = {}
    items: list[str | float | None] = []


def takes_key(
    key: Annotated[
        str | None, Header(alias="Idempotency-Key", description="A new one each.")
    ] = None,
) -> None:
    """For the schema alone: the middleware reads it."""


Runs = Counter[tuple[str, str | None]]
"""How often handlers ran, by the client and its key."""

TENANT = "X-Tenant"
_JSON: dict[str, Any] = {"application/json": {}}
_PROBLEM: dict[str, Any] = {"application/problem+json": {"schema": Problem.model_json_schema()}}
RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"content": {**_PROBLEM, **_JSON}},  # FastAPI itself answers this, too, and 422.
    404: {"content": _JSON},
    405: {"content": _JSON},
    409: {"content": _PROBLEM},
    422: {"content": {**_PROBLEM, **_JSON}},
    503: {"content": _PROBLEM},
}


def shop(ledger: Ledger, runs: Runs, **options: Any) -> tuple[Any, FastAPI]:
    """The shop, and the application in it, which has the schema. Clients say who they are."""
    numbers = count(1)

    def run(request: Request) -> dict[str, Any]:
        """What no other run answers."""
        runs[request.headers[TENANT], request.state.oncely.key] += 1
        return {"run": next(numbers)}

    keyed = APIRouter(dependencies=[Depends(takes_key)], responses=RESPONSES)

    @keyed.post("/orders", status_code=201, responses={202: {}})
    async def take(order: Order, request: Request, response: Response) -> dict[str, Any]:
        response.status_code = 201 if order.cents % 2 else 202
        response.headers["X-Customer"] = order.customer.encode().hex()
        return {**run(request), "of": order.customer}

    @keyed.post(
        "/orders/{number}/payments", status_code=204, responses={303: {}, 402: {"content": {}}}
    )
    def pay(
        number: int, request: Request, currency: Literal["eur", "usd"] = "eur", cents: int = 0
    ) -> Response:
        mark = {"X-Run": str(run(request)["run"])}
        if cents < 0:
            return Response(b"no", 402, mark)
        if currency == "usd":
            return RedirectResponse(f"/orders/{number % 1000}", 303, mark)
        return Response(None, 204, mark)

    @keyed.patch("/orders/{number}", responses={200: {"content": {"application/x-order": {}}}})
    async def change(number: str, order: Order, request: Request) -> Response:
        body = b"\xff\0" + str(run(request)).encode()
        return Response(body, media_type="application/x-order")

    plain = APIRouter(responses={404: {"content": _JSON}})

    @plain.get("/orders/{number}")
    async def show(number: str, request: Request, fields: str = "all") -> JSONResponse:
        return JSONResponse(run(request))

    app = FastAPI()
    app.include_router(keyed)
    app.include_router(plain)
    keyed_app = IdempotencyKey(
        app,
        ledger,
        consumer="shop",
        scope=lambda request: request.headers[TENANT.lower()],
        **options,
    )
    return keyed_app, app
