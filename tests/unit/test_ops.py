"""What operators do: looking, changing, purging, checking, over a ledger in memory."""

import json
import logging
from dataclasses import replace
from datetime import timedelta

import pytest
from tests.logs import events_in
from tests.records import granted

from oncely import ops
from oncely.core.commands import Duplicate, Granted
from oncely.core.errors import ConfigError, RefusedError
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.record import Claim, Key, Record, State
from oncely.core.waiting import WaitingMessage, retries_of, retry_name
from oncely.ledger import Ledger
from oncely.testing import ManualClock

DAY_S = 86_400.0


def claimed(ledger: Ledger, consumer: str, message_id: str, lease: str = "60s") -> Claim:
    return granted(ledger.claim(Key(consumer, message_id), lease))


def completed(ledger: Ledger, consumer: str, message_id: str) -> None:
    ledger.complete(claimed(ledger, consumer, message_id))


def failed(ledger: Ledger, consumer: str, message_id: str, error: str = "no") -> None:
    ledger.fail(claimed(ledger, consumer, message_id), error)


def ids(selected: ops.Selected) -> list[str]:
    return [record.key.message_id for record in selected.records]


def the(ledger: Ledger, consumer: str, message_id: str) -> Record:
    [record] = ops.find(ledger, message_id, consumer)
    return record


# ---- Status ------------------------------------------------------------------------------------


def test_status_of_nothing(ledger: Ledger) -> None:
    """A ledger without records has a status too, in numbers and not in gaps."""
    found = ops.status(ledger)
    assert (found.consumers, found.size_bytes) == ({}, None)
    assert found.total.as_dict() == {
        "records": 0,
        "processing": 0,
        "handled": 0,
        "completed": 0,
        "failed": 0,
        "in_doubt": 0,
        "duplicates": 0,
        "oldest_processing_s": None,
        "waiting": 0,
        "waiting_lag_s": 0.0,
        "dead_letters": 0,
        "is_estimate": False,
    }


def test_status_adds_up(ledger: Ledger, clock: ManualClock) -> None:
    """Counts, doubts, duplicates and ages stand with their consumer, and in the total."""
    claimed(ledger, "billing", "old")
    clock.advance(100)
    claimed(ledger, "billing", "young")
    claimed(ledger, "sms", "young")
    # Its lease runs out as well, but it is not in doubt: its handler has run.
    ledger.handled(claimed(ledger, "sms", "handled", "1s"))
    completed(ledger, "sms", "done")
    failed(ledger, "sms", "failed")
    assert isinstance(ledger.claim(Key("sms", "done")), Duplicate)
    clock.advance(20)
    found = ops.status(ledger)
    assert list(found.consumers) == ["billing", "sms"]
    billing, sms = found.consumers["billing"], found.consumers["sms"]
    assert billing.counts == {State.PROCESSING: 2}
    assert (billing.in_doubt, billing.duplicates, billing.oldest_processing_s) == (1, 0, 120)
    assert sms.counts == dict.fromkeys(State, 1)
    assert (sms.in_doubt, sms.duplicates, sms.oldest_processing_s) == (0, 1, 20)
    assert found.total.records == 6
    assert (found.total.in_doubt, found.total.duplicates) == (1, 1)
    assert found.total.oldest_processing_s == 120
    assert json.loads(json.dumps(found.as_dict()))["consumers"]["sms"]["completed"] == 1


# ---- Looking -----------------------------------------------------------------------------------


def test_select_by_state(ledger: Ledger, clock: ManualClock) -> None:
    """Every word selects its records; "in doubt" only those whose lease has run out."""
    claimed(ledger, "c", "doubtful")
    clock.advance(60)
    claimed(ledger, "c", "live")
    ledger.handled(claimed(ledger, "c", "handled"))
    completed(ledger, "c", "done")
    failed(ledger, "c", "failed")
    ledger.fail(claimed(ledger, "c", "spent"), "no", final=True)
    chosen = {
        word: set(ids(ops.select(ledger, ops.Selection(states=[word]))))
        for word in (*ops.STATES, "in-doubt", "in_doubt", "sent")
    }
    assert chosen == {
        "processing": {"doubtful", "live"},
        "in doubt": {"doubtful"},
        "in-doubt": {"doubtful"},
        "in_doubt": {"doubtful"},
        "handled": {"handled"},
        "sent": {"done"},
        "completed": {"done"},
        "failed": {"failed", "spent"},
        "exhausted": {"spent"},
    }


