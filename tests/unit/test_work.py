"""Work under a claim at its edges: what ends late, twice, elsewhere, or not at all."""
# ruff: noqa: PT012 - what raises is the block of `claimed`.

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest
from tests.conftest import OpenSqlite
from tests.meddling import MeddlingStore, away
from tests.records import granted

from oncely._util import clock as process_clock
from oncely.core.errors import ConfigError, FencedError, MessageError, StoreUnavailable
from oncely.core.message import Message, current
from oncely.core.policy import Finding, Policy
from oncely.core.record import Key, State
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.lifecycle.work import claimed
from oncely.once import once
from oncely.testing import ManualClock, at_once

OTHER = Key("billing", "other")


def state(ledger: Ledger, key: Key) -> State | None:
    """Where the message stands."""
    record = ledger.find(key)
    return None if record is None else record.state


# ---- What is too late --------------------------------------------------------------------------


def test_nothing_is_sent_after_the_end(ledger: Ledger, key: Key) -> None:
    """Who goes on when the handler has ended is told so: no step runs, nothing is dropped."""
    with claimed(ledger, key, lease="none") as work:
        processing = work.processing
    with pytest.raises(MessageError, match="has ended"):
        processing.send("bank", b"")
    with pytest.raises(MessageError, match="has ended"):
        processing.step("debit", pytest.fail)


def test_task_that_outlives_the_handler(ledger: Ledger, key: Key) -> None:
    """A task that was begun by a handler is outside of it when that has ended."""
    tasks = []

    async def late(ended: asyncio.Event) -> None:
        await ended.wait()
        with pytest.raises(MessageError, match="inside a function under `once`"):
            current()

    async def main() -> None:
        ended = asyncio.Event()
        async with claimed(ledger, key):
            tasks.append(asyncio.create_task(late(ended)))
        ended.set()
        await tasks[0]

    asyncio.run(main())


def test_sending_inside_a_step(ledger: Ledger, key: Key) -> None:
    """A retry would pass over the step and not send: it is refused, and the step not finished."""
    with pytest.raises(MessageError, match="send it after the step"), claimed(ledger, key) as work:
        work.processing.step("debit", lambda: current().send("bank", b""))
    assert ledger.steps(key) == {}


# ---- What comes twice --------------------------------------------------------------------------


def test_step_twice_at_once(ledger: Ledger, key: Key) -> None:
    """Of two tasks that begin the same step one runs it, the other is told."""
    runs: list[int] = []

    async def debit() -> None:
        runs.append(1)
        await asyncio.sleep(0)

    async def main() -> list[object]:
        async with claimed(ledger, key) as work:
            steps = (work.processing.step("debit", debit) for _ in range(2))
            return await asyncio.gather(*steps, return_exceptions=True)

    [error] = filter(None, asyncio.run(main()))
    assert str(error) == "step 'debit' is running already"
    assert runs == [1]


def test_steps_at_once(ledger: Ledger, key: Key) -> None:
    """Steps of other names run at the same time; each is kept, and has its result."""
    runs: list[str] = []

    async def run(name: str) -> str:
        runs.append(name)
        return name

    async def main() -> None:
        async with claimed(ledger, key) as work:
            for _ in range(2):
                steps = (work.processing.step(name, run, name) for name in "abc")
                assert await asyncio.gather(*steps) == ["a", "b", "c"]

    asyncio.run(main())
    assert sorted(runs) == ["a", "b", "c"]


def test_sends_of_many_threads(ledger: Ledger, key: Key) -> None:
    """Threads of one handler may send at once; nothing is lost."""
    with claimed(ledger, key) as work:
        send = work.processing.send
        at_once(8, lambda _: [send("bank", b"") for _ in range(200)])
    assert len(ledger.mailbox.deferred(key)) == 1_600


def test_one_id_with_two_contents(ledger: Ledger, key: Key) -> None:
    """A message sent twice is sent once; another one under its id is a mistake."""
    with claimed(ledger, key) as work:
        for _ in range(2):
            work.processing.send("bank", Message("own", b"1"))
    assert len(ledger.mailbox.deferred(key)) == 1
    with pytest.raises(MessageError, match="with other content"), claimed(ledger, OTHER) as work:
        for body in (b"1", b"2"):
            work.processing.send("bank", Message("own", body))


# ---- Whose message -----------------------------------------------------------------------------


def test_message_of_another_handler(ledger: Ledger) -> None:
    """Inside the handler of one message another one has no steps and sends nothing."""
    outer, inner = Message("outer"), Message("inner")

    @once(ledger, consumer="inner", key=lambda message: message.id)
    def handle_inner(message: Message) -> None:
        with pytest.raises(MessageError, match="'inner' is being processed here, and not 'outer'"):
            outer.send("bank", b"")

    @once(ledger, consumer="outer", key=lambda message: message.id)
    def handle_outer(message: Message) -> None:
        handle_inner(inner)
        message.send("bank", b"")

    handle_outer(outer)
    assert len(ledger.mailbox.deferred(Key("outer", "outer"))) == 1


