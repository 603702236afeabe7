"""Bindings of queues: the statements that are the same on all databases."""

from collections.abc import Collection

from oncely.core.binding import Binding
from oncely.stores.sql.connected_tables import ConnectedTables
from oncely.stores.sql.dialect import SqlConnection


def bind(at: ConnectedTables[SqlConnection], bindings: Collection[Binding]) -> None:
    """Keep these; a binding that is there already is not an error."""
    insert = at.dialect.insert_absent.format(
        f"{at.dialect.bindings_name} (queue, exchange, pattern)"
        " VALUES (%(queue)s, %(exchange)s, %(pattern)s)"
    )
    # Always in the same order, so that no two writers deadlock.
    for binding in sorted(set(bindings)):
        at.run(insert, binding._asdict())


def unbind(at: ConnectedTables[SqlConnection], bindings: Collection[Binding]) -> None:
    """Remove these; a binding that is gone already is not an error."""
    delete = (
        f"DELETE FROM {at.dialect.bindings_name}"
        " WHERE queue = %(queue)s AND exchange = %(exchange)s AND pattern = %(pattern)s"
    )
    for binding in sorted(set(bindings)):
        at.run(delete, binding._asdict())


def bindings(at: ConnectedTables[SqlConnection], queue: str | None = None) -> list[Binding]:
    """The bindings of one queue, or of all, sorted."""
    these = "" if queue is None else " WHERE queue = %(queue)s"
    statement = f"SELECT queue, exchange, pattern FROM {at.dialect.bindings_name}{these}"
    values = {} if queue is None else {"queue": queue}
    return sorted(Binding(*row) for row in at.run(statement, values).fetchall())
