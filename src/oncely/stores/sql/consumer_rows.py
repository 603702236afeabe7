"""Rows of consumers: how long the records of each are kept, and its horizon."""

from collections.abc import Collection, Mapping

from oncely.core.cases import Case
from oncely.core.record import Key
from oncely.stores.sql.dialect import ConnectedTables, SqlConnection
from oncely.stores.sql.record_rows import removed
from oncely.stores.sql.row_values import read
from oncely.stores.store import Horizons

_RETENTION = ("provider", "retention_s")


def insert(
    at: ConnectedTables[SqlConnection],
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


def horizons(at: ConnectedTables[SqlConnection], consumers: Collection[str]) -> Horizons:
    """As the Store protocol says."""
    return at.dialect.horizons(at.link, sorted(consumers)) if consumers else {}


def forget_until(at: ConnectedTables[SqlConnection], horizons: Horizons) -> None:
    """As Inside says. Always in the same order, so that no two purges deadlock."""
    statement = at.dialect.consumer_written("forgotten_until", only_later=True)
    for consumer, horizon in sorted(horizons.items()):
        at.run(statement, {"consumer": consumer, "value": horizon})


def keep_retention(at: ConnectedTables[SqlConnection], consumer: str, retention_s: float) -> None:
    """As the Store protocol says."""
    statement = at.dialect.consumer_written("retention_s")
    at.run(statement, {"consumer": consumer, "value": retention_s})


def retentions(at: ConnectedTables[SqlConnection]) -> Mapping[str, float]:
    """As the Store protocol says."""
    asked = f"SELECT {', '.join(_RETENTION)} FROM {at.dialect.consumers_name}"
    rows = at.run(f"{asked} WHERE retention_s IS NOT NULL").fetchall()
    found = (read(at.dialect.tables.consumers, _RETENTION, row) for row in rows)
    return {each["provider"]: each["retention_s"] for each in found}
