"""Reading many records: the least recently seen, and all of a range of keys, page by page."""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    and_,
    case,
    exists,
    func,
    literal_column,
    or_,
    select,
    true,
)

from oncely.core.record import Key, Record, State
from oncely.stores.sql.access import Access
from oncely.stores.sql.database import Database
from oncely.stores.sql.record_rows import record_of
from oncely.stores.sql.row_values import read
from oncely.stores.store import KeyRange, Query, Tally, Wanted

_PAGE = 1_000
"""Records that are read, and in memory, at a time."""
NOT_COMPLETED: ColumnElement[bool] = literal_column(f"status <> '{State.COMPLETED.value}'")
"""As the index of such records has it, so that it is used."""
_TALLIED = ("provider", "status", "last_processed_at")
_SAMPLES = 16
"""Keys that are sampled for each range: then one range is seldom twice as large as another."""


def longest_unseen(at: Access[Connection], query: Query) -> Sequence[Record]:
    """As `Store.scan` says."""
    c = at.database.table.c
    chosen = _records(at.database).where(fitting(at.database, query, at.database.time(at.link)))
    return _read(at, chosen.order_by(c.last_processed_at, c.id).limit(query.limit))


def of_message(at: Access[Connection], message_id: str) -> Sequence[Record]:
    """As the Store protocol says."""
    c = at.database.table.c
    chosen = _records(at.database).where(c.message_id == message_id)
    return _read(at, chosen.order_by(c.provider))


def key_ranges(at: Access[Connection], number: int) -> Sequence[KeyRange]:
    """Ranges as the Store protocol says, from a sample of the keys."""
    sample = at.database.sample_ids(at.link, number * _SAMPLES)
    parts = max(1, min(number, len(sample)))
    cuts = [sample[len(sample) * part // parts] for part in range(1, parts)]
    return [KeyRange(after, until) for after, until in pairwise([None, *cuts, None])]


def page(
    condition: ColumnElement[bool], last: Key | None, at: Access[Connection]
) -> Sequence[Record]:
    """The first records that fit after `last`, in the order of the keys' index."""
    c = at.database.table.c
    chosen = _records(at.database).where(condition).order_by(c.message_id, c.provider).limit(_PAGE)
    if last is not None:
        # The first condition follows from the second, but MariaDB needs it to use the index.
        chosen = chosen.where(
            c.message_id >= last.message_id,
            or_(c.message_id > last.message_id, c.provider > last.consumer),
        )
    return _read(at, chosen)


def tallies(
    at: Access[Connection], unfinished: int | None = None
) -> Mapping[tuple[str, State], Tally]:
    """As the Store protocol says; of so many at most that are not completed, where that is set."""
    c = at.database.table.c
    chosen = select(
        c.provider,
        c.status,
        c.duplicates,
        at.database.epoch("lease_until").label("lease_until"),
        at.database.epoch("last_processed_at").label("last_seen"),
    )
    chosen = chosen.where(is_known(at.database))
    if unfinished is not None:
        chosen = chosen.where(NOT_COMPLETED).limit(unfinished)
    r = chosen.subquery().c
    now = at.database.time(at.link)
    lease_over = func.count(case((r.lease_until <= now, 1)))
    totals = (func.min(r.last_seen), func.count(), lease_over, func.sum(r.duplicates))
    chosen = select(r.provider, r.status, *totals).group_by(r.provider, r.status)
    tallies = {}
    for row in at.database.selected(at.link, chosen):
        consumer, state, oldest = read(at.database.table, _TALLIED, row).values()
        count, over, duplicates = row[len(_TALLIED) :]
        tallies[consumer, state] = Tally(count, over, oldest, int(duplicates))
    return tallies


def purge(
    query: Query, states: Sequence[State], after: str, at: Access[Connection]
) -> tuple[int, str]:
    """One batch of `Store.purge`, from the place `after` on; as `Database.purge` returns."""
    # To look for waiting messages and steps of each record costs as much as the rest of the purge.
    # Rows that come into these tables from now on are not of records that are old enough.
    some_wait, some_steps = at.database.has_beside(at.link)
    now = at.database.time(at.link)
    record, of_record = at.database.table.c, at.database.waiting_table.c
    condition = and_(
        record.status.in_([state.value for state in states]), fitting(at.database, query, now)
    )
    if some_wait:
        waits = exists().where(
            of_record.message_id == record.message_id, of_record.provider == record.provider
        )
        condition = and_(condition, ~waits)
    horizon = now - (query.older_than_s or 0.0)
    return at.database.purge(
        at.link, condition, query.limit, horizon, steps=some_steps, after=after
    )


def fitting(database: Database, query: Query, now: float) -> ColumnElement[bool]:
    """The records that fit a query, by the time `now`."""
    c = database.table.c
    conditions: list[ColumnElement[bool]] = [true()]
    if query.consumer is not None:
        conditions.append(c.provider == query.consumer)
    if query.state is not None:
        conditions += _in_states(database, [query.state])
    if query.text is not None:
        conditions.append(database.holds_text(query.text))
    if query.lease_over:
        conditions.append(database.epoch("lease_until") <= now)
    if query.exhausted:
        conditions.append(c.exhausted.is_(True))
    if query.older_than_s is not None:
        conditions.append(database.epoch("last_processed_at") < now - query.older_than_s)
    return and_(*conditions)


def wanted_of(database: Database, keys: KeyRange, wanted: Wanted) -> ColumnElement[bool]:
    """The records of a range that are wanted."""
    c = database.table.c
    conditions: list[ColumnElement[bool]] = [true()]
    if keys.after is not None:
        conditions.append(c.message_id > keys.after)
    if keys.until is not None:
        conditions.append(c.message_id <= keys.until)
    if wanted.consumers is not None:
        conditions.append(c.provider.in_(wanted.consumers))
    if wanted.states is not None:
        conditions += _in_states(database, wanted.states)
    return and_(*conditions)


def _in_states(database: Database, states: Collection[State]) -> Sequence[ColumnElement[bool]]:
    found = database.table.c.status.in_([state.value for state in states])
    return [found] if State.COMPLETED in states else [found, NOT_COMPLETED]


def is_known(database: Database) -> ColumnElement[bool]:
    """Rows with a status that we do not know are somebody else's."""
    return database.table.c.status.in_([state.value for state in State])


def _records(database: Database) -> Select[Any]:
    return select(*database.loaded()).select_from(database.table).where(is_known(database))


def _read(at: Access[Connection], chosen: Select[Any]) -> Sequence[Record]:
    table = at.database.table
    return [record_of(table, row) for row in at.database.selected(at.link, chosen)]