# ---- Who leaves, and how -----------------------------------------------------------------------


def test_block_that_is_not_entered(ledger: Ledger, key: Key) -> None:
    """Without `with` nothing is claimed, and that is said before any work is done."""
    work = claimed(ledger, key)
    with pytest.raises(ConfigError, match="write `with claimed"):
        assert work.is_new


def test_generator_closed_elsewhere(ledger: Ledger, key: Key) -> None:
    """A claim is let go also where its block is left in another context than it was entered in."""

    async def handler() -> AsyncGenerator[None, None]:
        async with claimed(ledger, key):
            yield

    async def main() -> None:
        generator = handler()
        for step in (generator.__anext__, generator.aclose):
            await asyncio.create_task(_awaited(step))

    async def _awaited(step: Callable[[], Awaitable[None]]) -> None:
        await step()

    asyncio.run(main())
    assert state(ledger, key) is State.FAILED


def test_forked_child_leaves_the_claim_to_its_parent(open_sqlite: OpenSqlite, key: Key) -> None:
    """A child that ends inside the block gives nothing back."""
    ledger = Ledger(open_sqlite())
    try:
        with claimed(ledger, key):
            child = os.fork()
            if child == 0:
                raise SystemExit
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            assert state(ledger, key) is State.PROCESSING
    except SystemExit:
        os._exit(7)
    assert state(ledger, key) is State.COMPLETED


# ---- Stores that are away, or cannot -----------------------------------------------------------


@pytest.mark.usefixtures("hurried")
def test_end_that_cannot_be_stored(meddling: MeddlingStore, ledger: Ledger, key: Key) -> None:
    """The effect has happened: the block ends well, and says that the ledger does not know."""
    with claimed(ledger, key) as work:
        meddling.meddle = away
    assert not work.is_settled
    assert state(ledger, key) is State.PROCESSING


@pytest.mark.usefixtures("hurried")
def test_end_that_keeps_messages_from_being_sent(
    meddling: MeddlingStore, ledger: Ledger, key: Key
) -> None:
    """Where something was to be sent the caller hears of it: acknowledged it would be lost."""
    with pytest.raises(StoreUnavailable), claimed(ledger, key) as work:
        work.processing.send("bank", b"")
        meddling.meddle = away


def test_store_without_transactions(redis_url: str, key: Key) -> None:
    """In Redis a step is refused before it runs, and the claim ends as after any error."""
    ledger = open_ledger(redis_url)
    calls: list[Callable[[], object]] = [
        lambda: current().step("debit", pytest.fail),
        lambda: current().send("bank", b""),
    ]
    for call in calls:
        with (
            pytest.raises(ConfigError, match="keeps no steps and defers no messages"),
            claimed(ledger, key),
        ):
            call()
        assert state(ledger, key) is State.FAILED
    ledger.close()


def test_claim_is_not_held_without_a_heartbeat(
    ledger: Ledger, key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no thread can be started for its heartbeat, the claim is given back; the ledger can be
    closed.
    """

    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(RuntimeError, match="can't start"), claimed(ledger, key):
        pytest.fail("it ran")
    monkeypatch.undo()
    assert state(ledger, key) is None
    ledger.close()


# ---- Probes ------------------------------------------------------------------------------------


def test_finding_about_another_doubt(
    ledger: Ledger, rival: Ledger, clock: ManualClock, key: Key
) -> None:
    """While a probe was asked, another was granted the message, and died: its doubt is new."""
    granted(ledger.claim(key, "60s"))
    clock.advance(61)

    def probe(_: Message) -> Finding:
        granted(rival.claim(key, "60s"))
        clock.advance(61)
        return "not_happened"

    with (
        pytest.raises(Exception, match="in doubt"),
        claimed(ledger, key, policy=Policy(on_in_doubt=probe)),
    ):
        pytest.fail("it ran")


@pytest.mark.usefixtures("hurried")
def test_lease_counts_from_after_the_probe(ledger: Ledger, clock: ManualClock, key: Key) -> None:
    """A probe may take longer than a lease; what it lets run has all of its own."""
    granted(ledger.claim(key, "60s"))
    clock.advance(61)

    def probe(_: Message) -> Finding:
        process_clock.sleep(61)  # Longer than the lease below, which is what this is about.
        return "not_happened"

    with claimed(ledger, key, lease="60s", policy=Policy(on_in_doubt=probe)) as work:
        assert work.processing.step("debit", lambda: 1) == 1


@pytest.mark.usefixtures("hurried")
def test_step_is_not_begun_under_a_lost_claim(
    meddling: MeddlingStore, ledger: Ledger, key: Key
) -> None:
    """A worker whose lease may be over by its own clock begins no step."""
    with (
        pytest.raises(FencedError, match="may have run out"),
        claimed(ledger, key, lease="60s") as work,
    ):
        assert work.processing.step("first", lambda: 1) == 1
        meddling.meddle = away  # It cannot be extended any more.
        process_clock.sleep(61)  # Longer than the lease, which is what this is about.
        work.processing.step("debit", pytest.fail)
