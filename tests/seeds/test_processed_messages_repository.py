"""The repository of processed messages: one row a message and provider, begun once."""

import logging
from collections.abc import Callable, Collection

import pytest
from sqlalchemy import Engine, text
from tests.logs import events_in
from tests.records import granted, record_of
from tests.seeds.conftest import OpenLedger, in_memory, on_a_server_too, orders_in

from oncely.core.errors import ConfigError, MessageError, StoreError, StoreUnavailable
from oncely.core.policy import Policy
from oncely.core.record import Key, State
from oncely.ledger.ledger import Ledger
from oncely.repository import ProcessedMessageRepository
from oncely.stores.memory_store import MemoryStore
from oncely.stores.store import Loaded
from oncely.testing import ManualClock, at_once

_ID = "0b0e2f9e-8a0c-4c1b-9f57-3d1f7a0b6a11"
_PROVIDER = "sms-service"
_KEY = Key(_PROVIDER, _ID)
_DAY_S = 86_400.0


@pytest.fixture
def repository(ledger: Ledger) -> ProcessedMessageRepository:
    """The repository of one worker."""
    return ProcessedMessageRepository(ledger)


@pytest.fixture
def other(another_ledger: OpenLedger) -> ProcessedMessageRepository:
    """The same repository in another worker."""
    return ProcessedMessageRepository(another_ledger())


# ---- The flow ----------------------------------------------------------------------------------


def deliver(repository: ProcessedMessageRepository, handler: Callable[[], None]) -> str:
    """What the middleware does with a delivery; what came of it."""
    if repository.is_already_processed(_ID, _PROVIDER):
        return "already processed"
    if not repository.mark_processing(_ID, _PROVIDER, {"to": "+49"}):
        return "another is at it"
    try:
        handler()
    except Exception as error:
        repository.mark_failed(_ID, _PROVIDER, str(error))
        raise
    repository.mark_sent(_ID, _PROVIDER)
    return "sent"


def test_one_message_is_sent_once(
    repository: ProcessedMessageRepository, other: ProcessedMessageRepository, ledger: Ledger
) -> None:
    """The first delivery sends; every other is skipped, in any worker."""
    sent: list[str] = []
    outcomes = [deliver(each, lambda: sent.append("SMS")) for each in (repository, other, other)]
    assert outcomes == ["sent", "already processed", "already processed"]
    assert sent == ["SMS"]
    assert record_of(ledger, _KEY).state is State.COMPLETED


def test_a_retry_after_a_failure_is_skipped(
    repository: ProcessedMessageRepository, other: ProcessedMessageRepository, ledger: Ledger
) -> None:
    """The handler sent, and failed after that: its error is kept, and no retry sends again."""
    sent: list[str] = []

    def send_and_fail() -> None:
        sent.append("SMS")
        raise TimeoutError("the broker is away")

    with pytest.raises(TimeoutError):
        deliver(repository, send_and_fail)
    assert deliver(other, send_and_fail) == "already processed"
    assert sent == ["SMS"]
    record = record_of(ledger, _KEY)
    assert record.state is State.FAILED
    assert record.metadata == {"to": "+49", "error": "the broker is away"}


# ---- The calls ---------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["processing", "sent", "failed"])
def test_already_processed_in_any_state(repository: ProcessedMessageRepository, state: str) -> None:
    """A row in any state says that the message was seen."""
    assert not repository.is_already_processed(_ID, _PROVIDER)
    repository.mark_processing(_ID, _PROVIDER)
    match state:
        case "sent":
            repository.mark_sent(_ID, _PROVIDER)
        case "failed":
            repository.mark_failed(_ID, _PROVIDER, "no credit")
    assert repository.is_already_processed(_ID, _PROVIDER)
    assert not repository.mark_processing(_ID, _PROVIDER)


