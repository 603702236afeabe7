"""Finished steps: their statements, for the transaction that is open on a link."""

import json
from collections.abc import Mapping
from typing import Any

from oncely.core.record import Key
from oncely.stores.sql.database import Database, Link

_THIS = "message_id = %(message_id)s AND provider = %(provider)s"


def steps(database: Database, link: Link, key: Key) -> Mapping[str, Any]:
    """As Inside says."""
    statement = f"SELECT name, result FROM {database.steps_name} WHERE {_THIS}"
    rows = database.run(link, statement, _values(key)).fetchall()
    return {name: json.loads(result) for name, result in rows}


def keep_step(
    database: Database, link: Link, key: Key, name: str, result: Any, now: float | None
) -> None:
    """As Inside says."""
    statement = database.insert_absent.format(
        f"{database.steps_name} (message_id, provider, name, created_at, result)"
        f" VALUES (%(message_id)s, %(provider)s, %(name)s, {database.moment}, %(result)s)"
    )
    values = {**_values(key), "name": name, "result": json.dumps(result), "now": now}
    database.run(link, statement, values)


def forget(database: Database, link: Link, key: Key) -> None:
    """Remove those of a message."""
    database.run(link, f"DELETE FROM {database.steps_name} WHERE {_THIS}", _values(key))


def purge(
    database: Database, link: Link, consumer: str | None, before: float | None, limit: int
) -> int:
    """Remove those kept before a time for at most `limit` messages that have no record: they were
    released, and never came again. Return of how many.
    """
    record = "r.message_id = d.message_id AND r.provider = d.provider"
    conditions = [f"NOT EXISTS (SELECT 1 FROM {database.name} AS r WHERE {record})"]
    if consumer is not None:
        conditions.append("d.provider = %(consumer)s")
    if before is not None:
        conditions.append(f"{database.epoch_text('d.created_at')} < %(before)s")
    found = database.run(
        link,
        f"SELECT DISTINCT d.provider, d.message_id FROM {database.steps_name} AS d"
        f" WHERE {' AND '.join(conditions)} LIMIT {limit:d}",
        {"consumer": consumer, "before": before},
    ).fetchall()
    if found:
        database.remove_steps(link, [Key(*row) for row in found])
    return len(found)


def _values(key: Key) -> dict[str, str]:
    return {"message_id": key.message_id, "provider": key.consumer}
