"""Queues, and what each has subscribed to: the statements that are the same on all databases."""

from collections.abc import Collection

from oncely.core.binding import Binding
from oncely.stores.sql.access import Access
from oncely.stores.sql.database import Link


def bind(at: Access[Link], bindings: Collection[Binding]) -> None:
    """Keep these; what is there already is not an error."""
    insert = at.database.insert_absent.format(
        f"{at.database.bindings_name} (queue, exchange, pattern)"
        " VALUES (%(queue)s, %(exchange)s, %(pattern)s)"
    )
    # In one order, so that no two deadlock.
    for binding in sorted(set(bindings)):
        at.run(insert, binding._asdict())


def unbind(at: Access[Link], bindings: Collection[Binding]) -> None:
    """Remove these; what is gone already is not an error."""
    delete = (
        f"DELETE FROM {at.database.bindings_name}"
        " WHERE queue = %(queue)s AND exchange = %(exchange)s AND pattern = %(pattern)s"
    )
    for binding in sorted(set(bindings)):
        at.run(delete, binding._asdict())


def bindings(at: Access[Link], queue: str | None = None) -> list[Binding]:
    """Those of one queue, or of all, in their order."""
    these = "" if queue is None else " WHERE queue = %(queue)s"
    statement = f"SELECT queue, exchange, pattern FROM {at.database.bindings_name}{these}"
    values = {} if queue is None else {"queue": queue}
    return sorted(Binding(*row) for row in at.run(statement, values).fetchall())
