"""Delivering: what becomes of a delivery, whatever its handler and its ledger do."""

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine

from oncely.core.control import Reject, Retry, Unrecoverable
from oncely.core.errors import (
    BusyError,
    ConfigError,
    DuplicateError,
    FencedError,
    MessageError,
    MismatchError,
    OncelyError,
    StoreError,
    StoreUnavailable,
)
from oncely.core.message import Message
from oncely.core.policy import Policy, at_most_once
from oncely.core.record import Key, Record, State
from oncely.handling.around import Handling
from oncely.ledger import Ledger, open_ledger
from oncely.runtime.delivering import Delivering
from oncely.testing import ManualClock, MeddlingStore, granted
from oncely.transports.base import Ack, DeadLetter, Delay, Delivery, Verdict
from oncely.transports.opening import open_transport

Handler = Callable[..., Any]
Deliver = Callable[..., Verdict]

KEY = Key("billing", "1")
MESSAGE = Message("1", b"{}")
AGAIN = Delay(1.0)
"""What could not be handled through no fault of its own."""
BACKOFF = Delay(30.0)
"""What has failed for the first time, as a policy has it by default."""


def delivering(ledger: Ledger, handler: Handler, policy: Policy, **options: Any) -> Delivering:
    """Whatever brings messages of a queue in memory to `handler`."""
    return Delivering(
        transport=open_transport("memory://delivering"),
        queue="in",
        handling=Handling.under(ledger, "billing", policy),
        handler=handler,
        **options,
    )


def delivery(message: Message = MESSAGE, count: int = 1) -> Delivery:
    """An arrival of `message`, the so-manyth."""
    return Delivery(message, "in", count, None)


@pytest.fixture
def deliver(ledger: Ledger) -> Deliver:
    """Delivers one message to a handler, with a ledger in memory; gives the verdict."""

    def once(
        handler: Handler, message: Message = MESSAGE, policy: Policy = Policy(), count: int = 1
    ) -> Verdict:
        return delivering(ledger, handler, policy).deliver(delivery(message, count))

    return once


def raising(error: BaseException) -> Handler:
    """A handler that raises."""

    def handle(*_: Any) -> None:
        raise error

    return handle


def never(*_: Any) -> None:
    """A handler that is not to run."""
    pytest.fail("the handler ran")


def nothing(*_: Any) -> None:
    """A handler with nothing to do."""


def away(*_: Any) -> Any:
    """What a store does that cannot be reached."""
    raise StoreUnavailable("the store is away")


class Outage:
    """Between `begin` and `end` the store can neither be written nor read."""

    def __init__(self, store: MeddlingStore, patched: pytest.MonkeyPatch) -> None:
        self._store = store
        self._patched = patched

    def begin(self) -> None:
        self._patched.setattr(self._store, "meddle", away)
        self._patched.setattr(self._store, "load", away)

    def end(self) -> None:
        self._patched.undo()


@pytest.fixture
def outage(meddling: MeddlingStore, monkeypatch: pytest.MonkeyPatch) -> Outage:
    """Of the ledger in memory; it has not begun."""
    return Outage(meddling, monkeypatch)


def found(ledger: Ledger) -> Record:
    """The record of the message."""
    record = ledger.find(KEY)
    assert record is not None
    return record


# ---- Handled -----------------------------------------------------------------------------------


def test_handled_is_acknowledged(deliver: Deliver, ledger: Ledger) -> None:
    """What is handled is acknowledged, as its duplicates are, for which nothing runs."""
    assert deliver(nothing) == Ack()
    assert found(ledger).state is State.COMPLETED
    assert deliver(never) == Ack()


# ---- Not granted -------------------------------------------------------------------------------


def test_busy_comes_again_soon(deliver: Deliver, ledger: Ledger) -> None:
    """What another worker has comes again; it is not this message's failure."""
    granted(ledger.claim(KEY))
    assert deliver(never) == AGAIN
    assert found(ledger).attempts == 1


def test_other_content_is_set_aside(deliver: Deliver) -> None:
    """The same id with another body goes to the dead letters, with that reason."""
    deliver(nothing)
    verdict = deliver(never, Message("1", b"other"))
    assert isinstance(verdict, DeadLetter)
    assert "MismatchError" in verdict.reason


