"""What is known of each consumer: how long its records are kept, and what of them was forgotten."""

from collections.abc import Collection, Mapping, Sequence

from oncely.core.record import Key, Record
from oncely.stores.sql.access import Access
from oncely.stores.sql.database import Link
from oncely.stores.store import Horizons


def insert(
    at: Access[Link],
    records: Sequence[Record],
    believed: Mapping[str, float | None],
    *,
    reads_anew: bool = True,
) -> set[Key]:
    """One of `batches` of records, as the Store protocol says, in the transaction that is open.

    `reads_anew` where it does not read what was there before this moment.
    """
    written = at.database.insert(at.link, records)
    if not written:
        return written
    # The horizon comes after: the insert may have waited for a purge that removed such a record.
    found = at.database.horizons(at.link, sorted(believed), reads_anew=reads_anew)
    wrong = {consumer for consumer, horizon in believed.items() if found.get(consumer) != horizon}
    gone = [each for each in records if each.key in written and each.key.consumer in wrong]
    if gone:
        at.database.remove(at.link, gone)
    return written - {record.key for record in gone}


def horizons(at: Access[Link], consumers: Collection[str]) -> Horizons:
    """As the Store protocol says."""
    return at.database.horizons(at.link, sorted(consumers)) if consumers else {}


def forget_until(at: Access[Link], horizons: Horizons) -> None:
    """As Inside says. One after another in one order, so that no two purges deadlock."""
    statement = at.database.consumer_written("forgotten_until", only_later=True)
    for consumer, horizon in sorted(horizons.items()):
        at.run(statement, {"consumer": consumer, "value": horizon})


def keep_retention(at: Access[Link], consumer: str, retention_s: float) -> None:
    """As the Store protocol says."""
    statement = at.database.consumer_written("retention_s")
    at.run(statement, {"consumer": consumer, "value": retention_s})


def retentions(at: Access[Link]) -> Mapping[str, float]:
    """As the Store protocol says."""
    asked = f"SELECT provider, retention_s FROM {at.database.consumers_name}"
    rows = at.run(f"{asked} WHERE retention_s IS NOT NULL").fetchall()
    return {consumer: float(retention_s) for consumer, retention_s in rows}
