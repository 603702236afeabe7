"""Windows: some records in the order of the keys' index, and which of them fit."""

from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, and_, func, literal, or_, select
from sqlalchemy.sql.expression import ColumnCollection

from oncely.core.record import State
from oncely.stores.sql.connected_tables import ConnectedTables
from oncely.stores.sql.record_queries import NOT_COMPLETED, fitting, is_known
from oncely.stores.store import Look, Window

FEW = 10_000
"""Up to so many records that are not completed are looked at at once, in their own index."""

_Columns = ColumnCollection[str, Any]


def window(at: ConnectedTables[Connection], look: Look) -> Window:
    """As the Store protocol says."""
    states = {query.state for query in look.fits}
    if at.dialect.samples and not states & {None, State.COMPLETED}:
        count = _count(at, states)
        if count <= FEW:
            return _of_few(at, look, states)._replace(looked_at=count)
    return _first(at, look, _marked(at, look), at.dialect.table.c, look.size)


def _first(
    at: ConnectedTables[Connection], look: Look, chosen: Select[Any], c: _Columns, size: int
) -> Window:
    """Of about the first `size` rows of `chosen` after the end of the window before."""
    chosen = chosen.order_by(c.message_id, c.provider)
    rows = _read(at, chosen.where(_is_later(c.message_id, look)).limit(size + 1))
    within = [row for row in rows if row[0].startswith(look.begins)]
    is_last = len(within) <= size
    if not is_last:
        # The row that is one too many shows whether all records of the last id are here. If not,
        # they are left to the next window, unless there is no other id.
        last = rows[-1][0]
        before = [row for row in rows if row[0] != last]
        within = before or _read(at, chosen.where(c.message_id == last))
    return Window.of(within, look.limit, is_last=is_last)


def _count(at: ConnectedTables[Connection], states: set[State | None]) -> int:
    """How many are in these states; of more than FEW, one more than that."""
    some = _unfinished(select(literal(1)).select_from(at.dialect.table), at, states)
    chosen = select(func.count()).select_from(some.limit(FEW + 1).subquery())
    [[count]] = at.dialect.selected(at.link, chosen)
    return int(count)


def _of_few(at: ConnectedTables[Connection], look: Look, states: set[State | None]) -> Window:
    """Of all that are in these states."""
    # The range of ids is left to the query around this one: for the range, the database would take
    # the index of the keys, and read what is completed. The limit keeps the two apart; a few more
    # may be there since they were counted.
    some = _unfinished(_marked(at, look), at, states).limit(2 * FEW).subquery()
    return _first(at, look, select(some).where(some.c.fits), some.c, look.limit)


def _unfinished(
    chosen: Select[Any], at: ConnectedTables[Connection], states: set[State | None]
) -> Select[Any]:
    values = sorted(state.value for state in states if state is not None)
    return chosen.where(NOT_COMPLETED, at.dialect.table.c.status.in_(values))


def _marked(at: ConnectedTables[Connection], look: Look) -> Select[Any]:
    """The keys of records, and whether each fits. That is not a condition: the database would go on
    reading until enough fit.
    """
    c = at.dialect.table.c
    now = at.dialect.time(at.link)
    fits = or_(*(fitting(at.dialect, query, now) for query in look.fits))
    return select(c.message_id, c.provider, and_(is_known(at.dialect), fits).label("fits"))


def _is_later(message_id: ColumnElement[str], look: Look) -> ColumnElement[bool]:
    """The ids from which on it looks. There is no upper bound: if PostgreSQL guessed that few rows
    are below it, it would read all of them and sort them. There is one lower bound: with two,
    SQLite would begin to read at the first of them. Databases compare ids by the code points of
    their characters, as Python does.
    """
    if look.after is not None and look.after >= look.begins:
        return message_id > look.after
    return message_id >= look.begins


def _read(at: ConnectedTables[Connection], chosen: Select[Any]) -> list[tuple[str, str, bool]]:
    # In SQLite an id may be bytes, which come after all text: no page could name that record.
    rows = at.dialect.selected(at.link, chosen)
    return [(id_, consumer, fits) for id_, consumer, fits in rows if isinstance(id_, str)]
