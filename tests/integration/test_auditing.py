"""What people change is in the audit, on each kind of database; and what they say of a doubt."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.conditions import wait_until
from tests.conformance.conftest import url_of
from tests.logs import events_in
from tests.records import granted, record_of

from oncely import ops
from oncely.core.activity import AuditEntry
from oncely.core.commands import Granted
from oncely.core.errors import ConfigError, StoreUnavailable
from oncely.core.message import Message
from oncely.core.policy import Finding
from oncely.core.record import Claim, Key, Record, State
from oncely.core.waiting import WaitingMessage, retries_of, retry_name
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.ops import Chapter

_KINDS = ("sqlite", "postgresql")


@pytest.fixture(params=_KINDS)
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ledger]:
    """An empty ledger on each kind of database."""
    with closing(open_ledger(url_of(request.param, request, tmp_path))) as opened:
        opened.migrate()
        yield opened


def failed(ledger: Ledger, message_id: str, consumer: str = "billing") -> Record:
    """The record of a message that has failed permanently."""
    key = Key(consumer, message_id)
    ledger.fail(granted(ledger.claim(key)), "no", final=True)
    return record_of(ledger, key)


def in_doubt(ledger: Ledger, message_id: str) -> tuple[Claim, Record]:
    """A claim whose lease is over, and its record."""
    key = Key("billing", message_id)
    claim = granted(ledger.claim(key, lease=0.001))
    wait_until(lambda: ops.word_for(record_of(ledger, key), ledger.now()) == ops.IN_DOUBT)
    return claim, record_of(ledger, key)


def aside(message_id: str, consumer: str = "billing") -> WaitingMessage:
    """A message that was set aside when it was to be tried again."""
    queue, key = retries_of(consumer), Key(consumer, message_id)
    message = Message(message_id, b"{}")
    name = retry_name(queue)
    return WaitingMessage(message_id, "", message, key, queue=queue, name=name, is_set_aside=True)


def noted(ledger: Ledger) -> list[tuple[str, str, str, str, int | None, int | None, str]]:
    """The audit, the oldest first, without numbers and times."""
    return [
        (
            each.by,
            each.action,
            each.consumer,
            each.message_id,
            each.changed,
            each.refused,
            each.why,
        )
        for each in reversed(ledger.operations.audit())
    ]


# ---- In doubt ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("finding", "state"),
    [
        ("happened", State.COMPLETED),
        ("not_happened", State.FAILED),
        ("unknown", State.PROCESSING),
    ],
)
def test_a_probe_decides(ledger: Ledger, finding: Finding, state: State) -> None:
    """What the consumer's own probe says is done; where it does not know, nothing is. It is asked
    with the message as it waits in the ledger, else with the id alone.
    """
    asked: list[Message] = []

    def probe(message: Message) -> Finding:
        asked.append(message)
        return finding

    _, record = in_doubt(ledger, "1")
    _, other = in_doubt(ledger, "2")
    ledger.mailbox.keep([aside("1")])
    for each in (record, other):
        probed = ops.probe(ledger, each, probe, by="ann")
        assert probed.finding == finding
        assert bool(probed.changed.done) is (state is not State.PROCESSING)
        assert record_of(ledger, each.key).state is state
    assert [(each.id, each.body) for each in asked] == [("1", b"{}"), ("2", b"")]


# ---- The audit ---------------------------------------------------------------------------------


def test_one_entry_for_each_action(ledger: Ledger) -> None:
    """Of many records, an action is one entry: who, what, of whom, how many, and why."""
    records = [failed(ledger, "1"), failed(ledger, "2")]
    done = Key("billing", "done")
    ledger.complete(granted(ledger.claim(done)))
    ops.reset(ledger, [*records, record_of(ledger, done)], by="ann", why="back")
    ops.forget(ledger, [record_of(ledger, done)], by="bob")
    others = [failed(ledger, "3"), failed(ledger, "4", "mail")]
    ops.forget(ledger, others, by="cid")
    assert noted(ledger) == [
        ("ann", "retried", "billing", "1", 2, 1, "back"),
        ("bob", "forgotten", "billing", "done", 1, 0, ""),
        ("cid", "forgotten", "", "3", 2, 0, ""),
    ]


def test_dead_letters(ledger: Ledger) -> None:
    """Retries, edits and discards of dead letters are noted, and what is not there any more."""
    ledger.mailbox.keep([aside("1"), aside("2"), aside("3")])
    one, two, three = (letter.id for letter in ledger.dead())
    ops.retry_letters(ledger, [one, 10_000], by="ann")
    edited = Message("2", b"[]")
    ops.retry_letters(ledger, [two], message=edited, by="ann", why="typo")
    ops.discard_letters(ledger, [three], by="bob", why="a test")
    assert noted(ledger) == [
        ("ann", "dead_letter_retried", "billing", "1", 1, 1, ""),
        ("ann", "dead_letter_edited", "billing", "2", 1, 0, "typo"),
        ("bob", "dead_letter_discarded", "billing", "3", 1, 0, "a test"),
    ]


def test_audit_that_fails(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A change whose counts could not be kept is done all the same; the caller is told, and the
    log; the entry says that nobody knows how many were changed.
    """

    def note_counts(*_: object) -> None:
        raise StoreUnavailable("gone")

    records = [failed(ledger, "1")]
    ledger.mailbox.keep([aside("2")])
    monkeypatch.setattr(type(ledger.operations), "note_counts", note_counts)
    changed = ops.reset(ledger, records, by="ann")
    assert (changed.done, changed.audit_error) == ([records[0].key], "StoreUnavailable: gone")
    assert isinstance(ledger.claim(records[0].key), Granted)
    letters = ops.discard_letters(ledger, [letter.id for letter in ledger.dead()], by="ann")
    assert letters.audit_error == "StoreUnavailable: gone"
    assert events_in(caplog) == ["audit_not_completed"] * 2
    assert noted(ledger) == [
        ("ann", "retried", "billing", "1", None, None, ""),
        ("ann", "dead_letter_discarded", "billing", "2", None, None, ""),
    ]
    [change] = [
        each for each in ops.story(ledger, records[0].key).chapters if each.what == "retried"
    ]
    assert change.in_words(0.0) == "by ann, chosen 1, changed not known, refused not known"


