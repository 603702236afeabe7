"""Workers, servers and connections are struck in the midst of work: all comes out right."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tests.chaos.campaign import Campaign, Servers
from tests.servers import Postgresql, Rabbitmq
from tests.turns import in_turn

MESSAGES = int(os.environ.get("ONCELY_TEST_CHAOS", "400"))
"""Copies included."""
SEED = int(os.environ.get("ONCELY_TEST_CHAOS_SEED") or random.randrange(1 << 32))
_MOST_SHOWN = 20
_TIMEOUT_S = 600 + MESSAGES // 5


def _run(folder: Path, servers: Servers) -> None:
    campaign = Campaign(folder, servers, MESSAGES, SEED)
    try:
        campaign.run()
        found = campaign.faults()
        assert found == [], "\n".join([f"{len(found)} faults", *found[:_MOST_SHOWN]])
    except BaseException:
        sys.stderr.write(f"to draw the same again: ONCELY_TEST_CHAOS_SEED={SEED}\n")
        raise


@pytest.mark.in_turn("processes are killed")
@pytest.mark.timeout(_TIMEOUT_S)
@pytest.mark.parametrize("queue", in_turn("chaos", ("a file", "RabbitMQ")))
def test_chaos(
    queue: str, private_postgresql: Postgresql, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """None lost, transactional effects exactly once, others never twice unless in doubt: the ledger
    is in PostgreSQL, the queue in a file, or in RabbitMQ, which is struck too.
    """
    if queue == "a file":
        url = f"sqlite:///{tmp_path / 'queue.db'}?visibility=3s"
        _run(tmp_path, Servers(url, private_postgresql))
    else:
        rabbitmq: Rabbitmq = request.getfixturevalue("private_rabbitmq")
        _run(tmp_path, Servers(rabbitmq.url, private_postgresql, rabbitmq))


def test_checker_stands_alone() -> None:
    """Whoever judges has no part in what is judged."""
    told = "import sys, tests.chaos.check; sys.exit('oncely' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", told], cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0
