"""The chain of middleware around a handler: its order, its threads, and what goes through it."""

import asyncio
import concurrent.futures
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pytest
from tests.conditions import LIMIT_S

from oncely.core.errors import ConfigError
from oncely.core.message import Message
from oncely.middleware.chain import BothWays, CallNext, Middleware, chained, chained_async

MESSAGE = Message("abc-123", b"{}")

Noted = list[str]


def noting(noted: Noted, name: str) -> Middleware:
    """Middleware that notes its way in and its way out."""

    def note(message: Message, call_next: CallNext) -> Any:
        noted.append(f"> {name}")
        try:
            return call_next(message)
        finally:
            noted.append(f"< {name}")

    return note


def noting_async(noted: Noted, name: str) -> Middleware:
    """As `noting`, async."""

    async def note(message: Message, call_next: CallNext) -> Any:
        noted.append(f"> {name}")
        try:
            return await call_next(message)
        finally:
            noted.append(f"< {name}")

    return note


class Both(BothWays):
    """Notes by which way it was called."""

    def __init__(self, noted: Noted) -> None:
        self._noted = noted

    def run(self, message: Message, call_next: CallNext) -> Any:
        self._noted.append("run")
        return call_next(message)

    async def run_async(self, message: Message, call_next: CallNext) -> Any:
        self._noted.append("run_async")
        return await call_next(message)


def length(message: Message) -> int:
    """A handler."""
    return len(message.body)


async def length_async(message: Message) -> int:
    """An async handler."""
    await asyncio.sleep(0)
    return len(message.body)


def run(call: Callable[[Message], Awaitable[Any]]) -> Any:
    """What `call` comes to with the message."""

    async def main() -> Any:
        async with asyncio.timeout(LIMIT_S):
            return await call(MESSAGE)

    return asyncio.run(main())


@pytest.fixture
def noted() -> Noted:
    """What happened, in order."""
    return []


# ---- Order -------------------------------------------------------------------------------------


def test_order(noted: Noted) -> None:
    """The first is outermost: it begins first, and ends last."""
    assert chained([noting(noted, "a"), noting(noted, "b")], length)(MESSAGE) == 2
    assert noted == ["> a", "> b", "< b", "< a"]


@pytest.mark.parametrize("handler", [length, length_async])
@pytest.mark.parametrize("kinds", ["aaaa", "ssss", "asas", "sasa", "aass", "ssaa"])
def test_order_in_an_async_chain(noted: Noted, kinds: str, handler: CallNext) -> None:
    """The order is the same however those that are async and those that are not are mixed."""
    make = {"a": noting_async, "s": noting}
    middlewares = [make[kind](noted, str(place)) for place, kind in enumerate(kinds)]
    assert run(chained_async(middlewares, handler)) == 2
    assert noted == [*(f"> {n}" for n in range(4)), *(f"< {n}" for n in reversed(range(4)))]


def test_message_can_be_changed() -> None:
    """What middleware hands on is what the handler gets, and what it returns is the result. What
    stands behind middleware that does not go on does not run.
    """

    def decode(message: Message, call_next: CallNext) -> Any:
        return call_next(Message(message.id, b"decoded")) * 10

    def skip(message: Message, call_next: CallNext) -> str:
        return "skipped"

    def fail(message: Message) -> None:
        pytest.fail("it ran")

    assert chained([decode], length)(MESSAGE) == 70
    assert run(chained_async([decode], length_async)) == 70
    assert chained([skip], fail)(MESSAGE) == "skipped"
    assert run(chained_async([skip], fail)) == "skipped"


