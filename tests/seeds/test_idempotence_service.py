"""The idempotence service: what it answers before a handler, and what it keeps until after."""

import os
import signal
import threading
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, text
from tests.conditions import wait_until
from tests.logs import events_in
from tests.meddling import MeddlingStore, away
from tests.records import record_of
from tests.seeds.conftest import OpenLedger, in_memory, on_a_server_too, open_real, orders_in

from oncely._util.signals import told_to_stop
from oncely.core.errors import FencedError, MessageError, RefusedError, StoreUnavailable
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.record import Key, State
from oncely.ledger.ledger import Ledger
from oncely.lifecycle import handler_context
from oncely.service import IdempotenceService, ProcessingStatus
from oncely.stores.memory_store import MemoryStore
from oncely.testing import ManualClock

_CONSUMER = "inbox-work"

MESSAGE = Message("order-1", b'{"amount": 10}')
INVOICE = Message("invoice-1", b"{}")
RECEIPT = Message("receipt-1", b"{}")
_KEY = Key(_CONSUMER, MESSAGE.id)

ASSIGNED, IGNORE = ProcessingStatus.ASSIGNED, ProcessingStatus.IGNORE
MESSAGE_HANDLED = ProcessingStatus.MESSAGE_HANDLED


@pytest.fixture
def service(ledger: Ledger) -> IdempotenceService:
    """The service of one worker."""
    return IdempotenceService(ledger, _CONSUMER)


@pytest.fixture
def other(another_ledger: OpenLedger) -> IdempotenceService:
    """The same service in another worker."""
    return IdempotenceService(another_ledger(), _CONSUMER)


def sent_by(service: IdempotenceService) -> list[str]:
    """Send all that the message deferred, as a bus does; the ids and destinations sent."""
    sent = []
    for deferred in service.get_deferred_messages(MESSAGE):
        sent.append(f"{deferred.id} to {deferred.destination}")
        service.deferred_message_sent(MESSAGE, deferred)
    return sent


# ---- The status of a delivery ------------------------------------------------------------------


def test_each_status(
    service: IdempotenceService, other: IdempotenceService, ledger: Ledger
) -> None:
    """The first delivery is assigned. Meanwhile others are ignored as busy; what is handled needs
    no handler any more, what is completed is ignored and may be acknowledged: here and elsewhere.
    """
    assert service.processing_status(MESSAGE) is ASSIGNED
    assert service.reason(MESSAGE) is None
    assert _state(ledger) is State.PROCESSING
    for each in (service, other):
        assert each.processing_status(MESSAGE) is IGNORE
        assert each.reason(MESSAGE) == "busy"
    service.message_handled(MESSAGE)
    for each in (other, service):
        assert each.processing_status(MESSAGE) is MESSAGE_HANDLED
        assert each.reason(MESSAGE) is None
    assert service.get_deferred_messages(MESSAGE) == []
    service.processing_completed(MESSAGE)
    for each in (service, other):
        assert each.processing_status(MESSAGE) is IGNORE
        assert each.reason(MESSAGE) == "completed"


@in_memory
def test_busy_here_even_without_a_lease(ledger: Ledger, clock: ManualClock) -> None:
    """While its handler runs here, a message is not run a second time beside it by this worker."""
    service = IdempotenceService(ledger, _CONSUMER, lease="60s")
    service.processing_status(MESSAGE)
    clock.advance(61)
    assert service.processing_status(MESSAGE) is IGNORE
    assert service.reason(MESSAGE) == "busy"
    service.message_handled(MESSAGE)


def test_two_subscribers_do_not_block_each_other(ledger: Ledger) -> None:
    """One id for two consumers is two messages: each has its own handler and its own deferred."""
    mail, billing = (IdempotenceService(ledger, name) for name in ("mail", "billing"))
    assert mail.processing_status(MESSAGE) is ASSIGNED
    assert billing.processing_status(MESSAGE) is ASSIGNED
    mail.add_deferred_message(MESSAGE, INVOICE, "archive")
    mail.message_handled(MESSAGE)
    billing.message_handled(MESSAGE)
    assert billing.get_deferred_messages(MESSAGE) == []
    [deferred] = mail.get_deferred_messages(MESSAGE)
    with pytest.raises(RefusedError, match="was not deferred by"):
        billing.deferred_message_sent(MESSAGE, deferred)


