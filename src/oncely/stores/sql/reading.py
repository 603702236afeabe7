"""Reading many records: the longest unseen, and all of a range of keys, page by page."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, Table, and_, or_, select, true

from oncely.core.record import Key, Record, State
from oncely.stores.base import KeyRange, Query, Span, Wanted
from oncely.stores.sql.database import Database
from oncely.stores.sql.rows import record_of

_PAGE = 1_000
"""Records that are read, and held, at a time."""
_SAMPLES = 16
"""Keys that are looked at for each range: then one is seldom twice as large as another."""


def longest_unseen(
    database: Database, connection: Connection, condition: ColumnElement[bool], limit: int
) -> Sequence[Record]:
    """At most `limit` records, those first that were not seen for longest."""
    c = database.table.c
    chosen = _records(database).where(condition).order_by(c.last_processed_at, c.id).limit(limit)
    return _read(connection, chosen)


def key_ranges(database: Database, connection: Connection, number: int) -> Sequence[KeyRange]:
    """Ranges as the Store protocol says, from a sample of the keys."""
    sample = database.sample_ids(connection, number * _SAMPLES)
    parts = max(1, min(number, len(sample)))
    cuts = [sample[len(sample) * part // parts] for part in range(1, parts)]
    return [KeyRange(after, until) for after, until in pairwise([None, *cuts, None])]


def page(
    database: Database, condition: ColumnElement[bool], last: Key | None, connection: Connection
) -> Sequence[Record]:
    """The first records that fit after `last`, in the order of the keys' index."""
    c = database.table.c
    chosen = _records(database).where(condition).order_by(c.message_id, c.provider).limit(_PAGE)
    if last is not None:
        # The first condition says nothing more. But MariaDB finds no place in the index by others.
        chosen = chosen.where(
            c.message_id >= last.message_id,
            or_(c.message_id > last.message_id, c.provider > last.consumer),
        )
    return _read(connection, chosen)


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
    if wanted.ids is not None:
        conditions.append(c.message_id.in_(wanted.ids))
    if wanted.states is not None:
        conditions.append(c.status.in_([state.value for state in wanted.states]))
    conditions += _within(database.epoch("first_processed_at"), wanted.first_seen)
    conditions += _within(database.epoch("last_processed_at"), wanted.last_seen)
    return and_(*conditions)


def is_known(table: Table) -> ColumnElement[bool]:
    """Rows with a status that ours is none of are somebody else's."""
    return table.c.status.in_([state.value for state in State])


def _within(moment: ColumnElement[float], span: Span) -> list[ColumnElement[bool]]:
    bounds = []
    if span.since is not None:
        bounds.append(moment >= span.since)
    if span.until is not None:
        bounds.append(moment <= span.until)
    return bounds


def _records(database: Database) -> Select[Any]:
    table = database.table
    return select(*database.loaded()).select_from(table).where(is_known(table))


def _read(connection: Connection, chosen: Select[Any]) -> Sequence[Record]:
    return [record_of(tuple(row)) for row in connection.execute(chosen)]