def test_mark_processing_is_true_for_the_first_only(
    repository: ProcessedMessageRepository, other: ProcessedMessageRepository, ledger: Ledger
) -> None:
    """Many mark at once: one is the first, and every other is counted as an attempt."""
    repositories = (repository, other)
    answers = at_once(
        6, lambda number: repositories[number % 2].mark_processing(_ID, _PROVIDER, {"n": number})
    )
    assert sorted(answers) == [False] * 5 + [True]
    record = record_of(ledger, _KEY)
    assert (record.state, record.attempts) == (State.PROCESSING, 6)
    assert record.metadata == {"n": answers.index(True)}


def test_a_claim_is_held_for_ever(
    repository: ProcessedMessageRepository,
    other: ProcessedMessageRepository,
    ledger: Ledger,
    clock: ManualClock,
) -> None:
    """Whoever began and never said more: no time that passes lets the message run again. Each
    delivery counts as an attempt and renews last_processed_at; the first time stays.
    """
    begun = clock.now
    repository.mark_processing(_ID, _PROVIDER)
    assert record_of(ledger, _KEY).lease_until is None
    clock.advance(1_000 * _DAY_S)
    assert other.is_already_processed(_ID, _PROVIDER)
    assert not other.mark_processing(_ID, _PROVIDER)
    record = record_of(ledger, _KEY)
    assert (record.first_seen, record.last_seen) == pytest.approx((begun, clock.now))
    assert record.attempts == 2


def test_a_message_for_two_providers_is_two(
    repository: ProcessedMessageRepository, ledger: Ledger
) -> None:
    """Two providers with the same message never see each other's rows."""
    assert repository.mark_processing(_ID, "sms-service")
    assert repository.mark_processing(_ID, "email-service")
    repository.mark_sent(_ID, "sms-service")
    assert ledger.counts() == {
        ("sms-service", State.COMPLETED): 1,
        ("email-service", State.PROCESSING): 1,
    }


def test_a_mark_stays(
    repository: ProcessedMessageRepository, other: ProcessedMessageRepository, ledger: Ledger
) -> None:
    """Who marks need not be who began. A late mark changes nothing of what is sent; what failed is
    not made sent, nor begun again.
    """
    repository.mark_processing(_ID, _PROVIDER, {"to": "+49"})
    other.mark_sent(_ID, _PROVIDER)
    sent = record_of(ledger, _KEY)
    assert sent.state is State.COMPLETED
    repository.mark_failed(_ID, _PROVIDER, "too late")
    repository.mark_sent(_ID, _PROVIDER)
    assert record_of(ledger, _KEY) == sent
    repository.mark_processing("failed", _PROVIDER)
    repository.mark_failed("failed", _PROVIDER, "no credit")
    repository.mark_sent("failed", _PROVIDER)
    assert not repository.mark_processing("failed", _PROVIDER)
    record = record_of(ledger, Key(_PROVIDER, "failed"))
    assert (record.state, record.error) == (State.FAILED, "no credit")


