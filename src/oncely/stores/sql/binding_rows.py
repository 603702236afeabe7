"""Queues and the topics that each is bound to: statements that are the same on all databases."""

from collections.abc import Collection

from oncely.stores.sql.dialect import ConnectedTables, SqlConnection


def bind(at: ConnectedTables[SqlConnection], queue: str, topics: Collection[str]) -> None:
    """Let events of these topics into the queue; the topic "" only says that it is there."""
    insert = at.dialect.insert_absent.format(
        f"{at.dialect.bindings_name} (queue, exchange, pattern) VALUES (%(queue)s, '', %(topic)s)"
    )
    # Always in the same order, so that no two writers deadlock.
    for topic in sorted(set(topics)):
        at.run(insert, {"queue": queue, "topic": topic})


def bindings(at: ConnectedTables[SqlConnection], queue: str | None = None) -> list[tuple[str, str]]:
    """The bindings of one queue, or of all, sorted."""
    these = "" if queue is None else " WHERE queue = %(queue)s"
    statement = f"SELECT queue, pattern FROM {at.dialect.bindings_name}{these}"
    values = {} if queue is None else {"queue": queue}
    return sorted((row[0], row[1]) for row in at.run(statement, values).fetchall())
