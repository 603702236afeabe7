"""Windows: some records in the order of the keys' index, and which of them fit."""

from typing import Any

from sqlalchemy import Connection, Select, and_, func, literal, or_, select
from sqlalchemy.sql.expression import ColumnCollection

from oncely.core.record import State
from oncely.stores.sql.dialect import ConnectedTables
from oncely.stores.sql.record_queries import NOT_COMPLETED, fitting, is_known
from oncely.stores.store import Look, Window

FEW = 10_000
"""Up to so many records that are not completed are looked at at once, in their own index."""

_Columns = ColumnCollection[str, Any]


def window(at: ConnectedTables[Connection], look: Look) -> Window:
    """As the Store protocol says."""
    states = {query.state for query in look.fits}
    c, now = at.dialect.table.c, at.dialect.time(at.link)
    # Whether a record fits is not a condition: the database would go on reading until enough fit.
    fits = or_(*(fitting(at.dialect, query, now) for query in look.fits))
    is_fitting = and_(is_known(at.dialect), fits).label("fits")
    chosen = select(c.message_id, c.provider, is_fitting)
    if at.dialect.samples and not states & {None, State.COMPLETED}:
        values = sorted(state.value for state in states if state is not None)
        unfinished = (NOT_COMPLETED, c.status.in_(values))
        few = select(literal(1)).select_from(at.dialect.table).where(*unfinished).limit(FEW + 1)
        counted = select(func.count()).select_from(few.subquery())
        [[count]] = at.dialect.selected(at.link, counted)
        if count <= FEW:
            # The range of ids is left to the query around this one: for the range, the database
            # would take the index of the keys, and read what is completed. The limit keeps the two
            # apart; a few more may be there since they were counted.
            some = chosen.where(*unfinished).limit(2 * FEW).subquery()
            fitting_ones = select(some).where(some.c.fits)
            return _first(at, look, fitting_ones, some.c, look.limit)._replace(looked_at=count)
    return _first(at, look, chosen, c, look.size)


def _first(
    at: ConnectedTables[Connection], look: Look, chosen: Select[Any], c: _Columns, size: int
) -> Window:
    """Of about the first `size` rows of `chosen` after the end of the window before."""
    chosen = chosen.order_by(c.message_id, c.provider)
    # No upper bound: if PostgreSQL guessed that few rows are below it, it would read all of them
    # and sort them. One lower bound: with two, SQLite would begin to read at the first of them.
    # Databases compare ids by the code points of their characters, as Python does.
    is_later = c.message_id >= look.begins
    if look.after is not None and look.after >= look.begins:
        is_later = c.message_id > look.after
    rows = _read(at, chosen.where(is_later).limit(size + 1))
    within = [row for row in rows if row[0].startswith(look.begins)]
    is_last = len(within) <= size
    if not is_last:
        # The row that is one too many shows whether all records of the last id are here. If not,
        # they are left to the next window, unless there is no other id.
        last = rows[-1][0]
        before = [row for row in rows if row[0] != last]
        within = before or _read(at, chosen.where(c.message_id == last))
    return Window.of(within, look.limit, is_last=is_last)


def _read(at: ConnectedTables[Connection], chosen: Select[Any]) -> list[tuple[str, str, bool]]:
    # In SQLite an id may be bytes, which come after all text: no page could name that record.
    rows = at.dialect.selected(at.link, chosen)
    return [(id_, consumer, fits) for id_, consumer, fits in rows if isinstance(id_, str)]
