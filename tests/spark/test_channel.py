"""The channel between a driver and its tasks."""

import threading
from collections.abc import Iterator
from multiprocessing.connection import Client

import pytest

from oncely import OncelyError
from oncely.spark.sink.channel import DriverChannel, TaskChannel, report_batch
from oncely.spark.sink.counts import Counts


@pytest.fixture
def driver() -> Iterator[DriverChannel]:
    """A driver's end."""
    channel = DriverChannel("127.0.0.1")
    yield channel
    channel.close()


def address_of(driver: DriverChannel) -> tuple[str, int]:
    """Where it listens."""
    host, _, port = driver.address.rpartition(":")
    return host, int(port)


def test_a_silent_caller_holds_up_nobody(driver: DriverChannel) -> None:
    """Somebody who connects and says nothing does not keep tasks from reporting."""
    with Client(address_of(driver)):
        report_batch(driver.address, driver.token, Counts(received=3, handled=3))
    assert driver.committed().handled == 3


def test_a_wrong_token_is_turned_away(driver: DriverChannel) -> None:
    """Who does not know the token cannot report."""
    with pytest.raises(OncelyError, match="cannot be reached"):
        report_batch(driver.address, "guessed", Counts(handled=3))
    assert driver.committed() == Counts()


def test_a_driver_that_is_gone(driver: DriverChannel) -> None:
    """A task that cannot reach its driver does not begin."""
    driver.close()
    with pytest.raises(OncelyError):
        TaskChannel(driver.address, driver.token)


def test_stop_reaches_tasks_that_run_and_tasks_that_come(driver: DriverChannel) -> None:
    """Every task hears of a stop, also one that connects after it; stop waits for them all."""
    running = TaskChannel(driver.address, driver.token)
    assert not running.stopping.is_set()
    stopped = threading.Thread(target=driver.stop, args=[60.0])
    stopped.start()
    assert running.stopping.wait(30)
    late = TaskChannel(driver.address, driver.token)
    assert late.stopping.is_set()
    running.close(Counts())
    late.close()
    stopped.join(30)
    assert not stopped.is_alive()


def test_only_whole_attempts_count_as_progress(driver: DriverChannel) -> None:
    """What an attempt had counted that came to no end is not counted beside its successor."""
    broken = TaskChannel(driver.address, driver.token)
    broken.report(Counts(received=5))
    broken.close()
    whole = TaskChannel(driver.address, driver.token)
    whole.close(Counts(received=7))
    driver.stop(30.0)
    assert driver.progress().received == 7
    report_batch(driver.address, driver.token, Counts(received=7))
    assert driver.progress() == driver.committed() == Counts(received=7)


def test_stop_reaches_a_task_that_outlived_its_batch(driver: DriverChannel) -> None:
    """A second attempt that still runs when its batch is committed hears of a stop too."""
    zombie = TaskChannel(driver.address, driver.token)
    report_batch(driver.address, driver.token, Counts())
    stopped = threading.Thread(target=driver.stop, args=[60.0])
    stopped.start()
    assert zombie.stopping.wait(30)
    zombie.close()
    stopped.join(30)
    assert not stopped.is_alive()
