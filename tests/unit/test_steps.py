# ruff: noqa: PT012 - what raises is the block of `claimed`.
"""Steps and messages sent inside a handler: what runs once, what is kept, what leaves."""

import asyncio
from inspect import CORO_CLOSED, getcoroutinestate
from typing import Any

import pytest
from tests.records import granted, record_of
from tests.unit.conftest import Deliver

from oncely.core.control import Reject
from oncely.core.errors import FencedError, MessageError
from oncely.core.message import Message
from oncely.core.record import Key, State
from oncely.core.verdicts import DeadLetter
from oncely.ledger.ledger import Ledger
from oncely.lifecycle.work import claimed
from oncely.once import once
from oncely.testing import ManualClock

MESSAGE = Message("abc-123", b'{"amount": 10}')


class Bank:
    """An outside service that counts what it is asked for."""

    def __init__(self) -> None:
        self.debits: list[Any] = []

    def debit(self, amount: int) -> dict[str, Any]:
        """Take the money."""
        self.debits.append(amount)
        return {"receipt": len(self.debits), "lines": (amount,)}


@pytest.fixture
def bank() -> Bank:
    return Bank()


@pytest.mark.parametrize("use", ["once", "claimed"])
def test_step_that_is_not_awaited(ledger: Ledger, bank: Bank, key: Key, use: str) -> None:
    """The handler has failed: its step has not run."""

    async def debit(amount: int) -> None:
        bank.debit(amount)

    @once(ledger, consumer="billing", key=lambda m: m.id)
    async def handle(message: Message) -> None:
        message.step("debit", debit, 10)

    async def block() -> None:
        async with claimed(ledger, key) as work:
            work.processing.step("debit", debit, 10)

    with pytest.raises(MessageError, match=r"'debit' was not awaited.*`await message.step\(\.\.\."):
        asyncio.run(handle(MESSAGE) if use == "once" else block())
    assert (record_of(ledger, key).state, bank.debits) == (State.FAILED, [])


@pytest.mark.parametrize("is_async", [True, False])
def test_step_that_is_not_awaited_in_a_consumer(
    deliver: Deliver, bank: Bank, is_async: bool
) -> None:
    """It is a mistake of the handler, async or not: the message is set aside with that reason."""

    async def debit() -> None:
        bank.debit(10)

    def handle(message: Message) -> None:
        message.step("debit", debit)

    async def handle_async(message: Message) -> None:
        message.step("debit", debit)

    verdict = deliver(handle_async if is_async else handle)
    assert isinstance(verdict, DeadLetter)
    assert "'debit' was not awaited" in verdict.reason
    assert bank.debits == []


@pytest.mark.parametrize("use", ["once", "consumer"])
def test_step_that_is_not_awaited_beside_an_error(
    ledger: Ledger, deliver: Deliver, bank: Bank, use: str
) -> None:
    """The error is what it was, and Python warns of nothing."""
    made: list[Any] = []

    async def debit() -> None:
        bank.debit(10)

    async def handle(message: Message) -> None:
        made.append(message.step("debit", debit))
        raise Reject("too late")

    if use == "once":
        with pytest.raises(Reject, match="too late"):
            asyncio.run(once(ledger, consumer="billing", key=lambda m: m.id)(handle)(MESSAGE))
    else:
        assert deliver(handle, MESSAGE) == DeadLetter("Reject: too late")
    assert [getcoroutinestate(each) for each in made] == [CORO_CLOSED]
    assert bank.debits == []


# ---- Steps -------------------------------------------------------------------------------------


def test_retry_passes_over_finished_steps(ledger: Ledger, bank: Bank, key: Key) -> None:
    """A step that was finished does not run again: a retry is given its result, as JSON has it."""
    receipts = []

    @once(ledger, consumer="billing", key=lambda m: m.id)
    def handle(message: Message) -> None:
        receipts.append(message.step("debit", bank.debit, message.get("amount")))
        if len(receipts) == 1:
            raise OSError("the log cannot be written")

    with pytest.raises(OSError, match="the log"):
        handle(MESSAGE)
    handle(MESSAGE)
    assert bank.debits == [10]
    assert receipts == [{"receipt": 1, "lines": [10]}] * 2
    assert ledger.steps(key) == {"debit": {"receipt": 1, "lines": [10]}}


def test_async_steps(ledger: Ledger, bank: Bank) -> None:
    """Steps of coroutines are awaited; those that are not async may stand among them."""
    failures = iter([True, False])

    async def debit(amount: int) -> int:
        await asyncio.sleep(0)
        bank.debit(amount)
        return amount

    @once(ledger, consumer="billing", key=lambda m: m.id, keep_result=True)
    async def handle(message: Message) -> tuple[int, str]:
        amount = await message.step("debit", debit, 10)
        note = message.step("note", lambda: "noted")
        if next(failures):
            raise OSError("the log cannot be written")
        return amount, note

    with pytest.raises(OSError, match="the log"):
        asyncio.run(handle(MESSAGE))
    assert asyncio.run(handle(MESSAGE)) == (10, "noted")
    assert bank.debits == [10]