def test_select_by_several_states(ledger: Ledger, clock: ManualClock) -> None:
    """Any of several states fits; nothing stands twice; the longest unseen comes first."""
    failed(ledger, "c", "1")
    clock.advance(1)
    claimed(ledger, "c", "2")
    clock.advance(1)
    failed(ledger, "c", "3")
    clock.advance(60)
    words = ops.Selection(states=["failed", "in-doubt", "processing"])
    assert ids(ops.select(ledger, words)) == ["1", "2", "3"]


def test_select_by_no_state(ledger: Ledger) -> None:
    """A word that is no state is refused, with those that are."""
    with pytest.raises(
        ConfigError, match="'stuck' is none of processing, handled, completed, failed"
    ):
        ops.select(ledger, ops.Selection(states=["stuck"]))


def test_details(ledger: Ledger) -> None:
    """What waits to be sent and what steps are finished is found beside the record."""
    claim = claimed(ledger, "shop", "order")
    ledger.keep_step(claim, "charge", {"receipt": 7})
    ledger.handled(claim, None, [WaitingMessage("a", "mails", Message("a"), claim.key)])
    found = ops.details(ledger, claim.key)
    assert [message.id for message in found.deferred] == ["a"]
    assert json.loads(json.dumps(found.as_dict(ledger.now()))) == {
        "deferred": [{"id": "a", "destination": "mails", "attempts": 0, "error": None}],
        "steps": {"charge": {"receipt": 7}},
        "waiting": None,
        "dead_letters": [],
    }
    assert ops.details(ledger, Key("shop", "unknown")) == ops.Details([], {}, None, [])


# ---- Changing ----------------------------------------------------------------------------------


