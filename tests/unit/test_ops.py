"""What operators do, where no command shows it: notes, purges by policy, what changed meanwhile."""

from contextlib import closing
from datetime import timedelta

import pytest
from tests.records import granted

from oncely import ops
from oncely.core.activity import Worker
from oncely.core.errors import ConfigError
from oncely.core.message import Message
from oncely.core.record import Claim, Key, Record, State
from oncely.core.waiting import WaitingMessage, retries_of, retry_name
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.ops.next_steps import next_steps
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


# ---- Changing ----------------------------------------------------------------------------------


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


def test_what_comes_next(ledger: Ledger, clock: ManualClock) -> None:
    """Who goes on with a message, or that nobody is there who could; said of each, in its state."""

    def steps(*messages: str) -> list[str]:
        found = next_steps(ledger, [Key("c", each) for each in messages])
        return [found[Key("c", each)].partition(" since ")[0] for each in messages]

    for id_ in ("waits", "asked for", "given up"):
        failed(ledger, "c", id_)
    completed(ledger, "c", "done")
    claimed(ledger, "c", "held")
    claimed(ledger, "c", "doubtful", "1s")
    clock.advance(2)
    ledger.reset(Key("c", "asked for"))
    assert steps("asked for", "done", "held", "doubtful", "given up", "unknown") == [
        "may run again; waits for its sender (a broker, an HTTP client, a script)",
        "completed: nothing of it runs again",
        "a worker is processing it now",
        "in doubt: the policy of its consumer decides at its next delivery, or somebody settles it",
        "failed: it runs when its sender sends it again",
        "its next delivery is treated as new",
    ]


@pytest.mark.parametrize(
    ("destination", "who", "does"),
    [
        ("", "worker of 'c'", "takes it"),
        ("celery", "worker of Celery", "sends it to its broker again"),
    ],
)
def test_who_goes_on(sqlite_ledger_url: str, destination: str, who: str, does: str) -> None:
    """What waits in the ledger is taken by a worker of its consumer, or sent by its framework's: if
    one lives.
    """
    key, queue = Key("c", "1"), retries_of("c")
    row = WaitingMessage("1", destination, Message("1"), key, queue=queue, name=retry_name(queue))
    with closing(open_ledger(sqlite_ledger_url)) as ledger:
        failed(ledger, *key)
        ledger.mailbox.keep([row])
        ledger.reset(key)
        assert next_steps(ledger, [key]) == {key: f"due now: no {who} is running: start one"}
        seen = ledger.now()
        kind = destination or "consumer"
        ledger.operations.keep_worker(Worker("w", kind, "c", "h", 1, "1", seen, seen, 0), [])
        assert next_steps(ledger, [key]) == {key: f"due now: a {who} {does}"}


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


def test_purge_by_what_policies_say(ledger: Ledger, clock: ManualClock) -> None:
    """Where no time is said, each consumer's own policy does; what it said before is not said
    again. A name like another's is no slip where that one has a time of its own.
    """
    purgeable(ledger, clock)
    ledger.keep_retention("codes", "90d")
    for said in ("90d", "7d", "90d"):
        ledger.keep_retention("billing", said)
    Ledger(ledger._store).keep_retention("codes", "7d")
    assert ledger.retentions() == {"billing": timedelta(days=7), "codes": timedelta(days=7)}
    retention = {"billing": "90d", "billing2": "7d", "quite-another": "7d"}
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


# ---- Checking ----------------------------------------------------------------------------------


def test_a_policy_keeps_too_short(ledger: Ledger) -> None:
    """What consumers' own policies say is compared, each by its name."""
    ledger.keep_retention("codes", "36h")
    ledger.keep_retention("billing", "90d")
    ledger.keep_retention("a\nb", "10s")
    first, second = ops.problems(ledger, replay_window="14d")
    assert first.startswith("The retention of 'a\\nb' (10s) is not longer than the replay window")
    assert second.startswith("The retention of 'codes' (1.5d) is not longer than the replay window")
    assert ops.problems(ledger, replay_window="14d", retention="30d") == []
