"""A service that was written by hand works on our PostgreSQL table, beside a ledger."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import pytest
from tests.integration.drivers import Psycopg, connect_postgresql
from tests.integration.handwritten import Service
from tests.records import granted, record_of

from oncely.core.commands import Busy, Duplicate, Granted
from oncely.core.policy import Policy
from oncely.core.record import Key, State
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.testing import at_once

_CONSUMER = "sms-service"
_ID = "0b0e2f9e-8a0c-4c1b-9f57-3d1f7a0b6a11"
_KEY = Key(_CONSUMER, _ID)
_MONTH_S = 31 * 86_400

_IDS = 1_000
_THREADS = 8


@pytest.fixture
def ledger(postgresql_url: str) -> Iterator[Ledger]:
    """A ledger on a table of its own making."""
    with closing(open_ledger(postgresql_url)) as ledger:
        ledger.migrate()
        yield ledger


@pytest.fixture(params=["UTC", "Asia/Kathmandu"])
def service(request: pytest.FixtureRequest, ledger: Ledger, psql: Psycopg) -> Service:
    """The service on the ledger's table, its sessions in one time zone or another."""
    psql.execute("SELECT set_config('timezone', %s, false)", (request.param,))
    return Service(psql, _CONSUMER)


# ---- The service first -------------------------------------------------------------------------


def test_what_the_service_has_is_busy(ledger: Ledger, service: Service) -> None:
    """A message that the service works on is busy for the ledger, with no end in sight."""
    assert service.mark_processing(_ID, {"to": "+49"})[1] == 1
    outcome = ledger.claim(_KEY)
    assert isinstance(outcome, Busy)
    assert outcome.retry_at is None
    record = outcome.record
    assert (record.state, record.attempts, record.fence) == (State.PROCESSING, 1, 1)
    assert record.metadata == {"to": "+49"}
    assert record.first_seen == record.last_seen == pytest.approx(ledger.now(), abs=5)


def test_what_the_service_failed_may_run_again(ledger: Ledger, service: Service) -> None:
    """A message that failed for the service is the ledger's, where the policy tries again."""
    service.mark_processing(_ID, {"to": "+49"})
    service.mark_failed(_ID, "no credit")
    assert record_of(ledger, _KEY).error == "no credit"
    claim = granted(ledger.claim(_KEY, policy=Policy(on_failed="retry")))
    assert (claim.fence, claim.attempts) == (2, 2)
    ledger.complete(claim)
    assert service.status_and_attempts(_ID) == ("sent", 2)


@pytest.mark.parametrize(
    ("metadata", "kept"), [([], None), (["+49"], {"metadata": ["+49"]}), ({"a": 1}, {"a": 1})]
)
def test_what_the_service_sent_is_a_duplicate(
    ledger: Ledger, service: Service, metadata: list[str], kept: object
) -> None:
    """A message that the service has sent is a duplicate for the ledger, and stays sent. Metadata
    that is not an object (PHP writes what is empty as a list) is no obstacle.
    """
    service.mark_processing(_ID, metadata)
    service.mark_sent(_ID)
    outcome = ledger.claim(_KEY)
    assert isinstance(outcome, Duplicate)
    assert outcome.record.metadata == kept
    assert service.status(_ID) == "sent"
    assert record_of(ledger, _KEY).duplicates == 1


def test_attempts_unknown(ledger: Ledger, service: Service, psql: Psycopg) -> None:
    """A row without a number of attempts, which the column allows, counts as the first."""
    service.mark_processing(_ID, ["+49"])
    psql.execute("UPDATE processed_messages SET status = 'failed', attempts = NULL")
    claim = granted(ledger.claim(_KEY))
    assert claim.attempts == 2
    ledger.fail(claim, "no credit")
    assert record_of(ledger, _KEY).metadata == {"metadata": ["+49"], "error": "no credit"}


# ---- The ledger first --------------------------------------------------------------------------


