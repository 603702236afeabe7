"""How deliveries reach a ledger: one at a time, from threads, from tasks, in batches."""

import asyncio
import multiprocessing
import random
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Self

from oncely import AsyncLedger, Granted, Key, Ledger

DUPLICATES = 10
"""One delivery in so many is a copy of a message that is done."""
_COPIED_FROM = 1_000


class Measured(NamedTuple):
    """The measurements of a load."""

    messages: int
    seconds: float
    latencies_s: list[float]
    """How long each message took, or each batch."""

    @property
    def rate(self) -> float:
        """Messages a second."""
        return self.messages / self.seconds


class Deliveries:
    """Ids of deliveries: random and new, except for one in `copies`, where that is not 0."""

    def __init__(self, copies: int) -> None:
        self._copies = copies
        self._count = 0
        self._settled: deque[str] = deque(maxlen=_COPIED_FROM)

    def take(self) -> str:
        """The id of the next delivery."""
        self._count += 1
        if self._copies and self._count % self._copies == 0 and self._settled:
            return random.choice(self._settled)
        return str(uuid.uuid4())

    def settle(self, message_id: str) -> None:
        """Note that this message is done, so that duplicates of it may be drawn."""
        self._settled.append(message_id)


Process = Callable[[str], None]
Window = Callable[[Sequence[str]], None]
Load = Callable[[float], Measured]
"""Runs for so many seconds."""


def one_by_one(make: Callable[[], Process], callers: int, copies: int = DUPLICATES) -> Load:
    """Let so many threads, each with a result of `make`, process one message after the other."""
    return windows(partial(_singly, make), 1, callers, copies)


def windows(
    make: Callable[[], Window], size: int, callers: int = 1, copies: int = DUPLICATES
) -> Load:
    """The same with so many messages at a time."""

    def run(seconds: float) -> Measured:
        # All connect first: counting begins when the last of them has connected.
        start = threading.Barrier(callers + 1)
        with ThreadPoolExecutor(callers) as pool:
            running = [
                pool.submit(_caller, make, seconds, start, size, copies) for _ in range(callers)
            ]
            start.wait()
            began = time.perf_counter()
            latencies = [latency for future in running for latency in future.result()]
        return Measured(len(latencies) * size, time.perf_counter() - began, latencies)

    return run


def _singly(make: Callable[[], Process]) -> Window:
    process = make()

    def window(ids: Sequence[str]) -> None:
        for message_id in ids:
            process(message_id)

    return window


class Processes:
    """So many processes that stay alive, so that no start is measured."""

    def __init__(self, count: int) -> None:
        # Not forked: this process may have threads, and connections.
        context = multiprocessing.get_context("spawn")
        self._count = count
        self._start = context.Barrier(count + 1)
        self._pool = ProcessPoolExecutor(count, context, _is_given, (self._start,))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def one_by_one(self, make: Callable[[], Process]) -> Load:
        """As the function of that name, in every process; `make` is sent to the processes."""

        def run(seconds: float) -> Measured:
            count = self._count
            singly = partial(_singly, make)
            running = [self._pool.submit(_caller, singly, seconds) for _ in range(count)]
            self._start.wait()
            began = time.perf_counter()
            latencies = [latency for future in running for latency in future.result()]
            return Measured(len(latencies), time.perf_counter() - began, latencies)

        return run


_start: Any = None
"""In one of these processes: what all of them begin together by."""


def _is_given(start: Any) -> None:
    global _start
    _start = start


def _caller(
    make: Callable[[], Window],
    seconds: float,
    start: Any = None,
    size: int = 1,
    copies: int = DUPLICATES,
) -> list[float]:
    start = start or _start
    try:
        process = make()
    except BaseException:
        start.abort()
        raise
    deliveries, took = Deliveries(copies), []
    start.wait()
    until = time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        ids = [deliveries.take() for _ in range(size)]
        process(ids)
        took.append(time.perf_counter() - began)
        for message_id in ids:
            deliveries.settle(message_id)
    return took


def single_calls(ledger: Ledger, callers: int, copies: int = DUPLICATES) -> Load:
    """`claim` and `complete`, from so many threads."""

    def process(message_id: str) -> None:
        outcome = ledger.claim(Key("bench", message_id))
        if isinstance(outcome, Granted):
            ledger.complete(outcome.claim)

    return one_by_one(lambda: process, callers, copies)


def tasks(ledger: Ledger, callers: int, copies: int = DUPLICATES) -> Load:
    """`claim` and `complete`, from so many asyncio tasks in one loop."""

    async def task(shared: AsyncLedger, until: float, took: list[float]) -> None:
        deliveries = Deliveries(copies)
        while (began := time.perf_counter()) < until:
            message_id = deliveries.take()
            outcome = await shared.claim(Key("bench", message_id))
            if isinstance(outcome, Granted):
                await shared.complete(outcome.claim)
            took.append(time.perf_counter() - began)
            deliveries.settle(message_id)

    async def run_all(seconds: float) -> Measured:
        took: list[float] = []
        shared = AsyncLedger(ledger)
        began = time.perf_counter()
        await asyncio.gather(*(task(shared, began + seconds, took) for _ in range(callers)))
        return Measured(len(took), time.perf_counter() - began, took)

    return lambda seconds: asyncio.run(run_all(seconds))


def batches(ledger: Ledger, size: int, callers: int, copies: int = DUPLICATES) -> Load:
    """`claim_many` and `complete_many`, so many messages at a time, from so many threads."""

    def process(ids: Sequence[str]) -> None:
        outcomes = ledger.claim_many([Key("bench", message_id) for message_id in ids])
        ledger.complete_many([o.claim for o in outcomes if isinstance(o, Granted)])

    return windows(lambda: process, size, callers, copies)