def test_in_doubt_is_set_aside(deliver: Deliver, ledger: Ledger, clock: ManualClock) -> None:
    """What is in doubt, and held, is for people to look at."""
    granted(ledger.claim(KEY, "60s"))
    clock.advance(61)
    verdict = deliver(never, policy=Policy(on_in_doubt="hold"))
    assert isinstance(verdict, DeadLetter)
    assert "InDoubtError" in verdict.reason


def test_store_away_before(deliver: Deliver, outage: Outage) -> None:
    """While the store is away nothing runs, and the message comes again."""
    outage.begin()
    assert deliver(never) == AGAIN


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Message(""), "empty id"),
        (Message("x" * 256), "too long id"),
        (Message("1", "text"), "body is not bytes"),  # type: ignore[arg-type]
        (Message("1", headers={"a": 1}), "a header is not text"),  # type: ignore[dict-item]
    ],
)
def test_unusable_is_set_aside(deliver: Deliver, message: Message, reason: str) -> None:
    """What no handler can be given is set aside, with the reason."""
    assert deliver(never, message) == DeadLetter(f"MessageError: {reason}")


# ---- Failures ----------------------------------------------------------------------------------

OUR_OWN: list[OncelyError] = [
    BusyError("another"),
    MismatchError("another"),
    DuplicateError("another"),
    MessageError("another"),
    FencedError("another"),
    StoreError("another"),
    ConfigError("another"),
]


@pytest.mark.parametrize("error", [ValueError("no"), *OUR_OWN], ids=lambda e: type(e).__name__)
def test_failures_are_the_handlers_own(deliver: Deliver, ledger: Ledger, error: Exception) -> None:
    """Whatever a handler raises is a failure of its message, with its backoff and its tries.

    So are the errors of another call that it made, which say nothing about this message.
    """
    policy = Policy(tries=2)
    assert deliver(raising(error), policy=policy) == BACKOFF
    assert (found(ledger).state, found(ledger).attempts) == (State.FAILED, 1)
    verdict = deliver(raising(error), policy=policy)
    assert isinstance(verdict, DeadLetter)
    assert type(error).__name__ in verdict.reason
    assert found(ledger).exhausted


def test_exhausted_is_set_aside(deliver: Deliver) -> None:
    """What has failed for good, and comes once more, is set aside again."""
    policy = Policy(tries=1)
    deliver(raising(ValueError("no")), policy=policy)
    verdict = deliver(never, policy=policy)
    assert isinstance(verdict, DeadLetter)
    assert "ExhaustedError" in verdict.reason


def test_failed_is_skipped(deliver: Deliver) -> None:
    """Where an effect must never repeat, what failed comes once more, and is acknowledged."""
    assert deliver(raising(ValueError("no")), policy=at_most_once()) == BACKOFF
    assert deliver(never, policy=at_most_once()) == Ack()


@pytest.mark.parametrize("error", [Unrecoverable("no"), Reject("no")])
@pytest.mark.parametrize("message", [MESSAGE, Message("")], ids=["tracked", "untracked"])
def test_final_is_set_aside(deliver: Deliver, message: Message, error: Exception) -> None:
    """An error that says that no try can help sets the message aside at once."""
    policy = Policy(on_missing_id="untracked")
    assert isinstance(deliver(raising(error), message, policy), DeadLetter)


def test_retry_says_when(deliver: Deliver) -> None:
    """A handler may say when its message comes again; without a time it is the policy's."""
    assert deliver(raising(Retry(delay="7s"))) == Delay(7.0)
    assert deliver(raising(Retry())) == Delay(120.0)


def test_unfinished_work_has_failed(deliver: Deliver, ledger: Ledger) -> None:
    """An async handler, which nobody awaits here, is not taken for one that has run."""

    async def handle(message: Message) -> None:
        pytest.fail("it ran")

    assert deliver(handle) == BACKOFF
    assert "whose work is not done" in str(found(ledger).error)


