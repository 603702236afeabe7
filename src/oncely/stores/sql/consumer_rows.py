"""Rows of consumers: retention and horizon of each, and what its queue is bound to.

A call without a docstring is the one by its name of the Transaction or the Store protocol.
"""

from collections.abc import Collection, Mapping

from oncely.core.cases import Case
from oncely.core.record import Key
from oncely.stores.sql.dialect import AnyTables
from oncely.stores.sql.record_rows import removed
from oncely.stores.sql.row_values import read
from oncely.stores.store import Horizons

_RETENTION = ("provider", "retention_s")


def insert(
    at: AnyTables,
    case: Case,
    believed: Mapping[str, float | None],
    *,
    reads_anew: bool = True,
) -> set[Key]:
    """One of the `parts` of new records, as the Store protocol says, in the open transaction.

    `reads_anew` where the transaction sees everything that is committed by now.
    """
    written = at.dialect.insert(at.link, case)
    if not written:
        return written
    # The horizon is read after that: the insert may have waited for a purge of such a record.
    found = at.dialect.horizons(at.link, sorted(believed), reads_anew=reads_anew)
    wrong = {consumer for consumer, horizon in believed.items() if found.get(consumer) != horizon}
    gone = [
        (key, version)
        for key, _, version, *_ in case.rows
        if key in written and key.consumer in wrong
    ]
    if gone:
        at.dialect.delete(at.link, removed(gone))
    return written - {key for key, _ in gone}


def horizons(at: AnyTables, consumers: Collection[str]) -> Horizons:
    return at.dialect.horizons(at.link, sorted(consumers)) if consumers else {}


def forget_until(at: AnyTables, horizons: Horizons) -> None:
    # Always in the same order, so that no two purges deadlock.
    statement = at.dialect.consumer_written("forgotten_until", only_later=True)
    for consumer, horizon in sorted(horizons.items()):
        at.run(statement, {"consumer": consumer, "value": horizon})


def keep_retention(at: AnyTables, consumer: str, retention_s: float) -> None:
    statement = at.dialect.consumer_written("retention_s")
    at.run(statement, {"consumer": consumer, "value": retention_s})


def retentions(at: AnyTables) -> Mapping[str, float]:
    asked = f"SELECT {', '.join(_RETENTION)} FROM {at.dialect.consumers_name}"
    rows = at.run(f"{asked} WHERE retention_s IS NOT NULL").fetchall()
    found = (read(at.dialect.tables.consumers, _RETENTION, row) for row in rows)
    return {each["provider"]: each["retention_s"] for each in found}


def bind(at: AnyTables, queue: str, topics: Collection[str]) -> None:
    """Let events of these topics into the queue; the topic "" only says that it is there."""
    insert = at.dialect.insert_absent.format(
        f"{at.dialect.bindings_name} (queue, exchange, pattern) VALUES (%(queue)s, '', %(topic)s)"
    )
    # Always in the same order, so that no two writers deadlock.
    for topic in sorted(set(topics)):
        at.run(insert, {"queue": queue, "topic": topic})


def bindings(at: AnyTables, queue: str | None = None) -> list[tuple[str, str]]:
    """The bindings of one queue, or of all, sorted."""
    these = "" if queue is None else " WHERE queue = %(queue)s"
    statement = f"SELECT queue, pattern FROM {at.dialect.bindings_name}{these}"
    values = {} if queue is None else {"queue": queue}
    return sorted((row[0], row[1]) for row in at.run(statement, values).fetchall())
