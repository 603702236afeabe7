"""Where a ledger stands."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from oncely.core.record import State
from oncely.core.waiting import OUTBOX, consumer_of, name_of_queue
from oncely.ledger import Ledger
from oncely.ops.known import names_in
from oncely.stores.store import Backlog, Tally


@dataclass(frozen=True, slots=True)
class Summary:
    """What records add up to."""

    counts: Mapping[State, int]
    in_doubt: int
    """Of those in processing: how many have a lease that has run out."""
    duplicates: int
    """Deliveries turned away."""
    oldest_processing_s: float | None
    """How long ago the one in processing that was not seen for longest was last seen."""
    waiting: int
    """Messages that wait in the ledger to be tried again."""
    waiting_lag_s: float
    """For how long the oldest of them that is due has waited."""
    dead_letters: int

    @property
    def records(self) -> int:
        """How many there are."""
        return sum(self.counts.values())

    def as_dict(self) -> dict[str, Any]:
        """The summary as JSON has it."""
        return {
            "records": self.records,
            **{state.word: self.counts.get(state, 0) for state in State},
            "in_doubt": self.in_doubt,
            "duplicates": self.duplicates,
            "oldest_processing_s": self.oldest_processing_s,
            "waiting": self.waiting,
            "waiting_lag_s": self.waiting_lag_s,
            "dead_letters": self.dead_letters,
        }


@dataclass(frozen=True, slots=True)
class Status:
    """Where a ledger stands."""

    consumers: Mapping[str, Summary]
    total: Summary
    backlog: Backlog
    """What waits to be sent."""
    queues: Mapping[str, Backlog]
    """What programs have put into each queue of the ledger."""
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


def status(ledger: Ledger) -> Status:
    """Where the ledger stands, for each consumer and in total."""
    tallies = ledger.tallies()
    backlogs = ledger.mailbox.backlogs()
    now = ledger.now()
    retries = _named_by(consumer_of, backlogs)
    return Status(
        consumers={
            name: _summary(
                [(state, tally) for (owner, state), tally in tallies.items() if owner == name],
                [retries[name]] if name in retries else [],
                now,
            )
            for name in sorted({*names_in(tallies), *retries})
        },
        total=_summary(
            [(state, tally) for (_, state), tally in tallies.items()], [*retries.values()], now
        ),
        backlog=backlogs.get(OUTBOX, Backlog(waiting=0, set_aside=0, lag_s=0.0)),
        queues=_named_by(name_of_queue, backlogs),
        size_bytes=ledger.size(),
    )


def _named_by(
    name_of: Callable[[str], str | None], backlogs: Mapping[str, Backlog]
) -> Mapping[str, Backlog]:
    """The backlogs of those queues that have such a name, by it."""
    names = {queue: name_of(queue) for queue in backlogs}
    return {name: backlogs[queue] for queue, name in names.items() if name is not None}


def _summary(
    tallies: Sequence[tuple[State, Tally]], retries: Sequence[Backlog], now: float
) -> Summary:
    counts: Counter[State] = Counter()
    for state, tally in tallies:
        counts[state] += tally.count
    processing = [tally for state, tally in tallies if state is State.PROCESSING]
    return Summary(
        counts=counts,
        in_doubt=sum(tally.lease_over for tally in processing),
        duplicates=sum(tally.duplicates for _, tally in tallies),
        oldest_processing_s=max((now - tally.oldest for tally in processing), default=None),
        waiting=sum(each.waiting for each in retries),
        waiting_lag_s=max((each.lag_s for each in retries), default=0.0),
        dead_letters=sum(each.set_aside for each in retries),
    )