def test_result_that_is_no_json(deliver: Deliver) -> None:
    """A result that cannot be kept is a failure of the message."""
    policy = Policy(results="keep", tries=2)
    assert deliver(lambda _: object(), policy=policy) == BACKOFF
    assert isinstance(deliver(lambda _: object(), policy=policy), DeadLetter)


# ---- Untracked ---------------------------------------------------------------------------------


def test_untracked_failures_are_counted_by_the_broker(deliver: Deliver) -> None:
    """What the ledger does not know is set aside when it has come too often."""
    policy = Policy(on_missing_id="untracked", tries=3)
    verdicts = [
        deliver(raising(ValueError("no")), Message(""), policy, count) for count in (1, 2, 3)
    ]
    assert verdicts == [BACKOFF, Delay(120.0), DeadLetter("ValueError: no")]


def test_cannot_defer_while_the_store_is_away(deliver: Deliver, outage: Outage) -> None:
    """A handler that runs untracked, and would send, waits for the store; nothing is lost."""
    outage.begin()
    policy = Policy(on_outage="run", tries=1)
    assert deliver(lambda message: message.send("post", b""), policy=policy) == AGAIN
    outage.end()
    assert deliver(nothing, policy=policy) == Ack()


# ---- The end cannot be stored ------------------------------------------------------------------


def test_store_away_after(deliver: Deliver, outage: Outage, clock: ManualClock) -> None:
    """What has run is not acknowledged before the ledger knows that: else a duplicate would run."""

    def handle(_: Message) -> None:
        outage.begin()

    policy = Policy(on_in_doubt="hold")
    assert deliver(handle, policy=policy) == AGAIN
    outage.end()
    assert deliver(never, policy=policy) == AGAIN
    clock.advance(301)
    assert isinstance(deliver(never, policy=policy), DeadLetter)


def test_taken_over_comes_again(deliver: Deliver, rival: Ledger, clock: ManualClock) -> None:
    """What another worker took over while it ran comes again, to be seen as theirs."""

    def handle(_: Message) -> None:
        clock.advance(301)
        rival.complete(granted(rival.claim(KEY)))

    assert deliver(handle) == AGAIN
    assert deliver(never) == Ack()


def test_recording_fails(deliver: Deliver, outage: Outage) -> None:
    """A failure that cannot be recorded comes again when the store may be back."""

    def handle(_: Message) -> None:
        outage.begin()
        raise ValueError("no")

    assert deliver(handle) == AGAIN


# ---- In a transaction --------------------------------------------------------------------------


@pytest.fixture
def joined(tmp_path: Path) -> Iterator[tuple[Ledger, Deliver]]:
    """A ledger on a file, and what delivers to a handler in a transaction."""
    engine = create_engine(f"sqlite:///{tmp_path / 'ledger.db'}")
    with closing(open_ledger(engine)) as ledger:
        ledger.migrate()

        def once(handler: Handler) -> Verdict:
            return delivering(ledger, handler, Policy(tries=2), begins=engine).deliver(delivery())

        yield ledger, once
    engine.dispose()


def test_joined(joined: tuple[Ledger, Deliver]) -> None:
    """In a transaction: handled, and a duplicate."""
    _, deliver = joined
    assert deliver(nothing) == Ack()
    assert deliver(never) == Ack()


@pytest.mark.parametrize("error", OUR_OWN, ids=lambda e: type(e).__name__)
def test_joined_failures(joined: tuple[Ledger, Deliver], error: Exception) -> None:
    """In a transaction, too, a handler's errors are its own."""
    ledger, deliver = joined
    assert deliver(raising(error)) == BACKOFF
    assert isinstance(deliver(raising(error)), DeadLetter)
    assert found(ledger).exhausted


def test_joined_and_busy(joined: tuple[Ledger, Deliver]) -> None:
    """In a transaction, too, what another worker has comes again."""
    ledger, deliver = joined
    granted(ledger.claim(KEY))
    assert deliver(never) == AGAIN


def test_joined_and_committed_early(joined: tuple[Ledger, Deliver]) -> None:
    """A handler that commits its transaction itself has failed."""
    _, deliver = joined

    def handle(_: Message, connection: Connection) -> None:
        with suppress(OncelyError):
            connection.commit()

    assert deliver(handle) == BACKOFF