def test_start_of_a_node_keeps_the_claims_of_others(
    service: IdempotenceService, another_ledger: OpenLedger
) -> None:
    """A worker that starts, migrates and ends leaves the claims of the others alone."""
    service.processing_status(MESSAGE)
    starting = another_ledger()
    starting.migrate()
    assert IdempotenceService(starting, _CONSUMER).processing_status(MESSAGE) is IGNORE
    starting.close()
    service.message_handled(MESSAGE)


def test_ignore_another_payload(service: IdempotenceService, other: IdempotenceService) -> None:
    """The same id with another body is never taken for a repetition."""
    service.processing_status(MESSAGE)
    service.processing_completed(MESSAGE)
    changed = replace(MESSAGE, body=b'{"amount": 1000}')
    assert other.processing_status(changed) is IGNORE
    assert other.reason(changed) == "mismatch"
    assert other.processing_status(MESSAGE) is IGNORE
    assert other.reason(MESSAGE) == "completed"


# ---- Messages that the ledger cannot know ------------------------------------------------------


@in_memory
def test_missing_id_told_by_content(ledger: Ledger) -> None:
    """A message without an id is an error; where the policy says so, it is known by its content."""
    with pytest.raises(MessageError, match="empty id"):
        IdempotenceService(ledger, _CONSUMER).processing_status(Message(""))
    service = IdempotenceService(ledger, _CONSUMER, policy=Policy(on_missing_id="fingerprint"))
    assert service.processing_status(Message("", b"one")) is ASSIGNED
    assert service.processing_status(Message("", b"two")) is ASSIGNED
    service.processing_completed(Message("", b"one"))
    assert service.processing_status(Message("", b"one")) is IGNORE
    assert service.reason(Message("", b"one")) == "completed"


@in_memory
def test_missing_id_untracked(ledger: Ledger) -> None:
    """Where the policy says so, what has no id runs each time, and cannot defer anything."""
    service = IdempotenceService(ledger, _CONSUMER, policy=Policy(on_missing_id="untracked"))
    nameless = Message("", b"one")
    for _ in range(2):
        assert service.processing_status(nameless) is ASSIGNED
        with pytest.raises(RefusedError, match="send it at once"):
            service.add_deferred_message(nameless, INVOICE, "archive")
        service.message_handled(nameless)
        assert service.get_deferred_messages(nameless) == []
        service.processing_completed(nameless)
        assert service.reason(nameless) is None
    assert ledger.counts() == {}


def test_untracked_while_the_store_is_away(caplog: pytest.LogCaptureFixture) -> None:
    """Where the policy says so, a message runs unasked then, and is not looked for afterwards."""
    store = MeddlingStore(MemoryStore())
    ledger = Ledger(store)
    store.meddle = away
    cautious = IdempotenceService(ledger, _CONSUMER)
    with pytest.raises(StoreUnavailable):
        cautious.processing_status(MESSAGE)
    service = IdempotenceService(ledger, _CONSUMER, policy=Policy(on_outage="run"))
    assert service.processing_status(MESSAGE) is ASSIGNED
    store.meddle = lambda: None
    with pytest.raises(RefusedError, match="send it at once"):
        service.add_deferred_message(MESSAGE, INVOICE)
    service.message_handled(MESSAGE)
    assert service.get_deferred_messages(MESSAGE) == []
    service.processing_completed(MESSAGE)
    assert ledger.counts() == {}
    assert events_in(caplog) == ["untracked"]
    assert service.processing_status(MESSAGE) is ASSIGNED
    service.processing_completed(MESSAGE)
    assert _state(ledger) is State.COMPLETED


@in_memory
def test_ignore_when_too_old(
    service: IdempotenceService, ledger: Ledger, clock: ManualClock
) -> None:
    """A message that the ledger may have forgotten may have run before: it does not run."""
    old = replace(MESSAGE, time=datetime.fromtimestamp(clock.now, UTC))
    service.processing_status(old)
    service.processing_completed(old)
    clock.advance(31 * 86_400)
    assert ledger.purge("30d") == 1
    assert service.processing_status(old) is IGNORE
    assert service.reason(old) == "too_old"


# ---- Deferred messages -------------------------------------------------------------------------


