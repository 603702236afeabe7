"""Records: looked at, and changed."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Any, NamedTuple

from oncely.core.durations import Duration, seconds
from oncely.core.errors import ConfigError, RefusedError, describe
from oncely.core.ids import MAX_ID_LENGTH
from oncely.core.record import Key, Record, State
from oncely.core.rules import Standing, standing
from oncely.core.waiting import WaitingMessage
from oncely.ledger import Ledger
from oncely.ops.known import check_known, consumers
from oncely.stores.store import Wanted

_log = logging.getLogger(__name__)

IN_DOUBT = "in doubt"
EXHAUSTED = "exhausted"
STATES: Mapping[str, State] = {
    **{state.word: state for state in State},
    IN_DOUBT: State.PROCESSING,
    EXHAUSTED: State.FAILED,
}
"""The words for where a record stands, and the state that each is about."""
RESETTABLE = ("failed", EXHAUSTED, IN_DOUBT)
"""The words for what `reset` is not refused for."""


# ---- Looking -----------------------------------------------------------------------------------


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
    """The records that were found, in the order that was asked for."""

    records: Sequence[Record]
    more: bool
    """Whether others fit that were left out, because of the limit."""


def select(
    ledger: Ledger, selection: Selection, limit: int = 100, *, newest: bool = False
) -> Selected:
    """At most `limit` records that fit; the `newest`, those first, for which all that are in the
    states asked for are read. Raises ConfigError for a word that is not one of `STATES`, and for a
    consumer that the ledger does not know.
    """
    words: Sequence[str | None] = [state_word(each) for each in selection.states] or [None]
    if "failed" in words:
        # These are among the others.
        words = [word for word in words if word != EXHAUSTED]
    look = _newest if newest else _scanned
    found: dict[Key, Record] = {}
    for word in words:
        for record in look(ledger, selection, word, limit + 1):
            found[record.key] = record
    if not found and selection.consumer is not None:
        check_known(ledger, selection.consumer)
    records = sorted(found.values(), key=_age_and_key, reverse=newest)
    return Selected(records[:limit], len(records) > limit)


def _age_and_key(record: Record) -> tuple[float, Key]:
    # Of those seen at the same moment, the order is the same each time.
    return record.last_seen, record.key


def _newest(ledger: Ledger, selection: Selection, word: str | None, limit: int) -> Sequence[Record]:
    """As `_scanned`, those last seen most recently: stores keep them in no order for that."""
    consumer, older_than = selection.consumer, selection.older_than
    wanted = Wanted(
        consumers=None if consumer is None else [consumer],
        states=None if word is None else [STATES[word]],
    )
    now = ledger.now()
    until = math.inf if older_than is None else now - seconds(older_than, "older_than")
    fitting = (
        record
        for page in ledger.read(wanted=wanted)
        for record in page
        if (selection.text or "") in record.key.message_id
        and record.last_seen < until
        and (word not in (IN_DOUBT, EXHAUSTED) or word_for(record, now) == word)
    )
    # Some stores may give a record twice.
    return nlargest(2 * limit, fitting, key=_age_and_key)


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

    deferred: Sequence[WaitingMessage]
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


# ---- Changing ----------------------------------------------------------------------------------


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
