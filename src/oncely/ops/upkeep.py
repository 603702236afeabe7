"""Keeping a ledger small, and free of settings that lose or repeat messages."""

import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from functools import partial

from oncely.core.durations import Duration, lease_seconds, seconds
from oncely.core.errors import ConfigError
from oncely.core.policy import DEAD_RETENTION, Policy
from oncely.core.record import Key
from oncely.core.rules import PURGEABLE
from oncely.core.shown import moment
from oncely.ledger.ledger import Ledger
from oncely.ledger.mailbox import is_dead
from oncely.ledger.recorder import SET_BACK
from oncely.ops.activity import DAY_S
from oncely.ops.auditing import Note, Removed, audited
from oncely.ops.known import EXACT, check_known, consumers
from oncely.ops.status import backlogs
from oncely.ops.workers import GONE, SeenWorker, workers
from oncely.stores.names import Program
from oncely.stores.store import Wanted

RETENTION = Policy().retention
LEASE = Policy().lease
DAY = timedelta(days=1)
_SLIP = 0.85
"""Two names that are as similar as this may be one name and a typo of it."""


@dataclass(frozen=True, slots=True)
class Purged(Removed[int]):
    """What a purge has removed, or would remove: records (`counts`), dead letters, entries of the
    audit; and up to when the records of each consumer go, in seconds since 1970.
    """

    dead_letters: Mapping[str, int]
    audit: int
    before: Mapping[str, float]


def purge(
    ledger: Ledger,
    older_than: Duration | None = None,
    *,
    consumer: str | None = None,
    retention: Mapping[str, Duration] | None = None,
    dead_older_than: Duration = DEAD_RETENTION,
    audit_older_than: Duration = DEAD_RETENTION,
    dry_run: bool = False,
    batch: int = 1_000,
    on_batch: Callable[[str, int], None] = lambda _, __: None,
    by: str,
    why: str = "",
) -> Purged:
    """Remove records that were last seen longer ago than their consumer's `retention` here, else
    `older_than`, else the retention of the consumer's own policy. Old dead letters go first: a
    record stays as long as it has one.

    Activity, workers and runs of over 30 days ago go as well, and entries of the audit, unless only
    a `consumer` is purged. The audit has the sum of all. A `dry_run` reads what would go, and
    changes nothing. `on_batch` is called after every batch, with the consumer and the number of
    records. Raises ConfigError at first when a name in `retention` looks like a typo.
    """
    kept = retentions(ledger, older_than, consumer=consumer, retention=retention)
    counts = dict.fromkeys(kept, 0)
    now, audit_s = ledger.now(), seconds(audit_older_than, "audit_older_than")
    before = {name: now - seconds(age, "older_than") for name, age in kept.items()}
    dead_before = now - seconds(dead_older_than, "dead_older_than")
    dead = ledger.mailbox.dead(consumer, sys.maxsize, with_bodies=False)
    old = {each.id: each.key.consumer for each in dead if each.last_seen < dead_before}
    letters, ids = Counter(old.values()), [*old]
    if dry_run:
        for name, until in before.items():
            for page in ledger.read(wanted=Wanted([name], PURGEABLE, seen_before=until)):
                waiting = ledger.mailbox.of_many([record.key for record in page]).values()
                stay = [not all(is_dead(x, dead_before) for x in each) for each in waiting]
                counts[name] += len(page) - sum(stay)
        entries = sum(each.at < now - audit_s for each in ledger.operations.audit(sys.maxsize))
        return Purged(counts, None, letters, 0 if consumer else entries, before)
    with audited(ledger, "purged", Note.of(by, why), Key(consumer or "", "")) as tally:

        def count(name: str, removed: int) -> None:
            counts[name] += removed
            tally.changed += removed
            on_batch(name, removed)

        for at in range(0, len(ids), 100):  # A transaction reads them with their bodies.
            tally.changed += ledger.mailbox.discard_dead(ids[at : at + 100], dead_before)
        for name, age in kept.items():
            ledger.purge(age, name, batch, on_batch=partial(count, name))
        entries = 0 if consumer else ledger.operations.purge_audit(audit_s)
        tally.changed += entries
    ledger.operations.purge_operations(seconds(RETENTION, "retention"))
    return Purged(counts, tally.audit_error, letters, entries, before)


def retentions(
    ledger: Ledger,
    older_than: Duration | None,
    *,
    consumer: str | None,
    retention: Mapping[str, Duration] | None,
) -> Mapping[str, Duration]:
    """How long each consumer's records, or those of `consumer` alone, are kept. Raises ConfigError
    when `consumer` or a name in `retention` looks like a typo.
    """
    own = retention or {}
    for name, kept in own.items():
        seconds(kept, f"retention of {name}")
    names = consumers(ledger) if consumer is None else [consumer]
    # A consumer without records may just have none left. But if its name is a typo, the consumer
    # that was meant would lose records that were to be kept.
    others = [name for name in names if name not in own]
    for name in own.keys() - set(names):
        for near in get_close_matches(name, others, n=1, cutoff=_SLIP):
            raise ConfigError(
                f"retention: there are no records of {name!r}; did you mean {near!r}? "
                f"If not, give {near!r} its own retention as well"
            )
    if (
        consumer is not None
        and consumer not in own
        and consumer not in ledger.retentions()
        # A consumer whose name is like no other may have no records yet, or none left: that must
        # not stop a nightly job.
        and get_close_matches(consumer, consumers(ledger), n=1, cutoff=_SLIP)
    ):
        check_known(ledger, consumer)
    if older_than is not None:
        return {name: own.get(name, older_than) for name in names}
    kept_by = policy_retentions(ledger, names)
    return {name: own.get(name, kept_by[name]) for name in names}


