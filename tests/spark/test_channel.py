"""The channel between a driver and its tasks."""

import resource
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest
from tests.conditions import wait_until
from tests.logs import events_in

from oncely import OncelyError
from oncely.spark.sink.channel import DriverChannel, TaskChannel, report_batch
from oncely.spark.sink.counts import Counts

_TASKS = 4_000
# In one of two processes: half of the tasks, up to 25 at a time.
_MANY_TASKS = f"""
import sys
from concurrent.futures import ThreadPoolExecutor
from oncely.spark.sink import channel
from oncely.spark.sink.channel import TaskChannel
from oncely.spark.sink.counts import Counts

channel._ANSWER_WITHIN_S = 300

def run(number):
    task = TaskChannel(sys.argv[1], sys.argv[2])
    counts = Counts(received=number, quarantined={{f"reason {{number}}": 1}})
    task.report(counts)
    task.close(counts)

with ThreadPoolExecutor(25) as threads:
    list(threads.map(run, range({_TASKS // 2})))
"""


@pytest.fixture
def driver() -> Iterator[DriverChannel]:
    channel = DriverChannel("127.0.0.1")
    yield channel
    channel.close()


def port_of(driver: DriverChannel) -> int:
    return int(driver.address.rpartition(":")[2])


def connect(driver: DriverChannel) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port_of(driver)), 30)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# ---- Strangers ---------------------------------------------------------------------------------


def test_many_silent_callers_hold_up_nobody(driver: DriverChannel) -> None:
    """The one that has been there for longest makes room, and what they cost is bounded."""
    with ExitStack() as strangers:
        silent = [strangers.enter_context(connect(driver)) for _ in range(400)]
        report_batch(driver.address, driver.token, Counts(received=3, handled=3))
        wait_until(lambda: open_files() < 2 * 400)
        assert silent[0].makefile("rb").read()[32:] == b""
    assert driver.committed().handled == 3


def test_a_wrong_token_is_turned_away(driver: DriverChannel) -> None:
    """Who does not know the token cannot report."""
    with pytest.raises(OncelyError, match="cannot be reached"):
        report_batch(driver.address, "guessed", Counts(handled=3))
    assert driver.committed() == Counts()


def test_who_has_not_proved_the_token_is_not_listened_to(driver: DriverChannel) -> None:
    """However much it has to say; nor is who has proved it, and says too much."""
    with connect(driver) as stranger:
        stranger.settimeout(30)
        with pytest.raises(OSError, match=r"reset|pipe"):
            stranger.sendall(bytes(100_000_000))
    reasons = Counter(f"{n}{'x' * 100_000}" for n in range(10))
    with pytest.raises(OncelyError, match="cannot be reached"):
        report_batch(driver.address, driver.token, Counts(quarantined=reasons))
    report_batch(driver.address, driver.token, Counts(handled=1))
    assert driver.committed() == Counts(handled=1)


# ---- Many tasks --------------------------------------------------------------------------------


@pytest.mark.in_turn("long on Spark")
@pytest.mark.timeout(300)
def test_thousands_of_tasks(driver: DriverChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is counted, and they cost the driver neither threads nor file descriptors."""
    # A busy machine may take longer over all of them: whoever was not answered is not counted.
    monkeypatch.setattr("oncely.spark.sink.channel._ANSWER_WITHIN_S", 300.0)
    threads, files, most = threading.active_count(), open_files(), 0
    said = [sys.executable, "-c", _MANY_TASKS, driver.address, driver.token]
    workers = [subprocess.Popen(said, stderr=subprocess.PIPE) for _ in range(2)]
    while any(worker.poll() is None for worker in workers):
        most = max(most, open_files() - files)
        assert threading.active_count() == threads
        time.sleep(0.05)
    for worker in workers:
        _, err = worker.communicate()
        assert worker.returncode == 0, err.decode()
    half = _TASKS // 2
    told = driver.progress()
    assert told.received == 2 * sum(range(half))
    assert told.quarantined.total() == _TASKS
    assert len(told.quarantined) <= 51
    # Fifty are open at a time, of which few are on the line.
    assert most <= 64
    report_batch(driver.address, driver.token, told)
    assert driver.progress() == told


@contextmanager
def no_file_left() -> Iterator[None]:
    """This process can open no file meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.timeout(120)
def test_no_file_descriptor_is_left(
    driver: DriverChannel, caplog: pytest.LogCaptureFixture
) -> None:
    """Who calls meanwhile is answered when there are some again; the log tells both."""
    caplog.set_level("INFO", "oncely")
    program = (
        "import sys; from oncely.spark.sink.channel import report_batch; "
        "from oncely.spark.sink.counts import Counts; "
        "report_batch(sys.argv[1], sys.argv[2], Counts(received=3, handled=3))"
    )
    said = [sys.executable, "-c", program, driver.address, driver.token]
    with subprocess.Popen(said, stderr=subprocess.PIPE, text=True) as caller:
        with no_file_left():
            wait_until(lambda: "channel_error" in events_in(caplog))
            assert driver.committed() == Counts()
        _, err = caller.communicate(timeout=60)
        assert caller.returncode == 0, err
    assert driver.committed().handled == 3
    assert events_in(caplog) == ["channel_error", "channel_recovered"]


# ---- Stopping ----------------------------------------------------------------------------------


def test_a_driver_that_is_gone(driver: DriverChannel) -> None:
    """A task that cannot reach its driver does not begin; one that runs stops."""
    running = TaskChannel(driver.address, driver.token)
    driver.close()
    with pytest.raises(OncelyError):
        TaskChannel(driver.address, driver.token)
    assert running.stopping.wait(120)
    running.close(Counts())


def test_stop_reaches_tasks_that_run_and_tasks_that_come(driver: DriverChannel) -> None:
    """Every task hears of a stop, also one that connects after it; stop waits for them all."""
    running = TaskChannel(driver.address, driver.token)
    assert not running.stopping.is_set()
    stopped = threading.Thread(target=driver.stop, args=[60.0])
    stopped.start()
    assert running.stopping.wait(120)
    late = TaskChannel(driver.address, driver.token)
    assert late.stopping.is_set()
    late.close()
    assert stopped.is_alive()
    running.close(Counts())
    stopped.join(120)
    assert not stopped.is_alive()


def test_a_killed_task_is_not_waited_for(
    driver: DriverChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who does not call any more has ended, and what it had counted its next attempt counts."""
    monkeypatch.setattr("oncely.spark.sink.channel._SILENT_S", 0.5)
    program = (
        "import os, sys; from oncely.spark.sink.channel import TaskChannel; "
        "TaskChannel(sys.argv[1], sys.argv[2]); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, driver.address, driver.token], timeout=60)
    waited = threading.Thread(target=driver.stop, args=[86_400.0])
    waited.start()
    waited.join(120)
    assert not waited.is_alive()


def test_where_it_listens_and_what_is_called() -> None:
    """A driver behind another address is called by that, and listens at its own."""
    for _ in range(20):
        driver = DriverChannel("localhost", bind="127.0.0.2")
        with closing(socket.socket()) as held, suppress(OSError):
            # Another program may listen at the same port there, which then cannot be held.
            held.bind(("127.0.0.1", port_of(driver)))
            with pytest.raises(ConnectionRefusedError):
                connect(driver)
            break
        driver.close()
    else:
        pytest.fail("it listens at 127.0.0.1, too")
    here = f"127.0.0.2:{port_of(driver)}"
    report_batch(here, driver.token, Counts(handled=1))
    assert driver.address == f"localhost:{port_of(driver)}"
    assert driver.committed().handled == 1
    driver.close()