def test_reset(ledger: Ledger, clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    """What is reset runs again; who did it and why is in the record and in the log."""
    caplog.set_level(logging.INFO, "oncely.ops")
    claimed(ledger, "c", "doubtful")
    clock.advance(60)
    ledger.fail(claimed(ledger, "c", "failed"), "no", final=True)
    records = ops.select(ledger, ops.Selection(states=ops.RESETTABLE)).records
    changed = ops.reset(ledger, records, by="ann", why="the provider is back")
    assert changed == ops.Changed(
        [Key("c", "doubtful"), Key("c", "failed")], [], "ann", "the provider is back"
    )
    metadata = the(ledger, "c", "failed").metadata
    assert metadata is not None
    assert metadata["reset"]["by"] == "ann"
    assert metadata["reset"]["why"] == "the provider is back"
    assert isinstance(ledger.claim(Key("c", "failed")), Granted)
    [first, _] = caplog.records
    assert (vars(first)["event"], vars(first)["message_id"]) == ("reset", "doubtful")
    assert (first.__dict__["by"], first.__dict__["why"]) == ("ann", "the provider is back")


def test_reset_refused(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    """What may not be reset is left alone and told; the others are reset all the same."""
    caplog.set_level(logging.INFO, "oncely.ops")
    completed(ledger, "c", "done")
    failed(ledger, "c", "failed")
    turns: list[int] = []
    records = [the(ledger, "c", "done"), the(ledger, "c", "failed")]
    changed = ops.reset(ledger, records, by="ann", on_each=turns.append)
    assert changed.done == [Key("c", "failed")]
    [refusal] = changed.refused
    assert refusal.key == Key("c", "done")
    assert (
        "is completed: only a record that has failed or is in doubt can be reset" in refusal.reason
    )
    assert turns == [1, 2]
    assert len(caplog.records) == 1


def test_a_note_is_fit_to_be_kept(ledger: Ledger) -> None:
    """What cannot be stored, or should not be, is not in the note."""
    failed(ledger, "c", "1")
    changed = ops.reset(
        ledger, [the(ledger, "c", "1")], by="x" * 999, why="nul \0, \udc80, password=secret"
    )
    assert len(changed.by) == 255
    assert changed.why == "nul \\0, \\udc80, password=***"
    metadata = the(ledger, "c", "1").metadata
    assert metadata is not None
    assert metadata["reset"]["why"] == changed.why


def test_forget(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    """What is forgotten is gone; the log tells who did it and why."""
    caplog.set_level(logging.INFO, "oncely.ops")
    completed(ledger, "c", "1")
    changed = ops.forget(ledger, [the(ledger, "c", "1")], by="ann", why="sent by mistake")
    assert changed.done == [Key("c", "1")]
    assert ledger.find(Key("c", "1")) is None
    [line] = caplog.records
    assert vars(line)["event"] == "forgotten"
    told = {name: line.__dict__[name] for name in ("consumer", "message_id", "by", "why")}
    assert told == {"consumer": "c", "message_id": "1", "by": "ann", "why": "sent by mistake"}


def test_forget_what_has_changed(ledger: Ledger) -> None:
    """What was failed when it was chosen and is completed by now must not run again."""
    failed(ledger, "c", "1")
    failed(ledger, "c", "2")
    chosen = [the(ledger, "c", "1"), the(ledger, "c", "2")]
    completed(ledger, "c", "1")
    ledger.forget(Key("c", "2"))
    changed = ops.forget(ledger, chosen, by="ann")
    [refusal] = changed.refused
    assert refusal.key.message_id == "1"
    assert "is completed: " in refusal.reason
    assert "nor one that has changed since it was found" in refusal.reason
    assert the(ledger, "c", "1").state is State.COMPLETED


# ---- Purging -----------------------------------------------------------------------------------


def purgeable(ledger: Ledger, clock: ManualClock) -> None:
    """Per consumer a record that was seen 100, 50 and 10 days ago, and one in processing."""
    for consumer in ("billing", "codes", "news"):
        granted(ledger.claim(Key(consumer, "live"), "none"))
    for days, wait_s in ((100, 50), (50, 40), (10, 10)):
        for consumer in ("billing", "codes", "news"):
            completed(ledger, consumer, f"{days}")
        clock.advance(wait_s * DAY_S)


def left(ledger: Ledger, consumer: str) -> set[str]:
    return set(ids(ops.select(ledger, ops.Selection(consumer=consumer)))) - {"live"}


def test_purge_by_class(
    ledger: Ledger, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Each consumer's records are kept for its own time, else for `older_than`."""
    caplog.set_level(logging.INFO, "oncely")
    purgeable(ledger, clock)
    batches: list[tuple[str, int]] = []
    purged = ops.purge(
        ledger,
        retention={"billing": "90d", "codes": "7d"},
        batch=2,
        on_batch=lambda consumer, count: batches.append((consumer, count)),
        by="ann",
    ).counts
    assert purged == {"billing": 1, "codes": 3, "news": 2}
    assert left(ledger, "billing") == {"50", "10"}
    assert left(ledger, "codes") == set()
    assert left(ledger, "news") == {"10"}
    assert ledger.counts()["codes", State.PROCESSING] == 1
    assert batches == [("billing", 1), ("codes", 2), ("codes", 1), ("news", 2)]
    logged = [(line.__dict__["consumer"], line.__dict__["count"]) for line in caplog.records]
    assert logged == list(purged.items())
    assert {*events_in(caplog)} == {"purged"}


def test_purge_by_what_policies_say(ledger: Ledger, clock: ManualClock) -> None:
    """Where no time is said, each consumer's own policy does; what it said before is not said
    again.
    """
    purgeable(ledger, clock)
    ledger.keep_retention("codes", "90d")
    for said in ("90d", "7d", "90d"):
        ledger.keep_retention("billing", said)
    Ledger(ledger._store).keep_retention("codes", "7d")
    assert ledger.retentions() == {"billing": timedelta(days=7), "codes": timedelta(days=7)}
    retention = {"billing": "90d"}
    assert ops.purge(ledger, retention=retention, by="ann").counts == {
        "billing": 1,
        "codes": 3,
        "news": 2,
    }


def test_purge_of_the_ledger_by_what_policies_say(ledger: Ledger, clock: ManualClock) -> None:
    """So does the ledger's own; a time that is said is for all."""
    purgeable(ledger, clock)
    ledger.keep_retention("billing", "90d")
    ledger.keep_retention("codes", "7d")
    assert ledger.purge(consumer="codes") == 3
    assert ledger.purge() == 1 + 2
    assert ledger.purge("20d") == 1


@pytest.mark.parametrize(
    ("retention", "said"),
    [
        ({"biling": "90d"}, "there are no records of 'biling'; did you mean 'billing'?"),
        ({"billing": "90"}, "retention of billing: '90' is not a duration"),
    ],
)
def test_purge_by_mistake(
    ledger: Ledger, clock: ManualClock, retention: dict[str, str], said: str
) -> None:
    """A name or a time that is wrong is found before anything is removed."""
    purgeable(ledger, clock)
    with pytest.raises(ConfigError) as raised:
        ops.purge(ledger, "0s", retention=retention, by="ann")
    assert said in str(raised.value)
    assert left(ledger, "billing") == {"100", "50", "10"}


def test_purge_of_a_consumer_without_records(ledger: Ledger, clock: ManualClock) -> None:
    """A name like another's is no slip where that one has a time of its own."""
    purgeable(ledger, clock)
    retention = {"billing": "90d", "billing2": "7d", "quite-another": "7d"}
    assert ops.purge(ledger, retention=retention, by="ann").counts["billing"] == 1


# ---- Checking ----------------------------------------------------------------------------------


def test_no_problems(ledger: Ledger) -> None:
    """Nothing is said where nothing is wrong, or where nothing is known to compare with."""
    assert ops.problems(ledger) == []
    assert ops.problems(ledger, lease="1s", retention="1s") == []
    assert ops.problems(ledger, replay_window="29d", broker_timeout="5m") == []
    assert ops.problems(ledger, lease="none", broker_timeout="30m") == []


def test_a_policy_keeps_too_short(ledger: Ledger) -> None:
    """What consumers' own policies say is compared, each by its name."""
    ledger.keep_retention("codes", "36h")
    ledger.keep_retention("billing", "90d")
    ledger.keep_retention("a\nb", "10s")
    first, second = ops.problems(ledger, replay_window="14d")
    assert first.startswith("The retention of 'a\\nb' (10s) is not longer than the replay window")
    assert second.startswith("The retention of 'codes' (1.5d) is not longer than the replay window")
    assert ops.problems(ledger, replay_window="14d", retention="30d") == []


def test_defaults_are_the_policy(ledger: Ledger) -> None:
    """What is assumed is what a policy has when nothing is said."""
    assert (Policy().retention, Policy().lease) == (ops.RETENTION, ops.LEASE)


def test_purge_of_whom_nobody_knows(ledger: Ledger) -> None:
    """A name like one that has records may be a slip; another has none yet, or none left, and one
    with a policy is known.
    """
    assert ops.purge(ledger, consumer="biling", by="ann").counts == {"biling": 0}
    failed(ledger, "billing", "1")
    with pytest.raises(ConfigError, match="no records of consumer 'biling'"):
        ops.purge(ledger, consumer="biling", by="ann")
    assert ops.purge(ledger, consumer="mailing", by="ann").counts == {"mailing": 0}
    ledger.keep_retention("biling", "7d")
    assert ops.purge(ledger, consumer="biling", by="ann").counts == {"biling": 0}


# ---- Dead letters ------------------------------------------------------------------------------


def letters(ledger: Ledger, *ids: str) -> list[int]:
    """Dead letters of "shop", whose records are exhausted; their numbers."""
    queue = retries_of("shop")
    for id_ in ids:
        ledger.fail(claimed(ledger, "shop", id_), "no", final=True)
        row = WaitingMessage(id_, "", Message(id_), Key("shop", id_), queue=queue)
        letter = replace(row, is_set_aside=True, reason="no", name=retry_name(queue))
        ledger.mailbox.keep([letter])
    return [each.id for each in ops.dead_letters(ledger).letters]


def test_status_of_who_has_no_records(ledger: Ledger) -> None:
    """Whose messages have no ids has dead letters all the same, and no records."""
    row = WaitingMessage("", "", Message(""), Key("shop", ""), queue=retries_of("shop"))
    ledger.mailbox.keep([replace(row, is_set_aside=True, reason="no")])
    found = ops.status(ledger)
    assert (found.consumers["shop"].records, found.consumers["shop"].dead_letters) == (0, 1)
    assert found.total.dead_letters == 1


def test_retry_letters(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    """Each that is there runs again; who did it and why is in the log, with whose it is."""
    caplog.set_level(logging.INFO, "oncely.ops")
    one, two = letters(ledger, "a", "b")
    turns: list[int] = []
    changed = ops.retry_letters(
        ledger, [two, 99, two], by="ann", why="password=x", on_each=turns.append
    )
    assert changed == ops.LettersChanged([two], [99], "ann", "password=***")
    assert turns == [1, 2]
    assert [each.id for each in ops.dead_letters(ledger).letters] == [one]
    [waiting] = ops.waiting(ledger).messages
    assert waiting.key == Key("shop", "b")
    assert not the(ledger, "shop", "b").exhausted
    [record] = caplog.records
    assert vars(record)["event"] == "dead_letter_retried"
    told = {"dead_letter": two, "consumer": "shop", "message_id": "b", "by": "ann"}
    assert record.__dict__.items() >= told.items()


def test_a_letter(ledger: Ledger) -> None:
    """One is found by its number, and only while it is one."""
    [one] = letters(ledger, "a")
    assert ops.letter(ledger, one).key == Key("shop", "a")
    ops.retry_letters(ledger, [one], by="ann")
    with pytest.raises(RefusedError, match=f"there is no dead letter {one}"):
        ops.letter(ledger, one)
