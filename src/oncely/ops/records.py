"""Records: looked at, and looked for."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import nlargest
from typing import Any, NamedTuple

from oncely._util import clock
from oncely.core.durations import Duration, seconds
from oncely.core.errors import ConfigError, MessageError
from oncely.core.ids import check_id, check_text
from oncely.core.record import Key, Record
from oncely.core.rules import Standing, standing
from oncely.core.state_words import EXHAUSTED, state_word
from oncely.core.state_words import FOR_SENDER as FOR_SENDER  # noqa: PLC0414
from oncely.core.state_words import IN_DOUBT as IN_DOUBT  # noqa: PLC0414
from oncely.core.state_words import RESETTABLE as RESETTABLE  # noqa: PLC0414
from oncely.core.state_words import STATES as STATES  # noqa: PLC0414
from oncely.core.waiting import OUTBOX, DeadLetter, WaitingMessage
from oncely.ledger.ledger import Ledger
from oncely.ops.known import check_known, first
from oncely.ops.letters import letter_as_dict
from oncely.ops.waiting import waiting_as_dict
from oncely.stores.store import Look, Query, Wanted

_AS_THEY_ARE = (
    *("attempts", "fence", "first_seen", "last_seen", "lease_until", "exhausted", "duplicates"),
    *("error", "metadata", "result", "fingerprint", "version", "worker"),
)
"""The fields of a record that JSON has without any change."""
PATIENCE_S = 0.1
"""How long a search goes on looking, where nothing else is said."""
_AT_ONCE = 1_000
"""Records that are looked at between two looks at the clock."""


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


class Selected(NamedTuple):
    """The records that were found, in the order that was asked for."""

    records: Sequence[Record]
    more: bool
    """Whether others fit that were left out, because of the limit."""


def select(
    ledger: Ledger, selection: Selection, limit: int = 100, *, newest: bool = False
) -> Selected:
    """At most `limit` records that fit, least recently seen first; or with `newest`, most recently
    seen first. All records in those states are read: `search` looks at a part of them. Raises
    ConfigError for a word that is not one of `STATES`, and for a consumer that the ledger does not
    know.
    """
    found: dict[Key, Record] = {}
    for query in queries(selection):
        if newest:
            looked_at = _newest(ledger, query, limit + 1)
        else:
            looked_at = ledger.scan(
                query.consumer,
                query.state,
                query.older_than_s,
                limit + 1,
                text=query.text,
                lease_over=query.lease_over,
                exhausted=query.exhausted,
                waits_for_sender=query.waits_for_sender,
            )
        found |= {record.key: record for record in looked_at}
    if not found and selection.consumer is not None:
        check_known(ledger, selection.consumer)
    return Selected(*first(sorted(found.values(), key=_age_and_key, reverse=newest), limit))


def queries(selection: Selection) -> Sequence[Query]:
    """What a store has to look for: each record fits at most one of them. Raises ConfigError for a
    word that is not one of `STATES`.
    """
    words = {state_word(each) for each in selection.states}
    # What is in doubt is among those in processing, and the others are among those that failed.
    parts = (IN_DOUBT, EXHAUSTED, FOR_SENDER)
    words -= {word for word in parts if STATES[word].word in words}
    older_than = selection.older_than
    every = Query(
        consumer=selection.consumer,
        older_than_s=None if older_than is None else seconds(older_than, "older_than"),
        text=selection.text,
    )
    return [
        every._replace(
            state=STATES[word],
            lease_over=word == IN_DOUBT,
            exhausted=word == EXHAUSTED,
            waits_for_sender=word == FOR_SENDER,
        )
        for word in sorted(words)
    ] or [every]


def _age_and_key(record: Record) -> tuple[float, Key]:
    # Of those seen at the same moment, the order is the same each time.
    return record.last_seen, record.key


def _newest(ledger: Ledger, query: Query, limit: int) -> Iterable[Record]:
    """The most recently seen ones that fit: stores have no index for that order."""
    wanted = Wanted(
        consumers=None if query.consumer is None else [query.consumer],
        states=None if query.state is None else [query.state],
    )
    now = ledger.now()
    fitting = (
        record for page in ledger.read(wanted=wanted) for record in page if query.holds(record, now)
    )
    # Some stores may give a record twice.
    return nlargest(2 * limit, fitting, key=_age_and_key)


# ---- Looked for in the order of their ids, as far as that goes in a moment ---------------------


class Searched(NamedTuple):
    """What a search has found until it ended."""

    records: Sequence[Record]
    """Those that fit: one whose id is the text that was looked for, then by their ids."""
    looked_at: int
    """How many records were looked at."""
    end: str | None
    """After which id to go on; None: all records were looked at."""


def search(
    ledger: Ledger,
    selection: Selection,
    limit: int = 100,
    *,
    begins: str | None = None,
    after: str | None = None,
    within_s: float = PATIENCE_S,
) -> Searched:
    """The records that fit, in the order of their ids; with `begins`, only those whose ids begin
    so. `after` is the `end` of the search before.

    The search ends as soon as it has found `limit` records, or after `within_s` seconds, but not
    before it has looked at `limit` records: it takes as long in a large ledger as in a small one.
    It may give a few more than `limit`, since the records of one id stay together. A ledger in
    Redis has an order of its own. Raises ConfigError as `select` does, and for a text that no id
    can have.
    """
    for name, text in {"text": selection.text, "begins": begins, "after": after}.items():
        try:
            check_text(text or "", name)
        except MessageError as error:
            raise ConfigError(f"{error}; no id can have it") from error
    fits = queries(selection)
    # A dict has an order, and each key once.
    keys: dict[Key, None] = {}
    with suppress(MessageError):  # A part of an id may be what cannot be an id itself.
        message_id = check_id(begins or selection.text if after is None else None)
        now = ledger.now()
        for record in ledger.of_message(message_id):
            if any(query.holds(record, now) for query in fits):
                keys[record.key] = None
    until = clock.monotonic() + within_s
    looked_at, end = 0, after
    # Where nearly all fit, these are enough.
    size = limit
    while True:
        look = Look(fits, begins or "", end, max(1, limit - len(keys)), size)
        found, some, end = ledger.window(look)
        keys |= dict.fromkeys(found)
        looked_at, size = looked_at + some, _AT_ONCE
        if end is None or len(keys) >= limit or clock.monotonic() >= until:
            break
    if not keys and end is None and selection.consumer is not None:
        check_known(ledger, selection.consumer)
    records = ledger.find_many(keys)
    return Searched([records[key] for key in keys if key in records], looked_at, end)


# ---- One record --------------------------------------------------------------------------------


def word_for(record: Record, now: float) -> str:
    """Where a record stands, as the most specific word of `STATES`."""
    match standing(record, now):
        case Standing.IN_DOUBT:
            return IN_DOUBT
        case Standing.EXHAUSTED:
            return EXHAUSTED
        case _:
            return FOR_SENDER if record.waits_for_sender else record.state.word


def find(ledger: Ledger, message_id: str, consumer: str | None = None) -> Sequence[Record]:
    """The records of a message: that of `consumer`, or those of all consumers that have one. Raises
    ConfigError for a consumer that the ledger does not know.
    """
    if consumer is None:
        return ledger.of_message(message_id)
    found = ledger.find(Key(consumer, message_id))
    if found is None:
        check_known(ledger, consumer)
    return [] if found is None else [found]


def record_as_dict(record: Record, now: float) -> dict[str, Any]:
    """Every field of a record as JSON has it. Times are seconds since 1970.

    `standing` is where it stands at `now`, in the words of `core/rules.py`.
    """
    return {
        "consumer": record.key.consumer,
        "message_id": record.key.message_id,
        "state": record.state.word,
        "standing": standing(record, now).name.lower(),
        **{name: getattr(record, name) for name in _AS_THEY_ARE},
    }


class Details(NamedTuple):
    """What is kept besides a record."""

    deferred: Sequence[WaitingMessage]
    """The messages that wait to be sent, in the order of sending."""
    steps: Mapping[str, Any]
    """The results of the finished steps, by their names."""
    retry: WaitingMessage | None
    """The message itself, where it waits for its retry."""
    letters: Sequence[DeadLetter]
    """The dead letters of the message."""

    def as_dict(self, now: float) -> dict[str, Any]:
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
            "waiting": self.retry and waiting_as_dict(self.retry, now, is_whole=True),
            "dead_letters": [letter_as_dict(letter, is_whole=True) for letter in self.letters],
        }


def details(ledger: Ledger, key: Key) -> Details:
    """What is kept besides the record of `key`."""
    mailbox = ledger.mailbox
    retry = mailbox.retries([key]).get(key)
    waits = retry is not None and not retry.is_set_aside
    return Details(
        mailbox.deferred(key),
        ledger.steps(key),
        retry if waits else None,
        mailbox.dead_of(key),
    )


@dataclass(frozen=True, slots=True)
class Doubt:
    """A record in doubt, and what its handler had come to."""

    record: Record
    steps: Sequence[str]
    """The names of its finished steps, which are not run again."""
    unsent: int
    """Deferred messages that wait to be sent: usually none, as what a handler sends is stored with
    its success.
    """
    is_kept: bool
    """Whether the ledger has the message itself, waiting or as a dead letter."""
    claimed_by: str | None
    """HOST:PID of who claimed it, as far as that is known."""

    def as_dict(self, now: float) -> dict[str, Any]:
        """The record as JSON has it, and these."""
        return record_as_dict(self.record, now) | {
            "steps": [*self.steps],
            "unsent": self.unsent,
            "is_kept": self.is_kept,
            "claimed_by": self.claimed_by,
        }


def doubts(ledger: Ledger, records: Sequence[Record]) -> Sequence[Doubt]:
    """What is known of each of these records in doubt, in the same order."""
    keys = [record.key for record in records]
    steps, waiting = ledger.steps_of(keys), ledger.mailbox.of_many(keys)
    names = {each.number: each.name for each in ledger.operations.workers()}
    found = []
    for record in records:
        queues = [each.queue for each in waiting.get(record.key, [])]
        unsent = queues.count(OUTBOX)
        of_worker = None if record.worker is None else names.get(record.worker)
        found.append(Doubt(record, [*steps[record.key]], unsent, len(queues) > unsent, of_worker))
    return found