def test_deferred_in_the_order_of_sending(
    service: IdempotenceService, other: IdempotenceService
) -> None:
    """They are there from the moment they are added, and as soon as handled for other workers."""
    service.processing_status(MESSAGE)
    names = [f"deferred-{number}" for number in (3, 1, 2)]
    for name in names:
        service.add_deferred_message(MESSAGE, Message(name, name.encode()), "archive")
    assert [deferred.id for deferred in service.get_deferred_messages(MESSAGE)] == names
    assert other.get_deferred_messages(MESSAGE) == []
    service.message_handled(MESSAGE)
    for each in (service, other):
        found = each.get_deferred_messages(MESSAGE)
        assert [(deferred.id, deferred.destination) for deferred in found] == [
            (name, "archive") for name in names
        ]
        assert [deferred.message.body for deferred in found] == [name.encode() for name in names]


def test_what_is_sent_is_gone(service: IdempotenceService) -> None:
    """One message for two destinations is deferred twice, to one of them once however often it is
    said. Each is gone when it is sent, also where it was asked for before; to say that twice is not
    an error.
    """
    service.processing_status(MESSAGE)
    for destination in ("archive", "printer", "archive"):
        service.add_deferred_message(MESSAGE, INVOICE, destination)
    asked_before = service.get_deferred_messages(MESSAGE)
    service.message_handled(MESSAGE)
    found = service.get_deferred_messages(MESSAGE)
    assert [(each.id, each.destination) for each in found] == [
        (INVOICE.id, "archive"),
        (INVOICE.id, "printer"),
    ]
    for _ in range(2):
        service.deferred_message_sent(MESSAGE, asked_before[0])
        assert service.get_deferred_messages(MESSAGE) == found[1:]
    for _ in range(2):
        service.deferred_message_sent(MESSAGE, found[1])
        assert service.get_deferred_messages(MESSAGE) == []
    service.processing_completed(MESSAGE)


@in_memory
def test_what_is_deferred_too_late_or_sent_too_early(service: IdempotenceService) -> None:
    """What is deferred cannot be said to be sent while the handler runs. After it nothing can be
    deferred, which nobody would store.
    """
    service.processing_status(MESSAGE)
    service.add_deferred_message(MESSAGE, INVOICE)
    [deferred] = service.get_deferred_messages(MESSAGE)
    with pytest.raises(RefusedError, match="not handled yet"):
        service.deferred_message_sent(MESSAGE, deferred)
    service.message_handled(MESSAGE)
    with pytest.raises(RefusedError, match="send it at once"):
        service.add_deferred_message(MESSAGE, RECEIPT)


