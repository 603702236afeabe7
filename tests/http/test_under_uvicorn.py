"""Idempotency keys in a real server of several processes, some of them killed."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from tests.conditions import LIMIT_S, wait_until, wait_until_async
from tests.turns import in_turn

from oncely.ledger.ledger import open_ledger

ROOT = Path(__file__).parents[2]
REQUESTS = int(os.environ.get("ONCELY_TEST_HTTP_REQUESTS", "150"))
"""10,000 in `make http-kills`."""
ORDERS_BETWEEN_KILLS = 40


class Shop:
    """uvicorn with two processes, each of which may be killed: it starts another."""

    def __init__(self, folder: Path, url: str, **environment: str) -> None:
        self.effects = folder / "effects"
        self.effects.touch()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        command = [sys.executable, "-m", "uvicorn", "--factory", "tests.http.shop:application"]
        options = ["--port", str(self.port), "--workers", "2", "--log-level", "warning"]
        paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
        own = {"SHOP_EFFECTS": str(self.effects), "SHOP_LEDGER": url, "PYTHONPATH": paths}
        self._log = (folder / "log").open("wb")
        self._server = subprocess.Popen(
            [*command, *options], env=os.environ | own | environment, stderr=self._log
        )

    @property
    def url(self) -> str:
        """Where orders are taken."""
        return f"http://127.0.0.1:{self.port}/orders"

    def answers(self) -> bool:
        """Whether anybody serves."""
        try:
            httpx.get(self.url)
        except httpx.TransportError:
            return False
        return True

    def workers(self) -> list[int]:
        """The processes that serve: uvicorn's children, but for what watches their resources."""
        pid = self._server.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in children if b"spawn_main" in _command_of(child)]

    def ordered(self) -> Counter[str]:
        """How often each order was made."""
        return Counter(self.effects.read_text().split())

    def close(self) -> None:
        """Stop it."""
        self._server.terminate()
        self._server.wait(LIMIT_S)
        self._log.close()


def _command_of(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@contextmanager
def open_shop(folder: Path, url: str, **environment: str) -> Iterator[Shop]:
    """A shop that answers."""
    with_ledger = open_ledger(url)
    with_ledger.migrate()
    with_ledger.close()
    shop = Shop(folder, url, **environment)
    try:
        wait_until(shop.answers, (folder / "log").read_text)
        yield shop
    finally:
        shop.close()


@pytest.mark.in_turn("processes are killed")
@pytest.mark.parametrize("in_doubt", in_turn("servers killed", ["hold", "retry"]))
def test_workers_are_killed(tmp_path: Path, postgresql_url: str, in_doubt: str) -> None:
    """While processes of the server are killed, clients repeat what is not answered. Under `retry`
    every order is made, under `hold` none twice: what is not known is told to be in doubt.
    """
    environment = {"SHOP_IN_DOUBT": in_doubt, "SHOP_WORK_S": "0.02"}
    with open_shop(tmp_path, postgresql_url, **environment) as shop:
        answers = asyncio.run(_order_all(shop))
        made = shop.ordered()
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


async def _order_all(shop: Shop) -> Sequence[httpx.Response]:
    """Order each, by eight clients, while one process after another is killed."""
    numbers = iter(range(REQUESTS))
    answers: dict[int, httpx.Response] = {}

    async def order_on(client: httpx.AsyncClient) -> None:
        for number in numbers:
            answers[number] = await _until_answered(client, shop.url, number)

    async def kill_on() -> None:
        for so_many in range(ORDERS_BETWEEN_KILLS // 2, REQUESTS, ORDERS_BETWEEN_KILLS):
            await wait_until_async(lambda so_many=so_many: len(answers) >= so_many)  # type: ignore[misc]
            await wait_until_async(lambda: len(shop.workers()) > 1)
            os.kill(shop.workers()[0], signal.SIGKILL)

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