def test_what_was_done_before_an_outage(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the store goes away in the middle, the entry and the error say how many were changed at
    least.
    """
    records = [failed(ledger, "1"), failed(ledger, "2")]
    reset, turns = ledger.reset, list[Key]()

    def once(key: Key, **how: Any) -> None:
        turns.append(key)
        if len(turns) == 2:
            raise StoreUnavailable("gone")
        reset(key, **how)

    monkeypatch.setattr(ledger, "reset", once)
    with pytest.raises(StoreUnavailable, match=r"^gone; 1 of 2 were changed before that, whether"):
        ops.reset(ledger, records, by="ann")
    assert noted(ledger) == [("ann", "retried", "billing", "1", 1, None, "")]
    assert ledger.operations.audit()[0].changed_in_words() == "begun; at least 1 changed (of 2)"


def test_a_store_without_an_audit() -> None:
    """In memory there is none: changes are no different, and whoever asks for it is told."""
    ledger = open_ledger("memory://")
    changed = ops.reset(ledger, [failed(ledger, "1")], by="ann")
    assert (len(changed.done), changed.audit_error) == (1, None)
    looked: Sequence[AuditEntry] = ledger.operations.audit()
    assert looked == []
    with pytest.raises(ConfigError, match="keeps no workers, activity, runs or audit"):
        ops.check_kept(ledger)


# ---- One message -------------------------------------------------------------------------------


def test_story_in_words() -> None:
    """For people: times and yes as such, of a traceback its end; what is empty is left out."""
    traceback = "Traceback (most recent call last):\n  ...\nOSError: away\n"
    details = {"due": 60.0, "error": traceback, "is_refused": False, "why": "", "destination": None}
    assert Chapter(0.0, "waits to be sent", details).in_words(0.0) == (
        "due 1970-01-01 00:01:00 UTC (in 1 min), error OSError: away, refused no"
    )
