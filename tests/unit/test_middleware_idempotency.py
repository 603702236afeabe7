"""Idempotent middleware: what stands behind it runs once, in chains without a consumer."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.conditions import LIMIT_S

import oncely
from oncely.core.errors import BusyError, MessageError
from oncely.core.message import Message
from oncely.core.record import Key, State
from oncely.ledger import Ledger
from oncely.middleware import CallNext, Idempotent
from oncely.middleware.chain import chained, chained_async

MESSAGE = Message("abc-123", b"{}")
KEY = Key("billing", "abc-123")

Run = Callable[..., Any]
Handler = Callable[[Message], Any]


def run_sync(middleware: Idempotent, handler: Handler, message: Message = MESSAGE) -> Any:
    """What a delivery comes to."""
    return chained([middleware], handler)(message)


def run_async(middleware: Idempotent, handler: Handler, message: Message = MESSAGE) -> Any:
    """The same with the handler made async."""

    async def handle(message: Message) -> Any:
        await asyncio.sleep(0)
        return handler(message)

    async def main() -> Any:
        async with asyncio.timeout(LIMIT_S):
            return await chained_async([middleware], handle)(message)

    return asyncio.run(main())


def run_mixed(middleware: Idempotent, handler: Handler, message: Message = MESSAGE) -> Any:
    """The same with other async middleware, and a handler that runs in a thread."""

    async def pass_on(message: Message, call_next: CallNext) -> Any:
        return await call_next(message)

    async def main() -> Any:
        async with asyncio.timeout(LIMIT_S):
            return await chained_async([pass_on, middleware], handler)(message)

    return asyncio.run(main())


@pytest.fixture(params=[run_sync, run_async, run_mixed], ids=["sync", "async", "mixed"])
def run(request: pytest.FixtureRequest) -> Run:
    """All ways."""
    way: Run = request.param
    return way


@pytest.fixture
def ran() -> list[str]:
    """The ids of the messages whose handler ran."""
    return []


@pytest.fixture
def handler(ran: list[str]) -> Handler:
    """A handler whose results tell them apart."""

    def handle(message: Message) -> str:
        ran.append(message.id)
        return f"receipt {len(ran)}"

    return handle


def test_runs_once(run: Run, ledger: Ledger, handler: Handler, ran: list[str]) -> None:
    """The first delivery runs the handler and is completed; a duplicate runs nothing behind."""
    idempotent = Idempotent(ledger, "billing")
    assert run(idempotent, handler) == "receipt 1"
    assert run(idempotent, handler) is None
    assert ran == ["abc-123"]
    record = ledger.find(KEY)
    assert record is not None
    assert record.state is State.COMPLETED


def test_failure_is_recorded(run: Run, ledger: Ledger, handler: Handler) -> None:
    """An error is recorded and raised as it was; the next delivery tries again."""
    error = ValueError("no funds")

    def fail(message: Message) -> None:
        raise error

    idempotent = Idempotent(ledger, "billing")
    with pytest.raises(ValueError, match="no funds") as raised:
        run(idempotent, fail)
    assert raised.value is error
    record = ledger.find(KEY)
    assert record is not None
    assert (record.state, record.error) == (State.FAILED, "ValueError: no funds")
    assert run(idempotent, handler) == "receipt 1"


def test_refusals(run: Run, ledger: Ledger, handler: Handler, ran: list[str]) -> None:
    """What the ledger does not grant is raised, and does not run."""
    ledger.claim(KEY)
    idempotent = Idempotent(ledger, "billing")
    with pytest.raises(BusyError):
        run(idempotent, handler)
    with pytest.raises(MessageError, match="id"):
        run(idempotent, handler, Message(""))
    assert ran == []


@pytest.mark.parametrize(
    "metadata",
    [{"region": "abc-123"}, lambda message: {"region": message.id}],
    ids=["mapping", "function"],
)
def test_metadata(run: Run, ledger: Ledger, handler: Handler, metadata: Any) -> None:
    """Metadata, or what a function of the message gives, is kept with the record."""
    run(Idempotent(ledger, "billing", metadata=metadata), handler)
    record = ledger.find(KEY)
    assert record is not None
    assert record.metadata == {"region": "abc-123"}


def test_steps_inside(run: Run, ledger: Ledger) -> None:
    """The handler can ask under which claim it runs, in a thread and in a task."""

    def handler(message: Message) -> str:
        return oncely.current().claim.key.consumer

    assert run(Idempotent(ledger, "billing"), handler) == "billing"