def test_what_the_ledger_has_is_not_the_services(
    ledger: Ledger, service: Service, psql: Psycopg
) -> None:
    """A message that the ledger works on is seen by the service, and never its first attempt. An
    error that the ledger wrote stands where the service would have written it.
    """
    claim = granted(ledger.claim(_KEY, metadata={"to": "+49"}))
    assert service.status(_ID) == "processing"
    assert service.mark_processing(_ID, {})[1] == 2
    ledger.fail(claim, ValueError("no credit"))
    assert service.status(_ID) == "failed"
    found = psql.execute("SELECT metadata FROM processed_messages").fetchone()
    assert found == ({"to": "+49", "error": "ValueError: no credit"},)
    ledger.complete(granted(ledger.claim(_KEY)))
    assert service.status_and_attempts(_ID) == ("sent", 3)


# ---- Both --------------------------------------------------------------------------------------


def test_ids_are_distinct_numbers(ledger: Ledger, service: Service, psql: Psycopg) -> None:
    """Rows of both have a number of their own, which the service is told."""
    told = {service.mark_processing(str(n), {})[0] for n in range(5)}
    ledger.claim_many([Key(_CONSUMER, str(n)) for n in range(10)])
    ids = [row[0] for row in psql.execute("SELECT id FROM processed_messages")]
    assert len(set(ids)) == 10
    assert all(isinstance(id_, int) for id_ in ids)
    assert told < set(ids)


@pytest.mark.parametrize("cleaner", ["service", "ledger"])
def test_both_count_the_same_as_old(
    ledger: Ledger, service: Service, psql: Psycopg, cleaner: str
) -> None:
    """What was sent, by whomever, and not seen for a month is old for either's cleanup."""
    for name in ("old", "new"):
        ledger.complete(granted(ledger.claim(Key(_CONSUMER, f"{name}, ledger"))))
        service.mark_processing(f"{name}, service", {})
        service.mark_sent(f"{name}, service")
    psql.execute(
        "UPDATE processed_messages SET last_processed_at = last_processed_at"
        " - %s * interval '1 second' WHERE message_id LIKE 'old%%'",
        (_MONTH_S,),
    )
    assert (service.cleanup() if cleaner == "service" else ledger.purge("30d")) == 2
    left = {record.key.message_id for record in ledger.scan()}
    assert left == {"new, ledger", "new, service"}


def test_both_at_once(ledger: Ledger, postgresql_url: str) -> None:
    """Threads of both race for the same messages: exactly one of all works on each."""
    order = random.sample(range(_IDS), _IDS)

    def work(number: int) -> list[str]:
        # Of each kind two threads get the same part, in the same order.
        part = order[number // 4 :: _THREADS // 2]
        ids = [f"message-{n}" for n in part]
        if number % 2:
            # From the other end: whoever starts later still finds some that nobody has begun.
            return _done_by_ledger(postgresql_url, ids[::-1])
        return _done_by_service(postgresql_url, ids)

    done = at_once(2 * _THREADS, work)
    assert Counter(id_ for ids in done for id_ in ids) == {f"message-{n}": 1 for n in range(_IDS)}
    assert sum(map(len, done[::2])) > 0, "the service was never first"
    assert sum(map(len, done[1::2])) > 0, "the ledger was never first"
    assert ledger.counts() == {(_CONSUMER, State.COMPLETED): _IDS}


def _done_by_service(url: str, ids: list[str]) -> list[str]:
    with closing(connect_postgresql(url)) as connection:
        service = Service(connection, _CONSUMER)
        done = [id_ for id_ in ids if service.claims(id_)]
        for id_ in done:
            service.mark_sent(id_)
        return done


def _done_by_ledger(url: str, ids: list[str]) -> list[str]:
    done = []
    # Each thread its own, or their calls would go to the store together.
    with closing(open_ledger(url)) as ledger:
        for id_ in ids:
            outcome = ledger.claim(Key(_CONSUMER, id_))
            if isinstance(outcome, Granted):
                ledger.complete(outcome.claim)
                done.append(id_)
    return done
