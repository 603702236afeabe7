"""What operators look back at, and a worker's signs of life: the same on all databases.

The calls are those of the Store protocol, in the transaction that is open.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar, cast

from sqlalchemy import Connection, Row, Select, Table, and_, delete, func, insert, select, update
from sqlalchemy.sql.elements import ColumnElement

from oncely.core.activity import Activity, AuditEntry, Run, Worker
from oncely.core.record import Key
from oncely.stores.sql.dialect import AnyTables, OwnTables
from oncely.stores.sql.row_values import read

K = TypeVar("K", Activity, AuditEntry, Run, Worker)

_COLUMNS = {
    "consumer": "provider",
    "by": "changed_by",
    "failed_attempts": "failed",
    "failed": "exhausted",
}
"""The columns that are not named as the fields."""
_STOPPED_S = 86_400.0
"""For how long it is kept that a worker has stopped."""


def keep_worker(at: OwnTables, worker: Worker, activity: Sequence[Activity]) -> float | None:
    tables, now = at.dialect.tables, at.dialect.time(at.link)
    c = tables.workers.c
    known = at.dialect.selected(at.link, select(c.started, c.seen).where(c.id == worker.id))
    started, before = known[0] if known else (now, None)
    lags = worker.lags and json.dumps(dict(worker.lags))
    row = {**_row(worker._replace(seen=now, started=started)), "lags": lags}
    _put(at.link, tables.workers, ("id",), row)
    for each in activity:
        row = {**_row(each), "seconds": json.dumps(each.seconds)}
        _put(at.link, tables.activity, ("provider", "worker", "began"), row)
    return before


def end_worker(at: OwnTables, id_: str) -> None:
    table, now = at.dialect.tables.workers, at.dialect.time(at.link)
    c = table.c
    at.link.execute(update(table).where(c.id == id_).values(ended=now, claims=0))
    number = select(c.number).where(c.id == id_).scalar_subquery()
    same = (c.number == number) & (c.id != id_)
    old = select(c.id).where(c.ended.is_not(None), same | (c.ended < now - _STOPPED_S))
    # By their ids: a DELETE that looks for them would wait for the signs of life of others.
    if ids := [*chain(*at.dialect.selected(at.link, old))]:
        at.link.execute(delete(table).where(c.id.in_(ids)))


def workers(at: OwnTables) -> list[Worker]:
    table = at.dialect.tables.workers
    chosen = _of(table, Worker).order_by(table.c.seen.desc(), table.c.id)
    return _read(at, table, Worker, chosen)


def activity(at: OwnTables, since: float) -> list[Activity]:
    table = at.dialect.tables.activity
    chosen = _of(table, Activity).where(table.c.began >= since)
    in_order = chosen.order_by(table.c.began, table.c.provider, table.c.worker)
    return _read(at, table, Activity, in_order)


def keep_run(at: OwnTables, run: Run) -> None:
    row = {**_row(run), "totals": json.dumps(dict(run.totals))}
    _put(at.link, at.dialect.tables.runs, ("id",), row)


def runs(at: OwnTables, limit: int = 50) -> list[Run]:
    table = at.dialect.tables.runs
    chosen = _of(table, Run).order_by(table.c.began.desc(), table.c.id).limit(limit)
    return _read(at, table, Run, chosen)


def note(at: OwnTables, entry: AuditEntry) -> int:
    row = _row(entry._replace(at=at.dialect.time(at.link)))
    del row["id"]
    done = at.link.execute(insert(at.dialect.tables.audit).values(**row))
    [id_] = cast("Row[Any]", done.inserted_primary_key)
    return int(id_)


def note_counts(at: OwnTables, id_: int, changed: int, refused: int | None) -> None:
    table = at.dialect.tables.audit
    counts = update(table).values(changed=changed, refused=refused)
    at.link.execute(counts.where(table.c.id == id_))


def audit(at: OwnTables, limit: int = 100, before: int | None = None) -> list[AuditEntry]:
    table = at.dialect.tables.audit
    chosen = _of(table, AuditEntry).order_by(table.c.id.desc()).limit(limit)
    if before is not None:
        chosen = chosen.where(table.c.id < before)
    return _read(at, table, AuditEntry, chosen)


def rename_in_audit(at: AnyTables, key: Key, word: str) -> int:
    statement = (
        f"UPDATE {at.dialect.audit_name} SET why = replace(why, %(message_id)s, %(word)s),"
        " message_id = %(word)s"
        " WHERE message_id = %(message_id)s AND provider IN (%(consumer)s, '')"
    )
    return int(at.run(statement, {**key._asdict(), "word": word}).rowcount)


def purge_audit(at: OwnTables, older_than_s: float) -> int:
    table, until = at.dialect.tables.audit, at.dialect.time(at.link) - older_than_s
    return at.link.execute(delete(table).where(table.c.at < until)).rowcount


def purge(at: OwnTables, older_than_s: float) -> int:
    tables, until = at.dialect.tables, at.dialect.time(at.link) - older_than_s
    return sum(
        at.link.execute(delete(table).where(moment < until)).rowcount
        for table, moment in (
            (tables.activity, tables.activity.c.began),
            (tables.workers, tables.workers.c.seen),
            (tables.runs, func.coalesce(tables.runs.c.ended, tables.runs.c.began)),
        )
    )


def _row(entry: Activity | AuditEntry | Run | Worker) -> dict[str, Any]:
    return {_COLUMNS.get(name, name): value for name, value in entry._asdict().items()}


def _of(table: Table, kind: type[K]) -> Select[Any]:
    """The columns of that table in the order of the fields."""
    return select(*(table.c[_COLUMNS.get(name, name)] for name in kind._fields))


def _read(at: OwnTables, table: Table, kind: type[K], chosen: Select[Any]) -> list[K]:
    names = [column.name for column in chosen.selected_columns]
    rows = at.dialect.selected(at.link, chosen)
    return [kind(*read(table, names, row).values()) for row in rows]


def _put(link: Connection, table: Table, key: Sequence[str], row: Mapping[str, Any]) -> None:
    """Write a row in place of the one with its key: only one writer ever has that."""
    its: ColumnElement[bool] = and_(*(table.c[name] == row[name] for name in key))
    if not link.execute(update(table).where(its).values(**row)).rowcount:
        link.execute(insert(table).values(**row))
