"""What operators do, as functions over a ledger: what the command and a dashboard go through."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from difflib import get_close_matches
from functools import partial
from typing import Any, NamedTuple

from oncely.core.deferred import DeferredMessage
from oncely.core.durations import Duration, lease_seconds, seconds
from oncely.core.errors import ConfigError, RefusedError, describe
from oncely.core.ids import MAX_ID_LENGTH
from oncely.core.policy import Policy
from oncely.core.record import Key, Record, State
from oncely.core.rules import Standing, standing
from oncely.ledger import Ledger
from oncely.stores.store import Backlog, Tally

_log = logging.getLogger(__name__)

RETENTION = Policy().retention
LEASE = Policy().lease

IN_DOUBT = "in doubt"
EXHAUSTED = "exhausted"
STATES: Mapping[str, State] = {
    **{state.word: state for state in State},
    IN_DOUBT: State.PROCESSING,
    EXHAUSTED: State.FAILED,
}
"""The words for where a record stands, and the state that each is about."""
_TOLD = 5
"""Names of consumers in a line."""
_SLIP = 0.85
"""From here on two names are so much alike that one may be the other, mistyped."""
RESETTABLE = ("failed", EXHAUSTED, IN_DOUBT)
"""The words for what `reset` is not refused for."""


# ---- Status ------------------------------------------------------------------------------------


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
        }


@dataclass(frozen=True, slots=True)
class Status:
    """Where a ledger stands."""

    consumers: Mapping[str, Summary]
    total: Summary
    backlog: Backlog
    size_bytes: int | None
    """None where the store cannot tell."""

    def as_dict(self) -> dict[str, Any]:
        """The status as JSON has it."""
        return {
            "consumers": {name: summary.as_dict() for name, summary in self.consumers.items()},
            "total": self.total.as_dict(),
            "backlog": asdict(self.backlog),
            "size_bytes": self.size_bytes,
        }


def status(ledger: Ledger) -> Status:
    """Where the ledger stands, for each consumer and in total."""
    tallies = ledger.tallies()
    now = ledger.now()
    return Status(
        consumers={
            name: _summary(
                [(state, tally) for (owner, state), tally in tallies.items() if owner == name], now
            )
            for name in _names(tallies)
        },
        total=_summary([(state, tally) for (_, state), tally in tallies.items()], now),
        backlog=ledger.mailbox.backlog(),
        size_bytes=ledger.size(),
    )


def consumers(ledger: Ledger) -> Sequence[str]:
    """Who has records in the ledger."""
    return _names(ledger.tallies())


def _names(tallies: Iterable[tuple[str, State]]) -> Sequence[str]:
    return sorted({consumer for consumer, _ in tallies})


def _summary(tallies: Sequence[tuple[State, Tally]], now: float) -> Summary:
    counts: Counter[State] = Counter()
    for state, tally in tallies:
        counts[state] += tally.count
    processing = [tally for state, tally in tallies if state is State.PROCESSING]
    return Summary(
        counts=counts,
        in_doubt=sum(tally.lease_over for tally in processing),
        duplicates=sum(tally.duplicates for _, tally in tallies),
        oldest_processing_s=max((now - tally.oldest for tally in processing), default=None),
    )


# ---- Looking at records ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which records are meant: all that fit every field that is set."""

    consumer: str | None = None
    states: Sequence[str] = ()
    """Words of `STATES`, or of the table's column; any of them fits. Dashes may join two words."""
    older_than: Duration | None = None
    """Last seen longer ago than this."""
    text: str | None = None
    """Stands in the message id."""


@dataclass(frozen=True, slots=True)
class Selected:
    """The records that were found, the least recently seen first."""

    records: Sequence[Record]
    more: bool
    """Whether others fit that were left out, because of the limit."""


def select(ledger: Ledger, selection: Selection, limit: int = 100) -> Selected:
    """At most `limit` records that fit. Raises ConfigError for a word that is not one of `STATES`,
    and for a consumer that the ledger does not know.
    """
    words: Sequence[str | None] = [state_word(each) for each in selection.states] or [None]
    if "failed" in words:
        # These are among the others.
        words = [word for word in words if word != EXHAUSTED]
    found: dict[Key, Record] = {}
    for word in words:
        for record in _scanned(ledger, selection, word, limit + 1):
            found[record.key] = record
    if not found and selection.consumer is not None:
        check_known(ledger, selection.consumer)
    records = sorted(found.values(), key=lambda record: record.last_seen)
    return Selected(records[:limit], len(records) > limit)


def _scanned(
    ledger: Ledger, selection: Selection, word: str | None, limit: int
) -> Sequence[Record]:
    """At most `limit` of those that the word is about."""
    most = limit
    while True:
        scanned = list(
            ledger.scan(
                selection.consumer,
                None if word is None else STATES[word],
                selection.older_than,
                most,
                text=selection.text,
                lease_over=word == IN_DOUBT,
            )
        )
        found = [record for record in scanned if word != EXHAUSTED or record.exhausted]
        if len(found) >= limit or len(scanned) < most:
            return found[:limit]
        # Stores do not look for them: more is to be looked through.
        most *= 4