# ---- Errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [ValueError("no"), TimeoutError("late"), concurrent.futures.CancelledError("not ours")],
    ids=lambda error: type(error).__name__,
)
def test_errors_pass(noted: Noted, error: Exception) -> None:
    """An error of the handler comes out as the very same object, through whatever stands around."""

    def fail(message: Message) -> None:
        raise error

    async def fail_async(message: Message) -> None:
        raise error

    both: list[Middleware] = [noting(noted, "a"), noting_async(noted, "b"), noting(noted, "c")]
    for handler in (fail, fail_async):
        with pytest.raises(type(error)) as raised:
            run(chained_async(both, handler))
        assert raised.value is error
    with pytest.raises(type(error)) as raised:
        chained([noting(noted, "a")], fail)(MESSAGE)
    assert raised.value is error


def test_exits_pass(noted: Noted) -> None:
    """SystemExit comes out of an async handler through a thread, and does not end the loop."""

    async def leave(message: Message) -> None:
        raise SystemExit

    async def main() -> None:
        with pytest.raises(SystemExit):
            await chained_async([noting(noted, "a")], leave)(MESSAGE)
        await asyncio.sleep(0)
        noted.append("goes on")

    asyncio.run(main())
    assert noted == ["> a", "< a", "goes on"]


def test_stop_iteration_ends_the_call() -> None:
    """A StopIteration, which no future can hold, does not leave the chain waiting for ever."""

    def stop(message: Message) -> None:
        raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        run(chained_async([], stop))


# ---- Threads -----------------------------------------------------------------------------------


def test_waiting_threads_starve_nobody() -> None:
    """However many messages wait in threads for what needs further threads, all arrive."""
    nothing: Noted = []
    steps = [noting(nothing, "a"), noting_async(nothing, "b"), noting(nothing, "c")]
    all_wait = threading.Barrier(50, timeout=LIMIT_S)

    def handler(message: Message) -> int:
        return all_wait.wait()

    async def main() -> list[int]:
        call = chained_async(steps, handler)
        async with asyncio.timeout(LIMIT_S):
            return list(await asyncio.gather(*(call(MESSAGE) for _ in range(50))))

    assert sorted(asyncio.run(main())) == [*range(50)]


def test_threads_do_not_keep_the_process() -> None:
    """A process ends while a handler is still at it in a thread."""
    program = (
        "import asyncio, os, threading\n"
        "from oncely.core.message import Message\n"
        "from oncely.middleware.chain import chained_async\n"
        "began = threading.Event()\n"
        "def handler(message):\n    began.set()\n    threading.Event().wait()\n"
        "loop = asyncio.new_event_loop()\n"
        "task = loop.create_task(chained_async([], handler)(Message('1')))\n"
        "loop.run_until_complete(asyncio.sleep(0))\n"
        "assert began.wait(60)\n"
        "asyncio.set_event_loop(None)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert ended.returncode == 0


def test_context_goes_in() -> None:
    """What middleware sets in its context is seen inside, through threads and tasks."""
    name: ContextVar[str] = ContextVar("name", default="")

    async def outer(message: Message, call_next: CallNext) -> Any:
        name.set("outer")
        return await call_next(message)

    def inner(message: Message, call_next: CallNext) -> Any:
        name.set(f"{name.get()} inner")
        return call_next(message)

    async def handler(message: Message) -> str:
        return name.get()

    assert run(chained_async([outer, inner], handler)) == "outer inner"


# ---- Cancelling --------------------------------------------------------------------------------


def cancelled_inside(middlewares: list[Middleware], noted: Noted) -> None:
    """Cancel the chain while its handler, which is async, waits."""

    async def handler(message: Message) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            noted.append("handler")

    async def main() -> None:
        task = asyncio.ensure_future(chained_async(middlewares, handler)(MESSAGE))
        async with asyncio.timeout(LIMIT_S):
            await began.wait()
            task.cancel()
            await asyncio.wait([task])
        assert task.cancelled()

    began = asyncio.Event()
    asyncio.run(main())


@pytest.mark.parametrize("kinds", ["aa", "ss", "as", "sa"])
def test_cancelling_reaches_the_handler(noted: Noted, kinds: str) -> None:
    """The handler ends first, and every `finally` around it in turn, in threads as well."""
    make = {"a": noting_async, "s": noting}
    cancelled_inside([make[kind](noted, str(place)) for place, kind in enumerate(kinds)], noted)
    assert noted == ["> 0", "> 1", "handler", "< 1", "< 0"]


def test_cancelling_is_no_failure(noted: Noted) -> None:
    """Middleware in a thread that catches errors does not catch that it is cancelled."""

    def catch(message: Message, call_next: CallNext) -> Any:
        try:
            return call_next(message)
        except Exception as error:  # noqa: BLE001 - it is what the test looks for.
            noted.append(type(error).__name__)

    cancelled_inside([catch], noted)
    assert noted == ["handler"]


def test_cancelled_middleware_cannot_go_on() -> None:
    """What is cancelled while its thread works elsewhere does not begin what is inside."""
    began, may_go_on = threading.Event(), threading.Event()

    def slow(message: Message, call_next: CallNext) -> Any:
        began.set()
        assert may_go_on.wait(LIMIT_S)
        return call_next(message)

    async def handler(message: Message) -> None:
        pytest.fail("it ran")

    async def main() -> None:
        task = asyncio.ensure_future(chained_async([slow], handler)(MESSAGE))
        assert await asyncio.to_thread(began.wait, LIMIT_S)
        task.cancel()
        await asyncio.sleep(0)
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, LIMIT_S)

    asyncio.run(main())


