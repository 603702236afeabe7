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
from oncely.stores.sql.dialect import ConnectedTables, Dialect
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


def longest_unseen(at: ConnectedTables[Connection], query: Query) -> Sequence[Record]:
    """As `Store.scan` says."""
    c = at.dialect.table.c
    chosen = _records(at.dialect).where(fitting(at.dialect, query, at.dialect.time(at.link)))
    return _read(at, chosen.order_by(c.last_processed_at, c.id).limit(query.limit))


def of_message(at: ConnectedTables[Connection], message_id: str) -> Sequence[Record]:
    """As the Store protocol says."""
    c = at.dialect.table.c
    chosen = _records(at.dialect).where(c.message_id == message_id)
    return _read(at, chosen.order_by(c.provider))


def key_ranges(at: ConnectedTables[Connection], number: int) -> Sequence[KeyRange]:
    """Ranges as the Store protocol says, from a sample of the keys."""
    sample = at.dialect.sample_ids(at.link, number * _SAMPLES)
    parts = max(1, min(number, len(sample)))
    cuts = [sample[len(sample) * part // parts] for part in range(1, parts)]
    return [KeyRange(after, until) for after, until in pairwise([None, *cuts, None])]


def page(
    at: ConnectedTables[Connection], condition: ColumnElement[bool], last: Key | None
) -> Sequence[Record]:
    """The first records that fit after `last`, in the order of the keys' index."""
    c = at.dialect.table.c
    chosen = _records(at.dialect).where(condition).order_by(c.message_id, c.provider).limit(_PAGE)
    if last is not None:
        # The first condition follows from the second, but MariaDB needs it to use the index.
        chosen = chosen.where(
            c.message_id >= last.message_id,
            or_(c.message_id > last.message_id, c.provider > last.consumer),
        )
    return _read(at, chosen)


def tallies(
    at: ConnectedTables[Connection], unfinished: int | None = None
) -> Mapping[tuple[str, State], Tally]:
    """As the Store protocol says; of so many at most that are not completed, where that is set."""
    c = at.dialect.table.c
    chosen = select(
        c.provider,
        c.status,
        c.duplicates,
        at.dialect.epoch("lease_until").label("lease_until"),
        at.dialect.epoch("last_processed_at").label("last_seen"),
    )
    chosen = chosen.where(is_known(at.dialect))
    if unfinished is not None:
        chosen = chosen.where(NOT_COMPLETED).limit(unfinished)
    r = chosen.subquery().c
    now = at.dialect.time(at.link)
    lease_over = func.count(case((r.lease_until <= now, 1)))
    totals = (func.min(r.last_seen), func.count(), lease_over, func.sum(r.duplicates))
    chosen = select(r.provider, r.status, *totals).group_by(r.provider, r.status)
    tallies = {}
    for row in at.dialect.selected(at.link, chosen):
        consumer, state, oldest = read(at.dialect.table, _TALLIED, row).values()
        count, over, duplicates = row[len(_TALLIED) :]
        tallies[consumer, state] = Tally(count, over, oldest, int(duplicates))
    return tallies


def purge(
    at: ConnectedTables[Connection], query: Query, states: Sequence[State], after: str
) -> tuple[int, str]:
    """One batch of `Store.purge`, from the place `after` on; as `Dialect.purge` returns."""
    # To look for waiting messages and steps of each record costs as much as the rest of the purge.
    # Rows that come into these tables from now on are not of records that are old enough.
    tables = (at.dialect.waiting_name, at.dialect.steps_name)
    asked = ", ".join(f"EXISTS (SELECT 1 FROM {name})" for name in tables)
    some_wait, some_steps = at.run(f"SELECT {asked}").fetchone()
    now = at.dialect.time(at.link)
    record, of_record = at.dialect.table.c, at.dialect.waiting_table.c
    condition = and_(
        record.status.in_([state.value for state in states]), fitting(at.dialect, query, now)
    )
    if some_wait:
        waits = exists().where(
            of_record.message_id == record.message_id, of_record.provider == record.provider
        )
        condition = and_(condition, ~waits)
    horizon = now - (query.older_than_s or 0.0)
    steps = bool(some_steps)
    return at.dialect.purge(at.link, condition, query.limit, horizon, steps=steps, after=after)


def fitting(dialect: Dialect, query: Query, now: float) -> ColumnElement[bool]:
    """The records that fit a query, by the time `now`."""
    c = dialect.table.c
    conditions: list[ColumnElement[bool]] = [true()]
    if query.consumer is not None:
        conditions.append(c.provider == query.consumer)
    if query.state is not None:
        conditions += _in_states(dialect, [query.state])
    if query.text is not None:
        conditions.append(dialect.holds_text(query.text))
    if query.lease_over:
        conditions.append(dialect.epoch("lease_until") <= now)
    if query.exhausted:
        conditions.append(c.exhausted.is_(True))
    if query.older_than_s is not None:
        conditions.append(dialect.epoch("last_processed_at") < now - query.older_than_s)
    return and_(*conditions)


def wanted_of(dialect: Dialect, keys: KeyRange, wanted: Wanted) -> ColumnElement[bool]:
    """The records of a range that are wanted."""
    c = dialect.table.c
    conditions: list[ColumnElement[bool]] = [true()]
    if keys.after is not None:
        conditions.append(c.message_id > keys.after)
    if keys.until is not None:
        conditions.append(c.message_id <= keys.until)
    if wanted.consumers is not None:
        conditions.append(c.provider.in_(wanted.consumers))
    if wanted.states is not None:
        conditions += _in_states(dialect, wanted.states)
    if wanted.seen_from is not None:
        conditions.append(dialect.epoch("last_processed_at") >= wanted.seen_from)
    if wanted.seen_before is not None:
        conditions.append(dialect.epoch("last_processed_at") < wanted.seen_before)
    return and_(*conditions)


def _in_states(dialect: Dialect, states: Collection[State]) -> Sequence[ColumnElement[bool]]:
    found = dialect.table.c.status.in_([state.value for state in states])
    return [found] if State.COMPLETED in states else [found, NOT_COMPLETED]


def is_known(dialect: Dialect) -> ColumnElement[bool]:
    """Rows with a status that we do not know are somebody else's."""
    return dialect.table.c.status.in_([state.value for state in State])


def _records(dialect: Dialect) -> Select[Any]:
    return select(*dialect.loaded()).select_from(dialect.table).where(is_known(dialect))


def _read(at: ConnectedTables[Connection], chosen: Select[Any]) -> Sequence[Record]:
    table = at.dialect.table
    return [record_of(table, row) for row in at.dialect.selected(at.link, chosen)]