def state_word(text: str, where: str = "state") -> str:
    """The word of `STATES` that somebody has typed. Raises ConfigError for what is not one."""
    word = text.replace("-", " ").replace("_", " ")
    stored = {state.value: state.word for state in State}
    word = stored.get(word, word)
    if word not in STATES:
        raise ConfigError(f"{where}: {text!r} is none of {', '.join(STATES)}")
    return word


def word_for(record: Record, now: float) -> str:
    """Where a record stands, in the word of `STATES` that says most."""
    match standing(record, now):
        case Standing.IN_DOUBT:
            return IN_DOUBT
        case Standing.EXHAUSTED:
            return EXHAUSTED
        case _:
            return record.state.word


def check_known(ledger: Ledger, consumer: str) -> None:
    """Raise ConfigError where the ledger has no record of a consumer: its name may be a slip."""
    known = consumers(ledger)
    if consumer not in known:
        raise ConfigError(f"no records of consumer {consumer!r}: {told(known)}")


def told(known: Sequence[str]) -> str:
    """Whose records there are, in words."""
    more = ", ..." if len(known) > _TOLD else ""
    return f"the ledger has records of {', '.join(known[:_TOLD]) or 'nobody'}{more}"


def find(ledger: Ledger, message_id: str, consumer: str | None = None) -> Sequence[Record]:
    """The records of a message: that of `consumer`, or those of all who have one. Raises
    ConfigError for a consumer that the ledger does not know.
    """
    names = consumers(ledger) if consumer is None else [consumer]
    found = [ledger.find(Key(name, message_id)) for name in names]
    if consumer is not None and found == [None]:
        check_known(ledger, consumer)
    return [record for record in found if record is not None]


def record_as_dict(record: Record, now: float) -> dict[str, Any]:
    """Every field of a record as JSON has it. Times are seconds since 1970.

    `standing` is where it stands at `now`, in the words of `core/rules.py`.
    """
    return {
        "consumer": record.key.consumer,
        "message_id": record.key.message_id,
        "state": record.state.word,
        "standing": standing(record, now).name.lower(),
        "attempts": record.attempts,
        "fence": record.fence,
        "first_seen": record.first_seen,
        "last_seen": record.last_seen,
        "lease_until": record.lease_until,
        "exhausted": record.exhausted,
        "duplicates": record.duplicates,
        "error": record.error,
        "metadata": record.metadata,
        "result": record.result,
        "fingerprint": record.fingerprint,
        "version": record.version,
    }


class Details(NamedTuple):
    """What is kept besides a record."""

    deferred: Sequence[DeferredMessage]
    """What waits to be sent, in the order of sending."""
    steps: Mapping[str, Any]
    """The results of the finished ones, by their names."""

    def as_dict(self) -> dict[str, Any]:
        """The details as JSON has them."""
        return {
            "deferred": [
                {
                    "id": message.id,
                    "destination": message.destination,
                    "attempts": message.attempts,
                    "error": message.error,
                }
                for message in self.deferred
            ],
            "steps": dict(self.steps),
        }


def details(ledger: Ledger, key: Key) -> Details:
    """What is kept besides the record of `key`."""
    return Details(ledger.mailbox.deferred(key), ledger.steps(key))


# ---- Changing records --------------------------------------------------------------------------


class OperatorRefusal(NamedTuple):
    """A record that was left as it is."""

    key: Key
    reason: str


@dataclass(frozen=True, slots=True)
class Changed:
    """What became of the records that were to be changed."""

    done: Sequence[Key]
    refused: Sequence[OperatorRefusal]
    by: str
    why: str
    """Who and why, as they were noted: cut, and with passwords masked."""


def reset(
    ledger: Ledger,
    records: Sequence[Record],
    *,
    by: str,
    why: str = "",
    on_each: Callable[[int], None] = lambda _: None,
) -> Changed:
    """Allow each to run again; who did it, when and why is kept with the record, and logged.

    `on_each` is told how many have had their turn.
    """
    return _change(records, "reset", (by, why), ledger.reset, on_each)


def forget(
    ledger: Ledger,
    records: Sequence[Record],
    *,
    by: str,
    why: str = "",
    on_each: Callable[[int], None] = lambda _: None,
) -> Changed:
    """Remove each that is still as it was found; who did it and why is logged.

    A record that has changed is refused: what was failed when it was chosen may be completed by
    now, and forgotten it would run again. `on_each` is told how many have had their turn.
    """
    found = {record.key: record for record in records}

    def forget_unchanged(key: Key, **_: str) -> None:
        ledger.forget(key, found=found[key])

    return _change(records, "forgotten", (by, why), forget_unchanged, on_each)


