"""What an idempotency key adds to a request, beside the same application without it.

One client, one request after another over one connection, against uvicorn; in each round all
variants in turn, so that other work on the machine affects all of them. The ledger is in
PostgreSQL; asgi-idempotency-header keeps its answers in Redis.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

import httpx
from rich.console import Console
from rich.table import Table
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from tests.servers import Postgresql, Redis

from oncely.http import IdempotencyKey
from oncely.ledger.ledger import open_ledger

ROUNDS = 5
REQUESTS = 400
WARM_UP = 50
VARIANTS = ("bare", "oncely", "asgi-idempotency-header")


async def _order(request: Request) -> JSONResponse:
    return JSONResponse({"ordered": (await request.json())["number"]}, 201)


def application() -> Any:
    """The application of the variant that the environment names."""
    app = Starlette(routes=[Route("/orders", _order, methods=["POST"])])
    match os.environ["BENCH_VARIANT"]:
        case "oncely":
            ledger = open_ledger(os.environ["BENCH_POSTGRESQL"])
            ledger.migrate()
            return IdempotencyKey(app, ledger, consumer="bench", bare_keys=True)
        case "asgi-idempotency-header":
            return _theirs(app)
    return app


def _theirs(app: Any) -> Any:
    from idempotency_header_middleware import IdempotencyHeaderMiddleware
    from idempotency_header_middleware.backends import RedisBackend
    from redis.asyncio import Redis as AsyncRedis

    backend = RedisBackend(redis=AsyncRedis.from_url(os.environ["BENCH_REDIS"]))
    return IdempotencyHeaderMiddleware(app, backend=backend)


@contextmanager
def _served(variant: str, environment: dict[str, str], log: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "--factory", "benchmarks.http_keys:application"]
    options = ["--port", str(port), "--log-level", "warning"]
    own = {**os.environ, **environment, "BENCH_VARIANT": variant}
    with log.open("wb") as file:
        server = subprocess.Popen([*command, *options], env=own, stderr=file)
        try:
            yield f"http://127.0.0.1:{port}/orders"
        finally:
            server.terminate()
            server.wait(30)


def _await(client: httpx.Client, url: str, log: Path) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            client.get(url)
            return
        except httpx.TransportError:
            if time.monotonic() > deadline:
                raise RuntimeError(log.read_text()) from None
            time.sleep(0.05)


def _timed(client: httpx.Client, url: str, count: int, key: str | None = None) -> float:
    """The median of a request, in ms; each request has a key of its own, or all have the same."""
    times = []
    for number in range(count):
        headers = {"Idempotency-Key": key or str(uuid4())}
        began = time.perf_counter()
        answer = client.post(url, json={"number": 0 if key else number}, headers=headers)
        times.append((time.perf_counter() - began) * 1000)
        answer.raise_for_status()
    return median(times)


def main() -> None:
    """Print the table."""
    new: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    repeated: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    with ExitStack() as stack:
        postgresql, redis = stack.enter_context(Postgresql()), stack.enter_context(Redis())
        environment = {"BENCH_POSTGRESQL": postgresql.url, "BENCH_REDIS": redis.url}
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        client = stack.enter_context(httpx.Client(timeout=30))
        urls = {}
        for variant in VARIANTS:
            log = folder / variant
            urls[variant] = stack.enter_context(_served(variant, environment, log))
            _await(client, urls[variant], log)
            _timed(client, urls[variant], WARM_UP)
        for _ in range(ROUNDS):
            for variant, url in urls.items():
                new[variant].append(_timed(client, url, REQUESTS))
                repeated[variant].append(_timed(client, url, REQUESTS, str(uuid4())))
    table = Table("variant", "new: p50 ms", "added", "repeated: p50 ms", "added")
    bare, bare_again = median(new["bare"]), median(repeated["bare"])
    for variant in VARIANTS:
        one, other = median(new[variant]), median(repeated[variant])
        added = [f"{one - bare:+.2f}", f"{other - bare_again:+.2f}"]
        table.add_row(variant, f"{one:.2f}", added[0], f"{other:.2f}", added[1])
    Console().print(table)


if __name__ == "__main__":
    main()
