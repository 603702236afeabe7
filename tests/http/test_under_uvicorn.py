"""Idempotency keys in a real server of several processes, some of them killed."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from tests.conditions import LIMIT_S, wait_until_async
from tests.http.conftest import Served, served
from tests.turns import in_turn

REQUESTS = int(os.environ.get("ONCELY_TEST_HTTP_REQUESTS", "150"))
"""10,000 in `make http-kills`."""
ORDERS_BETWEEN_KILLS = 40


def workers_of(shop: Served) -> list[int]:
    """The processes that serve, each of which may be killed: uvicorn starts another. They are its
    children, but for what watches their resources.
    """
    children = Path(f"/proc/{shop.pid}/task/{shop.pid}/children").read_text().split()
    return [int(child) for child in children if b"spawn_main" in _command_of(child)]


def _command_of(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.in_turn("processes are killed")
@pytest.mark.parametrize("in_doubt", in_turn("servers killed", ["hold", "retry"]))
def test_workers_are_killed(tmp_path: Path, postgresql_url: str, in_doubt: str) -> None:
    """While processes of the server are killed, clients repeat what is not answered. Under `retry`
    every order is made, under `hold` none twice: what is not known is told to be in doubt.
    """
    environment = {"SHOP_IN_DOUBT": in_doubt, "SHOP_WORK_S": "0.02"}
    with served(tmp_path, "uvicorn", postgresql_url, **environment) as shop:
        answers = asyncio.run(_order_all(shop))
        made = Counter(shop.ordered)
    done = [n for n, answer in enumerate(answers) if answer.status_code == 201]
    doubted = [n for n, answer in enumerate(answers) if answer.status_code == 409]
    assert len(done) + len(doubted) == REQUESTS
    assert [n for n in done if not made[f"o{n}"]] == []
    print(f"{len(done)} done, {len(doubted)} in doubt, {sum(made.values())} made")  # noqa: T201
    if in_doubt == "hold":
        assert max(made.values()) == 1
        assert {answers[n].json()["code"] for n in doubted} <= {"idempotency_in_doubt"}
    else:
        assert doubted == []
        assert len(made) == REQUESTS


async def _order_all(shop: Served) -> Sequence[httpx.Response]:
    """Order each, by eight clients, while one process after another is killed."""
    numbers = iter(range(REQUESTS))
    answers: dict[int, httpx.Response] = {}

    async def order_on(client: httpx.AsyncClient) -> None:
        for number in numbers:
            answers[number] = await _until_answered(client, f"{shop.url}/orders", number)

    async def kill_on() -> None:
        for so_many in range(ORDERS_BETWEEN_KILLS // 2, REQUESTS, ORDERS_BETWEEN_KILLS):
            await wait_until_async(lambda so_many=so_many: len(answers) >= so_many)  # type: ignore[misc]
            await wait_until_async(lambda: len(workers_of(shop)) > 1)
            os.kill(workers_of(shop)[0], signal.SIGKILL)

    async with httpx.AsyncClient(timeout=LIMIT_S) as client:
        await asyncio.gather(kill_on(), *(order_on(client) for _ in range(8)))
    return [answers[number] for number in range(REQUESTS)]


async def _until_answered(client: httpx.AsyncClient, url: str, number: int) -> httpx.Response:
    headers = {"Idempotency-Key": f'"order-{number}"'}
    while True:
        with suppress(httpx.TransportError):
            answer = await client.post(url, json={"number": f"o{number}"}, headers=headers)
            if "retry-after" not in answer.headers:
                return answer
        await asyncio.sleep(0.1)
