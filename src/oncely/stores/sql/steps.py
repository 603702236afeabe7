"""Finished steps: calls of the Transaction protocol, in the transaction that is open on a link."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from oncely.core.record import Key
from oncely.stores.sql.dialect import AnyTables, OwnTables
from oncely.stores.sql.record_rows import batches
from oncely.stores.sql.row_values import read
from oncely.stores.store import Query

_LOADED = ("provider", "message_id", "name", "result")


def steps_of(at: AnyTables, keys: Collection[Key]) -> Mapping[Key, Mapping[str, Any]]:
    columns = ", ".join(f"d.{name}" for name in _LOADED)
    statement = f"SELECT {columns} {at.dialect.of_keys(at.dialect.steps_name)}"
    found: dict[Key, dict[str, Any]] = {}
    for batch in batches(sorted(keys)):
        for row in at.run(statement, at.dialect.key_values(batch)).fetchall():
            *key, name, result = read(at.dialect.tables.steps, _LOADED, row).values()
            found.setdefault(Key(*key), {})[name] = result
    return found


def keep_step(at: AnyTables, key: Key, name: str, result: Any) -> None:
    statement = at.dialect.insert_absent.format(
        f"{at.dialect.steps_name} (message_id, provider, name, created_at, result)"
        f" VALUES (%(message_id)s, %(provider)s, %(name)s, {at.dialect.moment}, %(result)s)"
    )
    at.run(
        statement,
        {
            "message_id": key.message_id,
            "provider": key.consumer,
            "name": name,
            "result": json.dumps(result),
            "now": at.dialect.now(),
        },
    )


def forget_steps(at: AnyTables, key: Key) -> None:
    this = "message_id = %(message_id)s AND provider = %(provider)s"
    values = {"message_id": key.message_id, "provider": key.consumer}
    at.run(f"DELETE FROM {at.dialect.steps_name} WHERE {this}", values)


def purge(at: OwnTables, query: Query) -> int:
    """Remove the steps of at most `query.limit` messages that have no record: they were released,
    and never redelivered. The query says of which consumer, and how old. Return of how many
    messages.
    """
    record = "r.message_id = d.message_id AND r.provider = d.provider"
    conditions = [f"NOT EXISTS (SELECT 1 FROM {at.dialect.name} AS r WHERE {record})"]
    values: dict[str, Any] = {}
    if query.consumer is not None:
        conditions.append("d.provider = %(consumer)s")
        values["consumer"] = query.consumer
    if query.older_than_s is not None:
        conditions.append(f"{at.dialect.epoch_text('d.created_at')} < %(before)s")
        values["before"] = at.dialect.time(at.link) - query.older_than_s
    chosen = (
        f"SELECT DISTINCT d.provider, d.message_id FROM {at.dialect.steps_name} AS d"
        f" WHERE {' AND '.join(conditions)} LIMIT {query.limit:d}"
    )
    with at.dialect.transaction(at.link):
        found = at.run(chosen, values).fetchall()
        if found:
            at.dialect.remove_steps(at.link, [Key(*row) for row in found])
    return len(found)
