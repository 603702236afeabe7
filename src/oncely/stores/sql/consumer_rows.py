"""Rows of consumers: how long the records of each are kept, and its horizon."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from oncely.core.record import Key, Record
from oncely.stores.sql.access import Access
from oncely.stores.sql.by_hand import number_of, text_of
from oncely.stores.sql.database import Link
from oncely.stores.store import Horizons

_LONGEST_S = 1e11
"""Three thousand years."""


def insert(
    at: Access[Link],
    records: Sequence[Record],
    believed: Mapping[str, float | None],
    *,
    reads_anew: bool = True,
) -> set[Key]:
    """One of `batches` of records, as the Store protocol says, in the transaction that is open.

    `reads_anew` where the transaction sees everything that is committed by now.
    """
    written = at.database.insert(at.link, records)
    if not written:
        return written
    # The horizon is read after that: the insert may have waited for a purge of such a record.
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
    """As Inside says. Always in the same order, so that no two purges deadlock."""
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
    return {text_of(consumer): _retention_s(stored) for consumer, stored in rows}


def _retention_s(stored: Any) -> float:
    """How long records are kept. Of what cannot be read they are kept for as long as can be: a
    purge must not take a shorter time for it.
    """
    retention_s = number_of(stored)
    return _LONGEST_S if retention_s is None or retention_s < 0 else min(retention_s, _LONGEST_S)