def policy_retentions(ledger: Ledger, names: Iterable[str]) -> Mapping[str, Duration]:
    """How long records of these consumers are kept by their own policies."""
    kept_by = ledger.retentions()
    return {name: kept_by.get(name, RETENTION) for name in names}


def problems(
    ledger: Ledger,
    *,
    program: Program = "worker",
    lease: Duration = LEASE,
    broker_timeout: Duration | None = None,
    replay_window: Duration | None = None,
    retention: Duration | None = None,
) -> Sequence[str]:
    """What can lose or repeat messages, a sentence each: the store's own, with the privileges that
    its role lacks for a `program` of that kind, and the settings'.

    `replay_window` is how long after a message was last seen it may be delivered again;
    `broker_timeout` how long the broker waits for an acknowledgement. Without them nothing is
    said about retention and lease. The retention is each consumer's own, unless one is given.
    """
    found = [*ledger.problems(program), *_set_back(ledger), *_of_workers(ledger)]
    if replay_window is not None:
        window_s = seconds(replay_window, "replay_window")
        # By the words that name the consumer in a sentence.
        of_whom: dict[str, Duration] = {"": RETENTION if retention is None else retention}
        if retention is None and (stored := sorted(ledger.retentions().items())):
            of_whom = {
                f" of {name!r}": f"{own / DAY:g}d" if own.days else f"{own.total_seconds():g}s"
                for name, own in stored
            }
        found += [
            f"The retention{whose} ({kept}) is not longer than the replay window "
            f"({replay_window}): a message that is delivered again after its record was purged is "
            "refused as too old, and without a time it runs again. Keep records for longer than "
            "producers retry, brokers redeliver and a worker holds a delivery that it has not "
            "claimed, all together."
            for whose, kept in of_whom.items()
            if seconds(kept, "retention") <= window_s
        ]
    if broker_timeout is not None:
        lease_s, timeout_s = lease_seconds(lease), seconds(broker_timeout, "broker_timeout")
        if lease_s is None or lease_s >= timeout_s:
            found.append(
                f"The lease ({lease}) is not shorter than the broker's acknowledgement timeout "
                f"({broker_timeout}): what a killed worker had claimed waits for the end of its "
                "lease with another worker, unacknowledged, and the broker takes it back before. "
                "Set the lease to less than the timeout."
            )
    return found


def _set_back(ledger: Ledger) -> Iterator[str]:
    """What the last worker has noted that found the ledger as it was earlier, for a week."""
    for each in ledger.operations.audit(1_000):
        if each.action == SET_BACK and each.at > ledger.now() - 7 * DAY_S:
            yield (
                f"The ledger was set back, by a restore or a failover: what was stored {each.why} "
                f"may be gone, as {each.by} noticed. What was handled in that time runs again when "
                "it is delivered again, or still waits in the ledger. Raise forgotten_until in the "
                "table message_consumers past that time, so that such messages become dead "
                "letters: see the docs, Operating, After a restore."
            )
            return


def _of_workers(ledger: Ledger) -> Iterator[str]:
    """Workers that are gone, and whose messages wait for the end of their leases; and consumers
    for which nobody works.
    """
    found = workers(ledger)
    for each in found:
        if each.state == GONE and each.worker.claims:
            name = each.worker.name
            yield f"{name} is {each.in_words}. If it is dead, type: oncely worker dead {name}"
    yield from _left_behind(ledger, found)


def left_to_senders(ledger: Ledger) -> Iterator[str]:
    """What may run again, and runs only when its sender sends it again: a sentence for each
    consumer.
    """
    now = ledger.now()
    for (consumer, state), tally in sorted(ledger.tallies(EXACT).items()):
        oldest = ledger.scan(consumer, state, limit=1, waits_for_sender=True)
        for record in oldest if tally.for_sender else ():
            yield (
                f"{tally.for_sender:,} of the messages of {consumer!r} may run again, and wait for "
                f"their sender since {moment(record.last_seen, now)}: whoever sent them (a broker, "
                "an HTTP client, a script) has to send them again, under the same ids. List them: "
                f"oncely list --state waits-for-its-sender --consumer {shlex.quote(consumer)}"
            )


def _left_behind(ledger: Ledger, found: Sequence[SeenWorker]) -> Iterator[str]:
    """Consumers whose messages wait in the ledger, and for which nobody works, while others do."""
    last_day = ledger.now() - DAY_S
    rows = ledger.operations.activity(int(last_day)) if ledger.can_defer else []
    active = {each.consumer: each.began for each in rows}
    living = [each.worker for each in found if each.is_alive]
    # A worker of several consumers, such as Celery's, names none: it may be of any.
    without = ("program", "http", "webhook", "relay", "bridge")
    if any(not each.consumer and each.kind not in without for each in living):
        return
    alive = {each.id: each.consumer for each in living}
    at_work = {each.consumer for each in rows if each.worker in alive} | {*alive.values()} - {""}
    at_work |= {each.consumer for each in ledger.operations.runs() if each.began > last_day}
    for name, backlog in sorted(backlogs(ledger).retries.items()):
        later = {other for other, began in active.items() if began >= active.get(name, 0)}
        if name not in at_work and (at_work | later) - {name}:
            yield (
                f"No worker of the consumer {name!r} is running, while others are, or were since: "
                f"{backlog.waiting:,} of its messages wait for a retry, and {backlog.set_aside:,} "
                "are dead letters. If it is only stopped, start it. If it was renamed, give it "
                f"back the name, as in .idempotent(ledger, {name!r}): under another, nobody "
                "retries these, and what it has handled runs again when it is delivered again."
            )