def test_step_without_a_result(ledger: Ledger) -> None:
    """A step that gives None is finished all the same."""
    runs: list[int] = []

    @once(ledger, consumer="billing", key=lambda m: m.id)
    def handle(message: Message) -> None:
        for _ in range(2):
            assert message.step("note", runs.append, 1) is None
        raise OSError

    for _ in range(2):
        with pytest.raises(OSError, match=r"^$"):
            handle(MESSAGE)
    assert runs == [1]


def test_step_of_a_zombie(ledger: Ledger, rival: Ledger, clock: ManualClock, key: Key) -> None:
    """Whoever lost the claim keeps no step: FencedError, and the successor's steps are its own."""
    with pytest.raises(FencedError), claimed(ledger, key, lease="60s") as work:
        clock.advance(61)
        successor = granted(rival.claim(key, "60s"))
        work.processing.step("debit", lambda: "by the zombie")
    assert rival.steps(key) == {}
    rival.keep_step(successor, "debit", "by the successor")
    assert rival.steps(key) == {"debit": "by the successor"}


@pytest.mark.parametrize("name", ["", "  ", "a\0", "x" * 256, None, 7])
def test_step_with_a_bad_name(ledger: Ledger, key: Key, name: Any) -> None:
    """A name that cannot be kept is refused before the step runs."""
    with pytest.raises(MessageError, match="step name"), claimed(ledger, key) as work:
        work.processing.step(name, pytest.fail)


def test_step_that_gives_an_awaitable(ledger: Ledger, key: Key) -> None:
    """A function that only makes a coroutine is a mistake, which is told."""

    async def debit() -> None: ...

    with (
        pytest.raises(MessageError, match="pass the async function itself"),
        claimed(ledger, key) as work,
    ):
        work.processing.step("debit", lambda: debit())


def test_keys_for_outside_services(ledger: Ledger, key: Key) -> None:
    """The same in every attempt; different for each step, message and consumer."""
    seen = []
    for of in (key, key, Key(key.consumer, "other"), Key("other", key.message_id)):
        with pytest.raises(OSError, match="again"), claimed(ledger, of) as work:
            processing = work.processing
            seen.append((processing.idempotency_key, processing.step_key("debit")))
            raise OSError("again")
    assert seen[0] == seen[1]
    assert len({name for names in seen for name in names}) == 6


# ---- Messages sent -----------------------------------------------------------------------------


def test_nothing_leaves_before_success(ledger: Ledger, key: Key) -> None:
    """What a failed handler sent is not there; what a successful one sent waits, in order."""
    failures = iter([True, False])

    @once(ledger, consumer="billing", key=lambda m: m.id, keep_result=True)
    def handle(message: Message) -> str:
        message.send("bank", {"amount": 10}, delay="5s")
        message.send("post", "a letter")
        if next(failures):
            raise OSError("the log cannot be written")
        return "charged"

    with pytest.raises(OSError, match="the log"):
        handle(MESSAGE)
    assert ledger.mailbox.deferred(key) == []
    assert handle(MESSAGE) == "charged"
    bank, post = ledger.mailbox.deferred(key)
    assert (bank.destination, bank.message.body, bank.delay_s) == ("bank", b'{"amount": 10}', 5.0)
    assert (post.destination, post.message.body, post.position) == ("post", b"a letter", 1)
    record = record_of(ledger, key)
    assert (record.state, record.result) == (State.HANDLED, "charged")
    assert handle(MESSAGE) == "charged"


def test_ids_of_what_is_sent(ledger: Ledger, key: Key) -> None:
    """The id is the same in every attempt, and tells position, message and consumer apart."""

    def sent(of: Key) -> tuple[str, str]:
        with pytest.raises(OSError, match="again"), claimed(ledger, of) as work:
            ids = work.processing.send("a", b""), work.processing.send("b", b"")
            raise OSError("again")
        return ids

    first = sent(key)
    assert sent(key) == first
    others = sent(Key("other", key.message_id)) + sent(Key(key.consumer, "other"))
    assert len({*first, *others}) == 6


def test_message_keeps_its_id(ledger: Ledger, key: Key) -> None:
    """A Message that is sent keeps its own id; to two destinations it is sent twice."""
    with claimed(ledger, key) as work:
        for destination in ("a", "b"):
            assert work.processing.send(destination, Message("own", b"x", key="k")) == "own"
    assert [(d.id, d.destination, d.message.key) for d in ledger.mailbox.deferred(key)] == [
        ("own", "a", "k"),
        ("own", "b", "k"),
    ]


@pytest.mark.parametrize(
    ("destination", "content"),
    [
        ("", b""),
        ("a\0", b""),
        ("exchange:shop", b""),
        ("a", object()),
        ("a", "\ud800"),
        ("a", Message("")),
    ],
)
def test_bad_sends(ledger: Ledger, key: Key, destination: str, content: Any) -> None:
    """What cannot be sent is an error in the handler, not later."""
    with pytest.raises(MessageError), claimed(ledger, key) as work:
        work.processing.send(destination, content)


def test_limit_of_one_handler(ledger: Ledger, key: Key) -> None:
    """A handler that sends without end is stopped, and nothing of it is kept."""
    with pytest.raises(MessageError, match="10,000"), claimed(ledger, key) as work:
        for _ in range(10_001):
            work.processing.send("a", b"")
    assert ledger.mailbox.deferred(key) == []