@in_memory
def test_deferred_messages_have_a_limit(
    service: IdempotenceService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One message cannot defer without end, nor what has no id."""
    monkeypatch.setattr("oncely.service.MOST_DEFERRED", 2)
    service.processing_status(MESSAGE)
    service.add_deferred_message(MESSAGE, INVOICE)
    service.add_deferred_message(MESSAGE, RECEIPT)
    with pytest.raises(MessageError, match="2 messages, and no more"):
        service.add_deferred_message(MESSAGE, Message("one-more"))
    with pytest.raises(MessageError, match="empty id"):
        service.add_deferred_message(MESSAGE, Message(""))
    assert handler_context.MOST_DEFERRED == 10_000


# ---- Completion --------------------------------------------------------------------------------


def test_not_completed_while_messages_wait(service: IdempotenceService, ledger: Ledger) -> None:
    """A message is completed when all that it deferred is sent, and not before. Who completes at
    once is told what waits; nothing is lost.
    """
    service.processing_status(MESSAGE)
    service.add_deferred_message(MESSAGE, INVOICE)
    service.add_deferred_message(MESSAGE, RECEIPT)
    for say in (lambda _: None, service.message_handled):
        say(MESSAGE)
        with pytest.raises(RefusedError, match="wait to be sent: 2"):
            service.processing_completed(MESSAGE)
        assert _state(ledger) is State.HANDLED
    assert sent_by(service) == ["invoice-1 to ", "receipt-1 to "]
    service.processing_completed(MESSAGE)
    assert _state(ledger) is State.COMPLETED


@in_memory
def test_saying_it_twice_is_no_error(service: IdempotenceService, ledger: Ledger) -> None:
    """Handled and completed may be said again, in any order: the first answer may be lost."""
    service.processing_status(MESSAGE)
    for _ in range(2):
        service.message_handled(MESSAGE)
    for _ in range(2):
        service.processing_completed(MESSAGE)
    service.message_handled(MESSAGE)
    assert _state(ledger) is State.COMPLETED


@in_memory
@pytest.mark.parametrize("state", ["unknown", "held by another", "failed"])
def test_what_is_not_ones_own_is_refused(
    service: IdempotenceService, other: IdempotenceService, ledger: Ledger, state: str
) -> None:
    """Nobody can end the processing of a message that was not assigned to them."""
    if state != "unknown":
        other.processing_status(MESSAGE)
    if state == "failed":
        other.processing_failed(MESSAGE, ValueError())
    before = ledger.find(_KEY)
    with pytest.raises(RefusedError, match="not being processed here"):
        service.message_handled(MESSAGE)
    with pytest.raises(RefusedError, match="cannot be completed: it is not handled"):
        service.processing_completed(MESSAGE)
    with pytest.raises(RefusedError, match="send it at once"):
        service.add_deferred_message(MESSAGE, INVOICE)
    assert service.processing_failed(MESSAGE, ValueError()) == timedelta(seconds=30)
    assert ledger.find(_KEY) == before


# ---- Failure -----------------------------------------------------------------------------------


def test_failed_handler_runs_again(
    service: IdempotenceService, other: IdempotenceService, ledger: Ledger
) -> None:
    """A failed handler leaves no claim behind: the retry is assigned, and not taken as done."""
    service.processing_status(MESSAGE)
    service.add_deferred_message(MESSAGE, INVOICE)
    assert service.processing_failed(MESSAGE, ValueError("no credit")) == timedelta(seconds=30)
    record = record_of(ledger, _KEY)
    assert (record.state, record.error) == (State.FAILED, "ValueError: no credit")
    assert other.processing_status(MESSAGE) is ASSIGNED
    other.message_handled(MESSAGE)
    assert other.get_deferred_messages(MESSAGE) == [], "of the failed handler"


@in_memory
def test_five_attempts_and_their_delays(service: IdempotenceService) -> None:
    """30 s, 2 min, 5 min, 5 min; after the fifth attempt it goes to the error queue."""
    delays = []
    for _ in range(5):
        assert service.processing_status(MESSAGE) is ASSIGNED
        delays.append(service.processing_failed(MESSAGE, ValueError("no credit")))
    assert delays == [*(timedelta(seconds=seconds) for seconds in (30, 120, 300, 300)), None]
    assert service.processing_status(MESSAGE) is IGNORE
    assert service.reason(MESSAGE) == "exhausted"


@in_memory
def test_stopped_handler_has_not_failed(service: IdempotenceService, ledger: Ledger) -> None:
    """A handler stopped by a shutdown gives its claim back, and no attempt is counted."""
    service.processing_status(MESSAGE)
    with told_to_stop():
        os.kill(os.getpid(), signal.SIGTERM)
        assert service.processing_failed(MESSAGE, KeyboardInterrupt()) == timedelta(seconds=1)
    assert ledger.counts() == {}
    assert service.processing_status(MESSAGE) is ASSIGNED


# ---- Crashes -----------------------------------------------------------------------------------


def test_crash_in_the_handler_is_in_doubt(
    ledger: Ledger, other: IdempotenceService, clock: ManualClock
) -> None:
    """After a crash the lease runs out; then the policy decides, and a late worker is fenced."""
    crashed = IdempotenceService(ledger, _CONSUMER, lease="60s")
    crashed.processing_status(MESSAGE)
    crashed.add_deferred_message(MESSAGE, INVOICE)
    clock.advance(59)
    assert other.processing_status(MESSAGE) is IGNORE
    clock.advance(2)
    assert other.processing_status(MESSAGE) is ASSIGNED
    with pytest.raises(FencedError):
        crashed.message_handled(MESSAGE)
    other.message_handled(MESSAGE)
    assert other.get_deferred_messages(MESSAGE) == [], "of the one that was fenced"


@in_memory
@pytest.mark.parametrize(
    ("policy", "status", "reason"),
    [
        (
            Policy(on_in_doubt=lambda asked: "happened" if asked == MESSAGE else "unknown"),
            IGNORE,
            "completed",
        ),
        (Policy(on_in_doubt="hold"), IGNORE, "in_doubt"),
    ],
)
def test_what_is_in_doubt_is_decided_by_the_policy(
    ledger: Ledger,
    another_ledger: OpenLedger,
    clock: ManualClock,
    policy: Policy,
    status: ProcessingStatus,
    reason: str,
) -> None:
    """A probe is asked with the message, and what it finds out counts; where there is none, and
    doubts are held, nothing runs until somebody has looked.
    """
    IdempotenceService(ledger, _CONSUMER, lease="60s").processing_status(MESSAGE)
    clock.advance(61)
    service = IdempotenceService(another_ledger(), _CONSUMER, policy=policy)
    assert (service.processing_status(MESSAGE), service.reason(MESSAGE)) == (status, reason)


@pytest.mark.parametrize("is_told", [False, True])
def test_crash_while_sending_sends_the_rest(
    service: IdempotenceService, other: IdempotenceService, is_told: bool
) -> None:
    """The handled state is reached: after a crash, or an error of the broker, another worker sends
    what is left, and only that.
    """
    service.processing_status(MESSAGE)
    for deferred in (INVOICE, RECEIPT):
        service.add_deferred_message(MESSAGE, deferred, "archive")
    service.message_handled(MESSAGE)
    first, _ = service.get_deferred_messages(MESSAGE)
    service.deferred_message_sent(MESSAGE, first)
    if is_told:
        assert service.processing_failed(MESSAGE, ConnectionError()) == timedelta(seconds=30)
    assert other.processing_status(MESSAGE) is MESSAGE_HANDLED
    assert sent_by(other) == ["receipt-1 to archive"]
    other.processing_completed(MESSAGE)
    assert other.processing_status(MESSAGE) is IGNORE


# ---- In the caller's transaction ---------------------------------------------------------------


@on_a_server_too
def test_all_is_stored_together(ledger: Ledger, engine: Engine) -> None:
    """The claim, the handler's own writes and what it deferred commit in one transaction."""
    beating = _heartbeats()
    with engine.begin() as connection, ledger.transaction(connection) as inbox:
        transaction = IdempotenceService(inbox, _CONSUMER)
        assert transaction.processing_status(MESSAGE) is ASSIGNED
        assert _heartbeats() <= beating, "nobody else sees this claim to extend it"
        connection.execute(text("INSERT INTO orders (id) VALUES ('order-1')"))
        transaction.add_deferred_message(MESSAGE, INVOICE, "archive")
        transaction.message_handled(MESSAGE)
    service = IdempotenceService(ledger, _CONSUMER)
    assert sent_by(service) == ["invoice-1 to archive"]
    service.processing_completed(MESSAGE)
    assert orders_in(engine) == ["order-1"]
    assert service.processing_status(MESSAGE) is IGNORE


def _heartbeats() -> int:
    return sum(thread.name == "oncely-heartbeat" for thread in threading.enumerate())


# ---- The lease ---------------------------------------------------------------------------------


def test_lease_is_extended_while_the_handler_runs(url: str) -> None:
    """A handler that takes longer than its lease keeps its claim until it ends."""
    with closing(open_real(url)) as ledger:
        service = IdempotenceService(ledger, _CONSUMER, lease="1s")
        service.processing_status(MESSAGE)
        first = record_of(ledger, _KEY).lease_until
        wait_until(lambda: record_of(ledger, _KEY).lease_until != first)
        service.message_handled(MESSAGE)


def _state(ledger: Ledger) -> State:
    return record_of(ledger, _KEY).state


def test_claims_of_a_service_that_is_gone_run_out(ledger: Ledger, clock: ManualClock) -> None:
    """Nobody extends what a service held that is no more: the next one is assigned the message."""
    service = IdempotenceService(ledger, _CONSUMER, lease="60s")
    assert service.processing_status(MESSAGE) is ProcessingStatus.ASSIGNED
    heartbeat = service._lifecycle.heartbeat
    claim = service._assigned[_KEY].claim
    del service
    assert not heartbeat.is_good(claim)
    clock.advance(61)
    successor = IdempotenceService(ledger, _CONSUMER, lease="60s")
    assert successor.processing_status(MESSAGE) is ProcessingStatus.ASSIGNED