def test_thread_is_waited_for() -> None:
    """A handler in a thread ends before the chain does; that it succeeded is not lost."""
    began, may_end = threading.Event(), threading.Event()

    def handler(message: Message) -> str:
        began.set()
        assert may_end.wait(LIMIT_S)
        return "done"

    async def main() -> str:
        task = asyncio.ensure_future(chained_async([], handler)(MESSAGE))
        assert await asyncio.to_thread(began.wait, LIMIT_S)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done()
        may_end.set()
        return str(await asyncio.wait_for(task, LIMIT_S))

    assert asyncio.run(main()) == "done"


# ---- What cannot be meant ----------------------------------------------------------------------


async def log_it(message: Message, call_next: CallNext) -> Any:
    """Async middleware."""
    return await call_next(message)


def one_argument(message: Message) -> None:
    """No middleware."""


def yields(message: Message, call_next: CallNext) -> Iterator[None]:
    """Middleware as other frameworks have it."""
    yield


@pytest.mark.parametrize(
    ("middleware", "text"),
    [
        (one_argument, r"one_argument takes \(message: .*\).*; write `def one_argument\(message, "),
        (Both, "middleware Both is a class; write a call of it"),
        (None, r"middleware: NoneType is not a function of \(message, call_next\)"),
        (yields, "middleware yields is a generator; write `return call_next"),
    ],
)
def test_what_is_no_middleware(middleware: Any, text: str) -> None:
    """What cannot be called with a message and what goes on is told as the chain is made."""
    with pytest.raises(ConfigError, match=text):
        chained([middleware], length)
    with pytest.raises(ConfigError, match=text):
        chained_async([middleware], length_async)


def test_async_parts_of_a_sync_chain() -> None:
    """A sync chain tells which of its parts is async."""
    with pytest.raises(ConfigError, match="middleware log_it is async, and other parts"):
        chained([log_it], length)
    with pytest.raises(ConfigError, match="handler is async"):
        chained([], length_async)


def test_hidden_coroutine() -> None:
    """A plain function that returns a coroutine has not done its work, and async middleware that
    returns what it was to await has not, either: the message does not count as done.
    """

    async def forgets(message: Message, call_next: CallNext) -> Any:
        return call_next(message)

    with pytest.raises(ConfigError, match="forgets returned an awaitable instead of its result"):
        run(chained_async([forgets], length_async))
    with pytest.raises(ConfigError, match="returned a coroutine"):
        chained([lambda message, call_next: length_async(message)], length)(MESSAGE)
    with pytest.raises(ConfigError, match="returned a coroutine"):
        run(chained_async([], lambda message: length_async(message)))
