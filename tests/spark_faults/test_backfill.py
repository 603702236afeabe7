"""A live worker and a backfill on Spark take the same messages at once, with one ledger."""

import os
import sys
from contextlib import closing
from pathlib import Path

import pytest
from tests.spark_faults.check import LOG, PUBLISHED, REPEATED, faults, left_of
from tests.spark_faults.processes import Programs
from tests.spark_faults.run import Run

from oncely.core.message import Message
from oncely.transports.open_transport import open_transport

MESSAGES = int(os.environ.get("ONCELY_TEST_BACKFILL", "1000"))
"""Copies included."""
_LEASE_S = 60.0


@pytest.mark.timeout(1800 + MESSAGES // 10)
def test_a_live_worker_and_a_backfill(
    postgresql_url: str, rabbitmq_url: str, tmp_path: Path
) -> None:
    """Each message has one effect, and both have had a part in it."""
    with Programs(tmp_path) as programs:
        run = Run(programs, tmp_path, postgresql_url, MESSAGES, seed=1)
        run.publish()
        run.tell(modes=[REPEATED], lease_s=_LEASE_S)
        published = (tmp_path / PUBLISHED).read_text().split()
        with closing(open_transport(rabbitmq_url)) as transport:
            transport.publish(REPEATED, [Message(each, each.encode()) for each in published])
        told = [sys.executable, "-m", "tests.spark_faults.live", rabbitmq_url, postgresql_url]
        live = programs.start(*told, REPEATED, f"{_LEASE_S}s")
        run.finish(run.driver())
        programs.wait_for(lambda: live.poll() is not None, "the live worker does not end")
        assert live.returncode == 0, programs.last_words()
    left = left_of(REPEATED, tmp_path, postgresql_url)
    assert faults(REPEATED, published, left) == []
    assert {len(fences) for fences in left.effects.values()} == {1}
    pids = [line.split()[3] for line in (tmp_path / f"{LOG}{REPEATED}").read_text().splitlines()]
    by_live = pids.count(str(live.pid))
    sys.stderr.write(f"{len(pids)} effects, {by_live} of them by the live worker\n")
    assert 0 < by_live < len(pids)