def test_a_mark_without_a_row_is_logged(
    repository: ProcessedMessageRepository, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    """Marks of what was never begun, or was removed, make no row, and are seen in the log."""
    with caplog.at_level(logging.WARNING):
        repository.mark_sent(_ID, _PROVIDER)
        repository.mark_failed(_ID, _PROVIDER, "no credit")
    assert events_in(caplog) == ["not_marked"] * 2
    assert ledger.counts() == {}


def test_one_table_with_other_consumers(
    repository: ProcessedMessageRepository, ledger: Ledger
) -> None:
    """What a consumer with leases has in hand, or has failed, is not for the repository."""
    claim = granted(ledger.claim(_KEY, "60s"))
    assert not repository.mark_processing(_ID, _PROVIDER)
    ledger.fail(claim, "no credit")
    assert not repository.mark_processing(_ID, _PROVIDER)
    again = granted(ledger.claim(_KEY, policy=Policy(on_failed="retry", tries=9)))
    assert again.attempts == 4, "deliveries that were counted are among the attempts"
    ledger.complete(again)
    assert repository.is_already_processed(_ID, _PROVIDER)


def test_cleanup_removes_what_is_old(
    repository: ProcessedMessageRepository, clock: ManualClock
) -> None:
    """What was last seen longer ago goes, and is counted; what is being processed stays."""
    for name in ("sent", "failed", "processing", "seen again"):
        repository.mark_processing(name, _PROVIDER)
    repository.mark_sent("sent", _PROVIDER)
    repository.mark_sent("seen again", _PROVIDER)
    repository.mark_failed("failed", _PROVIDER, "no credit")
    clock.advance(20 * _DAY_S)
    repository.mark_processing("seen again", _PROVIDER)
    clock.advance(11 * _DAY_S)
    assert repository.cleanup() == 2
    assert repository.is_already_processed("processing", _PROVIDER)
    assert repository.is_already_processed("seen again", _PROVIDER)
    assert repository.mark_processing("sent", _PROVIDER), "unknown again"
    clock.advance(_DAY_S)
    assert repository.cleanup(days=7) == 1


@pytest.mark.parametrize("message_id", [None, "", " "])
@in_memory
def test_two_messages_without_ids_never_match(
    repository: ProcessedMessageRepository, message_id: str
) -> None:
    """A missing id is an error of every call."""
    for call in (
        repository.is_already_processed,
        repository.mark_processing,
        repository.mark_sent,
    ):
        with pytest.raises(MessageError, match="id"):
            call(message_id, _PROVIDER)


# ---- A store that fails ------------------------------------------------------------------------


class _Away(MemoryStore):
    """A store that cannot be reached while it is away."""

    is_away = False

    def load(self, keys: Collection[Key]) -> Loaded:
        if self.is_away:
            raise StoreUnavailable("it is away")
        return super().load(keys)


def test_a_store_that_is_away(caplog: pytest.LogCaptureFixture) -> None:
    """After the SMS is sent it raises nothing, and is logged. Before the effect, who cannot ask is
    told so: nothing runs that may have run.
    """
    store = _Away()
    repository = ProcessedMessageRepository(Ledger(store))
    repository.mark_processing(_ID, _PROVIDER)
    store.is_away = True
    repository.mark_sent(_ID, _PROVIDER)
    repository.mark_failed(_ID, _PROVIDER, "no credit")
    assert events_in(caplog) == ["marking_failed"] * 2
    with pytest.raises(StoreUnavailable):
        repository.is_already_processed(_ID, _PROVIDER)


# ---- In the caller's transaction ---------------------------------------------------------------


@pytest.mark.parametrize("commits", [True, False])
@on_a_server_too
def test_all_is_stored_together_or_nothing(ledger: Ledger, engine: Engine, commits: bool) -> None:
    """In the caller's transaction the rows and the caller's own writes share their fate."""
    with engine.connect() as connection:
        with ledger.transaction(connection) as inbox:
            repository = ProcessedMessageRepository(inbox)
            assert repository.mark_processing(_ID, _PROVIDER)
            assert not repository.mark_processing(_ID, _PROVIDER)
            connection.execute(text("INSERT INTO orders (id) VALUES ('order-1')"))
            repository.mark_sent(_ID, _PROVIDER)
            with pytest.raises(ConfigError, match="its own transactions"):
                repository.cleanup()
        if commits:
            connection.commit()
    assert orders_in(engine) == ["order-1"] * commits
    assert ProcessedMessageRepository(ledger).is_already_processed(_ID, _PROVIDER) is commits


def test_a_failure_in_a_transaction_raises(ledger: Ledger, engine: Engine) -> None:
    """There a mark that failed undoes all: whoever is about to commit must know."""

    def mark() -> None:
        with engine.connect() as connection, ledger.transaction(connection) as inbox:
            connection.execute(text("DROP TABLE processed_messages"))
            ProcessedMessageRepository(inbox).mark_sent(_ID, _PROVIDER)

    with pytest.raises(StoreError):
        mark()