def _change(
    records: Sequence[Record],
    event: str,
    note: tuple[str, str],
    change: Callable[..., None],
    on_each: Callable[[int], None],
) -> Changed:
    by, why = describe(note[0], MAX_ID_LENGTH), describe(note[1])
    done, refused = [], []
    for turn, record in enumerate(records, start=1):
        try:
            change(record.key, by=by, why=why)
        except RefusedError as error:
            refused.append(OperatorRefusal(record.key, str(error)))
        else:
            done.append(record.key)
            _log.info(event, extra={**record.key._asdict(), "by": by, "why": why})
        on_each(turn)
    return Changed(done, refused, by, why)


# ---- Purging -----------------------------------------------------------------------------------


def purge(
    ledger: Ledger,
    older_than: Duration | None = None,
    *,
    consumer: str | None = None,
    retention: Mapping[str, Duration] | None = None,
    batch: int = 1_000,
    on_batch: Callable[[str, int], None] = lambda _, __: None,
) -> Mapping[str, int]:
    """Remove what was last seen longer ago than its consumer's `retention`, or `older_than`, or
    where neither is said as its consumer's own policy says.

    Returns, and logs, how many of each consumer; of `consumer` alone where that is set.
    `on_batch` is told of every batch: whose records, and how many. Raises ConfigError before
    anything is removed when a name in `retention` looks like a slip.
    """
    kept = retentions(ledger, older_than, consumer=consumer, retention=retention)
    return {
        name: ledger.purge(age, name, batch, on_batch=partial(on_batch, name))
        for name, age in kept.items()
    }


def retentions(
    ledger: Ledger,
    older_than: Duration | None,
    *,
    consumer: str | None,
    retention: Mapping[str, Duration] | None,
) -> Mapping[str, Duration]:
    """How long each consumer's records, or those of `consumer` alone, are kept. Raises ConfigError
    when a name in `retention` looks like a slip.
    """
    own = retention or {}
    for name, kept in own.items():
        seconds(kept, f"retention of {name}")
    names = consumers(ledger) if consumer is None else [consumer]
    _refuse_slips(own, names)
    if older_than is not None:
        return {name: own.get(name, older_than) for name in names}
    kept_by = {**ledger.retentions(), **own}
    return {name: kept_by.get(name, RETENTION) for name in names}


def _refuse_slips(retention: Mapping[str, Duration], names: Sequence[str]) -> None:
    # A consumer without records may just have none left. But if its name is a slip, the one that
    # was meant would lose what it was to keep.
    others = [name for name in names if name not in retention]
    for name in retention.keys() - set(names):
        for near in get_close_matches(name, others, n=1, cutoff=_SLIP):
            raise ConfigError(
                f"retention: no record is of {name!r}; did you mean {near!r}? "
                f"If not, give {near!r} a retention of its own as well"
            )


# ---- Checking ----------------------------------------------------------------------------------


def problems(
    ledger: Ledger,
    *,
    lease: Duration = LEASE,
    broker_timeout: Duration | None = None,
    replay_window: Duration | None = None,
    retention: Duration | None = None,
) -> Sequence[str]:
    """What can lose or repeat messages, a sentence each: the store's own, and the settings'.

    `replay_window` is how long after a message was last seen it may be delivered again;
    `broker_timeout` how long the broker waits for an acknowledgement. Without them nothing is
    said about retention and lease. The retention is each consumer's own, unless one is given.
    """
    found = list(ledger.problems())
    if replay_window is not None:
        of_whom = _own_retentions(ledger) if retention is None else {"": retention}
        for whose, kept in of_whom.items():
            found += _forgotten_early(whose, kept, replay_window)
    if broker_timeout is not None:
        found += _runs_out_early(lease, broker_timeout)
    return found


def _own_retentions(ledger: Ledger) -> Mapping[str, Duration]:
    """Of each consumer, as a sentence names it; where none told one, what is assumed."""
    kept = sorted(ledger.retentions().items())
    return {f" of {name!r}": _as_written(own) for name, own in kept} or {"": RETENTION}


def _as_written(kept: timedelta) -> str:
    return f"{kept / timedelta(days=1):g}d" if kept.days else f"{kept.total_seconds():g}s"


def _forgotten_early(whose: str, retention: Duration, replay_window: Duration) -> Sequence[str]:
    if seconds(retention, "retention") > seconds(replay_window, "replay_window"):
        return []
    sentence = (
        f"The retention{whose} ({retention}) is not longer than the replay window "
        f"({replay_window}): a message that is delivered again after its record was purged is "
        "refused as too old, and without a time it runs again. Keep records for longer than "
        "producers retry, brokers redeliver and a worker holds a delivery that it has not claimed, "
        "all together."
    )
    return [sentence]


def _runs_out_early(lease: Duration, broker_timeout: Duration) -> Sequence[str]:
    lease_s = lease_seconds(lease)
    if lease_s is None or lease_s >= seconds(broker_timeout, "broker_timeout"):
        return []
    sentence = (
        f"The lease ({lease}) is shorter than the broker's acknowledgement timeout "
        f"({broker_timeout}). It is extended while the handler runs; but a worker that stalls for "
        "that long loses its claim while the broker still leaves the delivery to it, and another "
        "delivery of the message can run beside it. Set the lease to the timeout or more, or "
        'on_in_doubt = "hold".'
    )
    return [sentence]
