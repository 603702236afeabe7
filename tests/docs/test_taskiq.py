"""docs/how-to/taskiq.md: its program with a worker of taskiq on Redis, which is killed."""

import asyncio
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.conditions import wait_until_async
from tests.docs.sections import Page
from tests.integration.adapting import found, process

from oncely import Key

FOLDER, REDIS = "TASKIQ_FOLDER", "TASKIQ_REDIS"
_FIRST = 'order == "hang" and oncely.current().claim.attempts == 1'
_HANGS = f"await asyncio.sleep(3_600 if {_FIRST} else 0)"


def shop() -> dict[str, Any]:
    """What the page defines."""
    places = {
        "redis://localhost:6379": os.environ[REDIS],
        "shop.db": f"{os.environ[FOLDER]}/shop.db",
        "idle_timeout=600_000": "idle_timeout=1_000",
        '"5m"': '"1s"',
        'print("charging", order)': _HANGS,
    }
    return Page("taskiq", places).run("The task", {"__name__": "shop"})


@pytest.mark.in_turn("other brokers of frameworks")
def test_killed(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that is sent twice runs once; that of a killed worker is delivered again."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv(REDIS, redis_url)
    monkeypatch.setitem(sys.modules, "shop", ModuleType("shop"))  # taskiq looks there.
    own = "from tests.docs.test_taskiq import shop\n\nglobals().update(shop())\n"
    (tmp_path / "shop.py").write_text(own)
    defined = shop()
    ledger = defined["ledger"]
    command = ("taskiq", "worker", "shop:broker", "--workers", "1")
    places = {"PYTHONPATH": f"{tmp_path}:."}

    async def hang() -> Any:
        with process(*command, environment=places):
            assert await defined["send_twice"]() == ["charged order-17"] * 2
            task = await defined["charge"].kicker().with_task_id("b").kiq("hang")
            await wait_until_async(lambda: ledger.find(Key("charge", "b")))
        with process(*command, environment=places):
            # Only a worker that receives another task looks for those of dead workers.
            while not await task.is_ready():
                await defined["charge"].kiq("another")
                await asyncio.sleep(0.5)
            result = await task.get_result()
            await defined["broker"].shutdown()
            return result.return_value

    assert asyncio.run(hang()) == "charged hang"
    assert [found(ledger, "charge", id_).attempts for id_ in ("order-17", "b")] == [1, 2]
    ledger.close()
