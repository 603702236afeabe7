"""The faults: each is a function that has a run start its drivers, and strikes meanwhile."""

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress

from tests.servers import Postgresql
from tests.spark_faults.cluster import MASTER, SECOND_WORKER, WORKER, start_cluster
from tests.spark_faults.driver import LEASE_S
from tests.spark_faults.run import Run

_FROZEN_S = 3 * LEASE_S
_ON_EXECUTORS = {
    "spark.executor.memory": "512m",
    # An executor that does not answer is given up before it answers again.
    "spark.executor.heartbeatInterval": "500ms",
    "spark.storage.blockManagerHeartbeatTimeoutMs": "5s",
    "spark.network.timeoutInterval": "500ms",
}
_CLUSTER = {"spark.master": "local-cluster[2,1,1024]", **_ON_EXECUTORS}
_SLOW_MS = 60
_SPECULATION = {
    **_ON_EXECUTORS,
    "spark.storage.blockManagerHeartbeatTimeoutMs": "60s",
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.minTaskRuntime": "100ms",
    "spark.driver.host": MASTER,
    "spark.driver.bindAddress": MASTER,
    "spark.eventLog.enabled": "true",
    "spark.eventLog.compress": "false",
}


def python_worker_killed(run: Run, _: Postgresql) -> None:
    """Tasks fail in the midst of their chunks: their Python processes are killed, twice."""
    driver = run.driver()
    for share in (0.3, 0.6):
        run.reach(driver, share)
        workers = run.programs.wait_for(run.programs.python_workers, "there is no Python worker")
        for worker in workers:
            _kill(worker)
    run.finish(driver)


def executor_killed(run: Run, _: Postgresql) -> None:
    """An executor's JVM is killed; its Python process finds out by itself."""
    run.tell(settings=_CLUSTER)
    driver = run.driver()
    run.reach(driver, 0.3)
    _kill(run.programs.busy_executor())
    run.finish(driver)


def executor_frozen(run: Run, _: Postgresql) -> None:
    """An executor's JVM is frozen past the lease; its Python process goes on."""
    run.tell(settings=_CLUSTER)
    driver = run.driver()
    run.reach(driver, 0.3)
    run.programs.freeze([run.programs.busy_executor()], _FROZEN_S)
    run.finish(driver)


def host_frozen(run: Run, _: Postgresql) -> None:
    """An executor is frozen past the lease with its Python processes, and goes on; three times."""
    run.tell(settings=_CLUSTER)
    driver = run.driver()
    for share in (0.2, 0.4, 0.6):
        run.reach(driver, share)
        run.programs.freeze(run.programs.family(run.programs.busy_executor()), _FROZEN_S)
    run.finish(driver)


def speculation(run: Run, _: Postgresql) -> None:
    """A slow task runs for the second time while the first is still at it."""
    # Spark runs a second copy of a task on another host only.
    hosts = (WORKER, SECOND_WORKER)
    master = start_cluster(run.programs, run.checkpoint.with_name("work"), cores=4, hosts=hosts)
    events = run.checkpoint.with_name("events")
    events.mkdir()
    told = {"spark.master": master, "spark.eventLog.dir": f"file:{events}"}
    run.tell(settings={**_SPECULATION, **told}, slow_ms=_SLOW_MS)
    run.finish(run.driver())
    logs = [file.read_text() for file in events.rglob("*") if file.is_file()]
    assert any('"Speculative":true' in log for log in logs), "no task was run twice"


def driver_killed(run: Run, _: Postgresql) -> None:
    """The driver is killed between a batch's offsets and its commit, twice."""
    for share in (0.2, 0.5):
        driver = run.driver()
        run.reach(driver, share)
        run.await_open_batch(driver)
        run.programs.kill_driver(driver)
    run.finish(run.driver())


def commit_removed(run: Run, _: Postgresql) -> None:
    """The newest commit is lost, of a run that was killed and of one that had come to its end."""
    driver = run.driver()
    run.reach(driver, 0.5)
    run.programs.kill_driver(driver)
    run.remove_newest_commit()
    run.finish(run.driver())
    run.remove_newest_commit()
    run.finish(run.driver())


def checkpoint_removed(run: Run, _: Postgresql) -> None:
    """All progress is lost, of a run that was killed and of one that had come to its end."""
    driver = run.driver()
    run.reach(driver, 0.5)
    run.programs.kill_driver(driver)
    run.remove_checkpoint()
    run.finish(run.driver())
    run.remove_checkpoint()
    run.finish(run.driver())


def two_drivers(run: Run, _: Postgresql) -> None:
    """Two drivers read the same messages for one consumer at the same time."""
    other = run.driver(run.checkpoint.with_name("checkpoint-of-another"))
    run.finish(run.driver())
    run.finish(other)


def postgresql_restarted(run: Run, postgresql: Postgresql) -> None:
    """The ledger goes away in the middle, and comes back."""
    driver = run.driver()
    run.reach(driver, 0.4)
    postgresql.restart()
    run.finish(driver)


def one_after_another(run: Run, postgresql: Postgresql) -> None:
    """A killed driver, a lost commit, killed Python processes, and the ledger gone and back."""
    driver = run.driver()
    run.reach(driver, 0.35)
    run.await_open_batch(driver)
    run.programs.kill_driver(driver)
    run.remove_newest_commit()
    driver = run.driver()
    run.reach(driver, 0.55)
    for worker in run.programs.wait_for(run.programs.python_workers, "there is no Python worker"):
        _kill(worker)
    run.reach(driver, 0.75)
    postgresql.restart()
    run.finish(driver)


SCENARIOS: Mapping[str, Callable[[Run, Postgresql], None]] = {
    scenario.__name__: scenario
    for scenario in (
        python_worker_killed,
        executor_killed,
        executor_frozen,
        host_frozen,
        speculation,
        driver_killed,
        commit_removed,
        checkpoint_removed,
        two_drivers,
        postgresql_restarted,
        one_after_another,
    )
}


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
