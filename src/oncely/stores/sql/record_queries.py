"""Reading many records: the longest unseen, and all of a range of keys, page by page."""

from collections.abc import Mapping, Sequence
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
    or_,
    select,
    true,
)

from oncely.core.record import Key, Record, State
from oncely.stores.sql.access import Access
from oncely.stores.sql.database import Database
from oncely.stores.sql.record_rows import record_of
from oncely.stores.store import KeyRange, Query, Tally, Wanted

_PAGE = 1_000
"""Records that are read, and held, at a time."""
_SAMPLES = 16
"""Keys that are looked at for each range: then one is seldom twice as large as another."""


def longest_unseen(at: Access[Connection], query: Query) -> Sequence[Record]:
    """As `Store.scan` says."""
    c = at.database.table.c
    chosen = _records(at.database).where(fitting(at.database, query, at.database.time(at.link)))
    return _read(at, chosen.order_by(c.last_processed_at, c.id).limit(query.limit))


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
        # The first condition says nothing more. But MariaDB finds no place in the index by others.
        chosen = chosen.where(
            c.message_id >= last.message_id,
            or_(c.message_id > last.message_id, c.provider > last.consumer),
        )
    return _read(at, chosen)


def tallies(at: Access[Connection]) -> Mapping[tuple[str, State], Tally]:
    """As the Store protocol says."""
    c, epoch = at.database.table.c, at.database.epoch
    lease_over = func.count(case((epoch("lease_until") <= at.database.time(at.link), 1)))
    oldest = func.min(epoch("last_processed_at"))
    totals = (func.count(), lease_over, oldest, func.sum(c.duplicates))
    chosen = select(c.provider, c.status, *totals).where(_is_known(at.database))
    return {
        (consumer, State(status)): Tally(count, over, oldest, int(duplicates))
        for consumer, status, count, over, oldest, duplicates in at.link.execute(
            chosen.group_by(c.provider, c.status)
        )
    }


def purge(
    query: Query, states: Sequence[State], after: str, at: Access[Connection]
) -> tuple[int, str]:
    """One batch of `Store.purge`, from the place `after` on; as `Database.purge` returns."""
    # To look for what waits, and for steps, costs as much as the rest. What is in these tables from
    # now on is not of messages that were last seen long ago.
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
        conditions.append(c.status == query.state.value)
    if query.text is not None:
        conditions.append(database.holds_text(query.text))
    if query.lease_over:
        conditions.append(database.epoch("lease_until") <= now)
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
        conditions.append(c.status.in_([state.value for state in wanted.states]))
    return and_(*conditions)


def _is_known(database: Database) -> ColumnElement[bool]:
    """Rows with a status that ours is none of are somebody else's."""
    return database.table.c.status.in_([state.value for state in State])


def _records(database: Database) -> Select[Any]:
    return select(*database.loaded()).select_from(database.table).where(_is_known(database))


def _read(at: Access[Connection], chosen: Select[Any]) -> Sequence[Record]:
    return [record_of(tuple(row)) for row in at.link.execute(chosen)]
