"""Where a ledger stands."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from oncely.core.record import State
from oncely.core.waiting import OUTBOX, consumer_of, name_of_queue
from oncely.ledger.ledger import Ledger
from oncely.ops.known import EXACT
from oncely.stores.store import Backlog, Tally


@dataclass(frozen=True, slots=True)
class Summary:
    """Totals over records."""

    counts: Mapping[State, int]
    in_doubt: int
    """Of those in processing: how many have a lease that has run out."""
    waiting_for_sender: int
    """Of those that failed: how many an operator has allowed to run again, and whose sender has to
    send them again.
    """
    duplicates: int
    """Deliveries turned away."""
    oldest_processing_s: float | None
    """How long ago the least recently seen record in processing was last seen."""
    waiting: int
    """Messages that wait in the ledger for a retry."""
    waiting_lag_s: float
    """How long the oldest of them that is due has been due."""
    dead_letters: int
    in_doubt_s: float | None = None
    """How long ago the first of their leases ran out; None where none is in doubt."""
    waiting_for_sender_s: float | None = None
    """For how long the first of those has waited for its sender."""
    is_estimate: bool = False
    """Whether the counts of completed records and of duplicates are what a sample says, as they
    are of a large ledger.
    """

    @property
    def records(self) -> int:
        """How many there are."""
        return sum(self.counts.values())

    @property
    def failed(self) -> int:
        """Messages that failed, and do not wait in the ledger for a retry."""
        return max(0, self.counts.get(State.FAILED, 0) - self.waiting)

    def as_dict(self) -> dict[str, Any]:
        """The summary as JSON has it."""
        return {
            "records": self.records,
            **{state.word: self.counts.get(state, 0) for state in State},
            "failed": self.failed,
            **{each.name: getattr(self, each.name) for each in fields(self)[1:]},
        }


@dataclass(frozen=True, slots=True)
class Status:
    """Where a ledger stands."""

    consumers: Mapping[str, Summary]
    total: Summary
    backlog: Backlog
    """The messages that wait to be sent."""
    queues: Mapping[str, Backlog]
    """As in Backlogs."""
    size_bytes: int | None
    """None where the store cannot tell."""

    def as_dict(self) -> dict[str, Any]:
        """The status as JSON has it."""
        return {
            "consumers": {name: summary.as_dict() for name, summary in self.consumers.items()},
            "total": self.total.as_dict(),
            "backlog": asdict(self.backlog),
            "queues": {name: asdict(backlog) for name, backlog in self.queues.items()},
            "size_bytes": self.size_bytes,
        }


class Backlogs(NamedTuple):
    """How much waits in a ledger."""

    outbox: Backlog
    """The messages that wait to be sent."""
    queues: Mapping[str, Backlog]
    """The messages that programs have put into each queue; and those that a broker holds, as far as
    it tells the consumers that are at work.
    """
    retries: Mapping[str, Backlog]
    """The messages of each consumer that wait for a retry; those set aside are dead letters."""


def status(ledger: Ledger) -> Status:
    """Where the ledger stands, for each consumer and in total. Of more than EXACT records, what is
    completed is estimated: no table is read from end to end.
    """
    tallies = ledger.tallies(EXACT)
    outbox, queues, retries = backlogs(ledger)
    now = ledger.now()
    owned: dict[str, list[tuple[State, Tally]]] = {name: [] for name in retries}
    for (owner, state), tally in tallies.items():
        owned.setdefault(owner, []).append((state, tally))
    return Status(
        consumers={
            name: _summary(owned[name], [retries[name]] if name in retries else [], now)
            for name in sorted(owned)
        },
        total=_summary(
            [(state, tally) for (_, state), tally in tallies.items()], [*retries.values()], now
        ),
        backlog=outbox,
        queues=queues,
        size_bytes=ledger.size(),
    )


def backlogs(ledger: Ledger) -> Backlogs:
    """How much waits in the ledger; nothing of what is completed is read."""
    found = ledger.mailbox.backlogs()
    return Backlogs(
        found.get(OUTBOX, Backlog(waiting=0, set_aside=0, lag_s=0.0)),
        {**_named_by(name_of_queue, found), **ledger.mailbox.broker_backlogs()},
        _named_by(consumer_of, found),
    )


def _named_by(
    name_of: Callable[[str], str | None], backlogs: Mapping[str, Backlog]
) -> Mapping[str, Backlog]:
    """The backlogs of the queues to which `name_of` gives a name, by that name."""
    names = {queue: name_of(queue) for queue in backlogs}
    return {name: backlogs[queue] for queue, name in names.items() if name is not None}


def _summary(
    tallies: Sequence[tuple[State, Tally]], retries: Sequence[Backlog], now: float
) -> Summary:
    counts: Counter[State] = Counter()
    for state, tally in tallies:
        counts[state] += tally.count
    processing = [tally for state, tally in tallies if state is State.PROCESSING and tally.count]
    return Summary(
        counts=counts,
        in_doubt=sum(tally.lease_over for tally in processing),
        waiting_for_sender=sum(tally.for_sender for _, tally in tallies),
        duplicates=sum(tally.duplicates for _, tally in tallies),
        oldest_processing_s=_ago(now, (tally.oldest for tally in processing)),
        waiting=sum(each.waiting for each in retries),
        waiting_lag_s=max((each.lag_s for each in retries), default=0.0),
        dead_letters=sum(each.set_aside for each in retries),
        in_doubt_s=_ago(now, (tally.over_since for tally in processing)),
        waiting_for_sender_s=_ago(now, (tally.for_sender_since for _, tally in tallies)),
        is_estimate=any(tally.is_estimate for _, tally in tallies),
    )


def _ago(now: float, times: Iterable[float | None]) -> float | None:
    """How long ago the earliest was; None where there is none."""
    return max((now - at for at in times if at is not None), default=None)
