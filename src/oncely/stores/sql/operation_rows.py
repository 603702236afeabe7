"""What operators look back at, and a worker's signs of life: the same on all databases."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from sqlalchemy import Connection, Row, Table, and_, delete, func, insert, select, update
from sqlalchemy.sql.elements import ColumnElement

from oncely.core.activity import Activity, AuditEntry, Run, Worker
from oncely.stores.sql.access import Access
from oncely.stores.sql.by_hand import number_of, text_of, value_of, whole_of


def keep_worker(at: Access[Connection], worker: Worker, activity: Sequence[Activity]) -> None:
    """As the Store protocol says, in the transaction that is open."""
    tables, now = at.database.tables, at.database.time(at.link)
    c = tables.workers.c
    row = worker._replace(seen=now)._asdict()
    row["provider"] = row.pop("consumer")
    known = at.database.selected(at.link, select(c.started).where(c.id == worker.id))
    row["started"] = known[0][0] if known else now
    _put(at.link, tables.workers, {"id": worker.id}, row)
    for each in activity:
        values = each._asdict()
        values |= {"provider": values.pop("consumer"), "seconds": json.dumps(each.seconds)}
        key = {name: values[name] for name in ("provider", "worker", "began")}
        _put(at.link, tables.activity, key, values)


def forget_worker(at: Access[Connection], id_: str) -> None:
    """As the Store protocol says."""
    workers = at.database.tables.workers
    at.link.execute(delete(workers).where(workers.c.id == id_))


def workers(at: Access[Connection]) -> list[Worker]:
    """As the Store protocol says."""
    c = at.database.tables.workers.c
    chosen = select(
        *(c.id, c.kind, c.provider, c.host, c.pid, c.version, c.started, c.seen, c.claims)
    )
    rows = at.database.selected(at.link, chosen.order_by(c.seen.desc(), c.id))
    return [_worker(row) for row in rows]


def _worker(row: Sequence[Any]) -> Worker:
    id_, kind, consumer, host, pid, version, started, seen, claims = row
    return Worker(
        id=text_of(id_),
        kind=text_of(kind),
        consumer=text_of(consumer),
        host=text_of(host),
        pid=whole_of(pid),
        version=text_of(version),
        started=number_of(started) or 0.0,
        seen=number_of(seen) or 0.0,
        claims=whole_of(claims),
    )


def activity(at: Access[Connection], since: float) -> list[Activity]:
    """As the Store protocol says."""
    c = at.database.tables.activity.c
    counts = (c.handled, c.failed, c.exhausted, c.duplicates, c.in_doubt)
    chosen = select(c.provider, c.worker, c.began, *counts, c.seconds).where(c.began >= since)
    rows = at.link.execute(chosen.order_by(c.began, c.provider, c.worker))
    # What is not known when is not known to be of this time.
    return [_activity(row) for row in rows if number_of(row[2]) is not None]


def _activity(row: Sequence[Any]) -> Activity:
    consumer, worker, began, *counts, seconds = row
    handled, failed, exhausted, duplicates, in_doubt = map(whole_of, counts)
    known = Activity(
        consumer=text_of(consumer),
        worker=text_of(worker),
        began=whole_of(began),
        handled=handled,
        failed=failed,
        exhausted=exhausted,
        duplicates=duplicates,
        in_doubt=in_doubt,
    )
    found = value_of(seconds)
    if not isinstance(found, list) or len(found) != len(known.seconds):
        return known
    return known._replace(seconds=[*map(whole_of, found)])


def keep_run(at: Access[Connection], run: Run) -> None:
    """As the Store protocol says, in the transaction that is open."""
    values = run._asdict()
    values |= {"provider": values.pop("consumer"), "totals": json.dumps(dict(run.totals))}
    _put(at.link, at.database.tables.runs, {"id": run.id}, values)


def runs(at: Access[Connection], limit: int) -> list[Run]:
    """As the Store protocol says."""
    c = at.database.tables.runs.c
    chosen = select(c.id, c.name, c.provider, c.began, c.ended, c.totals, c.error)
    rows = at.database.selected(at.link, chosen.order_by(c.began.desc(), c.id).limit(limit))
    return [_run(row) for row in rows]


def _run(row: Sequence[Any]) -> Run:
    id_, name, consumer, began, ended, totals, error = row
    found = value_of(totals)
    return Run(
        id=text_of(id_),
        name=text_of(name),
        consumer=text_of(consumer),
        began=number_of(began) or 0.0,
        ended=number_of(ended),
        totals=found if isinstance(found, dict) else {"totals": found},
        error=None if error is None else text_of(error),
    )


def note(at: Access[Connection], entry: AuditEntry) -> int:
    """As the Store protocol says, in the transaction that is open."""
    done = at.link.execute(
        insert(at.database.tables.audit).values(
            at=at.database.time(at.link),
            changed_by=entry.by,
            action=entry.action,
            provider=entry.consumer,
            message_id=entry.message_id,
            chosen=entry.chosen,
            changed=entry.changed,
            refused=entry.refused,
            why=entry.why,
        )
    )
    [id_] = cast("Row[Any]", done.inserted_primary_key)
    return int(id_)


def note_counts(at: Access[Connection], id_: int, changed: int, refused: int | None) -> None:
    """As the Store protocol says, in the transaction that is open."""
    table = at.database.tables.audit
    counts = update(table).values(changed=changed, refused=refused)
    at.link.execute(counts.where(table.c.id == id_))


def audit(at: Access[Connection], limit: int, before: int | None) -> list[AuditEntry]:
    """As the Store protocol says."""
    c = at.database.tables.audit.c
    chosen = select(
        *(c.id, c.at, c.changed_by, c.action, c.provider),
        *(c.message_id, c.chosen, c.changed, c.refused, c.why),
    )
    if before is not None:
        chosen = chosen.where(c.id < before)
    rows = at.database.selected(at.link, chosen.order_by(c.id.desc()).limit(limit))
    return [_entry(row) for row in rows]


def _entry(row: Sequence[Any]) -> AuditEntry:
    id_, noted_at, by, action, consumer, message_id, chosen, changed, refused, why = row
    return AuditEntry(
        id=id_,
        at=number_of(noted_at) or 0.0,
        by=text_of(by),
        action=text_of(action),
        consumer=text_of(consumer),
        message_id=text_of(message_id),
        chosen=_count(chosen),
        changed=_count(changed),
        refused=_count(refused),
        why=text_of(why),
    )


def _count(value: Any) -> int | None:
    return None if number_of(value) is None else whole_of(value)


def purge(at: Access[Connection], older_than_s: float) -> int:
    """As `Store.purge_operations` says, in the transaction that is open."""
    tables, until = at.database.tables, at.database.time(at.link) - older_than_s
    return sum(
        at.link.execute(delete(table).where(moment < until)).rowcount
        for table, moment in (
            (tables.activity, tables.activity.c.began),
            (tables.workers, tables.workers.c.seen),
            (tables.runs, func.coalesce(tables.runs.c.ended, tables.runs.c.began)),
        )
    )


def _put(link: Connection, table: Table, key: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Write a row in place of the one with its key: only one writer ever has that."""
    its: ColumnElement[bool] = and_(*(table.c[name] == value for name, value in key.items()))
    if not link.execute(update(table).where(its).values(**values)).rowcount:
        link.execute(insert(table).values(**values))
