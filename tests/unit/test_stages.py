"""Stages: batches that a thread of its own works on, one after another."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.conditions import LIMIT_S

from oncely.consuming.stages import Stage


class Work:
    """Work that waits until it may go on, and writes down what it has done."""

    def __init__(self) -> None:
        self.may_go_on = threading.Semaphore(0)
        self.done: list[int] = []
        self.rings: list[str] = []

    def __call__(self, batch: Sequence[int]) -> None:
        assert self.may_go_on.acquire(timeout=LIMIT_S)
        if 13 in batch:
            raise ValueError("not that one")
        self.done += batch

    def ring(self) -> None:
        self.rings.append(threading.current_thread().name)


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def stage(work: Work) -> Iterator[Stage[int]]:
    made = Stage("stage", work, work.ring)
    yield made
    for _ in range(10):
        work.may_go_on.release()
    made.close()


def test_in_order(stage: Stage[int], work: Work) -> None:
    """What is done is collected once, in the order in which it was put, and nothing before."""
    stage.put([1, 2])
    stage.put([3])
    assert stage.collect() == []
    work.may_go_on.release(2)
    assert stage.wait() == [1, 2, 3] == work.done
    assert stage.collect() == []
    assert len(work.rings) == 2
    assert all(name.startswith("stage") for name in work.rings)


def test_no_more_than_two_under_way(stage: Stage[int], work: Work) -> None:
    """Who puts a third waits for the first, which is collected with the others."""
    stage.put([1])
    stage.put([2])

    def put_third() -> list[int]:
        stage.put([3])
        return [*work.done]

    with ThreadPoolExecutor(1) as pool:
        third = pool.submit(put_third)
        work.may_go_on.release()
        assert third.result(LIMIT_S)[0] == 1
    work.may_go_on.release(2)
    assert stage.wait() == [1, 2, 3]


def test_what_the_work_raises(stage: Stage[int], work: Work) -> None:
    """It is raised where it is collected; what was done before is not lost with it."""
    stage.put([1])
    stage.put([13])
    work.may_go_on.release(2)
    with pytest.raises(ValueError, match="not that one"):
        stage.wait()
    assert stage.collect() == [1]


def test_close_waits(work: Work) -> None:
    """What is under way comes to its end first."""
    stage = Stage("stage", work, work.ring)
    stage.put([1])
    work.may_go_on.release()
    stage.close()
    assert work.done == [1]
