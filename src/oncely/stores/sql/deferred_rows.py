"""Deferred messages: the statements that are the same on all databases.

Each is for the transaction that is open on a link.
"""

import json
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from oncely.core.deferred import DeferredMessage, digest
from oncely.core.message import Message
from oncely.core.record import Key
from oncely.stores.sql.access import Access
from oncely.stores.sql.batches import batches
from oncely.stores.sql.database import Link
from oncely.stores.sql.record_rows import by_place
from oncely.stores.store import Backlog, PublishRefusal

_LOADED = (
    *("id", "provider", "message_id", "position", "destination", "delay_s", "attempts", "error"),
    *("deferred_id", "body", "type", "headers", "source", "sent_at", "content_type"),
    "ordering_key",
)
_COLUMNS = ", ".join(f"d.{name}" for name in _LOADED)


def defer(at: Access[Link], messages: Sequence[DeferredMessage]) -> None:
    """As Inside says."""
    ordered = sorted(messages, key=lambda message: message.position)
    for batch in batches([_row(message) for message in ordered], lambda row: len(row["body"])):
        at.database.defer(at.link, batch)


def waiting(at: Access[Link], keys: Collection[Key]) -> list[DeferredMessage]:
    """As Inside says."""
    statement = f"SELECT {_COLUMNS} {at.database.of_keys(at.database.deferred_name)}"
    found = [
        _message(row)
        for batch in batches(by_place(keys))
        for row in at.run(statement, at.database.key_values(batch)).fetchall()
    ]
    return sorted(found, key=_number)


# ---- Taking ------------------------------------------------------------------------------------


def take(
    at: Access[Link], limit: int, hold_s: float, parents: Collection[Key] | None = None
) -> list[DeferredMessage]:
    """As Inside says."""
    _free(at)
    among = None if parents is None else _numbers_of(at, parents)
    found = [] if among == [] else _choose(at, limit, among)
    if not found:
        return []
    first_left = _first_left(at, found)
    taken = [m for m in found if _number(m) < first_left.get(m.lane, _number(m) + 1)]
    if taken:
        hold = (
            f"UPDATE {at.database.deferred_name} SET held_until = {at.database.later('%(hold_s)s')}"
            f" WHERE id IN ({_numbers(taken)})"
        )
        at.run(hold, {"hold_s": float(hold_s), "now": at.database.now})
    return taken


def _free(at: Access[Link]) -> None:
    """Let go of what was held, or had to wait, until now: so that it is found in its order."""
    at.run(
        f"UPDATE {at.database.deferred_name} SET held_until = {at.database.always}"
        f" WHERE set_aside = false AND held_until > {at.database.always}"
        # Asked once, in a query of its own: an index is of no use for a time that goes on.
        f" AND held_until <= (SELECT {at.database.moment})",
        {"now": at.database.now},
    )


def _numbers_of(at: Access[Link], parents: Collection[Key]) -> list[int]:
    # A query of its own: together with what else is asked for, it would tempt planners to begin
    # with that.
    statement = f"SELECT d.id {at.database.of_keys(at.database.deferred_name)}"
    return [
        number
        for batch in batches(by_place(parents))
        for [number] in at.run(statement, at.database.key_values(batch)).fetchall()
    ]


def _choose(at: Access[Link], limit: int, among: Sequence[int] | None) -> list[DeferredMessage]:
    """The first that are free, locked, without those that others have locked.

    None of a lane whose first message is not free: however many there are, they keep no other
    lane from being sent.
    """
    these = "" if among is None else f" AND d.id IN ({_listed(among)})"
    database, name = at.database, at.database.deferred_name
    free = f"= {database.always}"
    statement = (
        f"SELECT {_COLUMNS} FROM {name} AS d"
        f" WHERE d.set_aside = false AND d.held_until {free}{these}"
        f" AND (SELECT h.held_until FROM {name} AS h"
        f" WHERE h.lane = d.lane AND h.set_aside = false ORDER BY h.id LIMIT 1) {free}"
        f" ORDER BY d.id LIMIT {limit:d} {database.skip_locked}"
    )
    return [_message(row) for row in at.run(statement).fetchall()]


def _first_left(at: Access[Link], chosen: Sequence[DeferredMessage]) -> dict[str, int]:
    """For each lane of these, the number of the first that is not chosen: it is held, has to wait,
    or another relay is at it.
    """
    name, numbers = at.database.deferred_name, _numbers(chosen)
    found = at.run(
        f"SELECT d.lane, MIN(d.id) FROM {name} AS d"
        f" WHERE d.lane IN (SELECT c.lane FROM {name} AS c WHERE c.id IN ({numbers}))"
        f" AND d.set_aside = false AND d.id < {max(map(_number, chosen))}"
        f" AND d.id NOT IN ({numbers}) GROUP BY d.lane",
    )
    return dict(found.fetchall())


# ---- What becomes of those that were taken -----------------------------------------------------


def remove(at: Access[Link], messages: Sequence[DeferredMessage]) -> None:
    """As Inside says."""
    for batch in batches(messages):
        numbers = _numbers(batch)
        at.run(f"DELETE FROM {at.database.deferred_name} WHERE id IN ({numbers})")


def put_back(at: Access[Link], refusals: Sequence[PublishRefusal]) -> None:
    """As Inside says."""
    database = at.database
    again = (
        f"UPDATE {database.deferred_name} SET attempts = attempts + 1, error = %(error)s,"
        f" due_at = {database.later('%(retry_s)s')}, held_until = {database.later('%(retry_s)s')}"
        " WHERE id = %(id)s"
    )
    aside = (
        f"UPDATE {database.deferred_name} SET attempts = attempts + 1, error = %(error)s,"
        f" held_until = {database.always}, set_aside = true WHERE id = %(id)s"
    )
    for message, error, retry_s in sorted(refusals, key=lambda refusal: _number(refusal.deferred)):
        values = {"id": message.number, "error": error}
        if retry_s is None:
            at.run(aside, values)
        else:
            at.run(again, {**values, "retry_s": float(retry_s), "now": at.database.now})


def send_again(at: Access[Connection]) -> int:
    """As Store says."""
    database = at.database
    again = (
        f"UPDATE {database.deferred_name} SET set_aside = false, attempts = 0,"
        f" due_at = {database.moment} WHERE set_aside = true"
    )
    with database.transaction(at.link):
        return int(at.run(again, {"now": at.database.now}).rowcount)


def backlog(at: Access[Link]) -> Backlog:
    """As Store says."""
    now, oldest = at.database.time(at.link), at.database.epoch_text("MIN(due_at)")
    found = at.run(
        f"SELECT set_aside, COUNT(*), {oldest} FROM {at.database.deferred_name} GROUP BY set_aside",
    )
    counts = {bool(is_aside): (count, oldest) for is_aside, count, oldest in found.fetchall()}
    waits, due_at = counts.get(False, (0, now))
    return Backlog(waits, counts.get(True, (0, now))[0], max(0.0, now - due_at))


def newest(at: Access[Link]) -> int:
    """The highest number of any; 0 where there are none."""
    statement = f"SELECT COALESCE(MAX(id), 0) FROM {at.database.deferred_name}"
    return int(at.run(statement).fetchone()[0])


# ---- Between messages and rows -----------------------------------------------------------------


def _row(deferred: DeferredMessage) -> dict[str, Any]:
    message = deferred.message
    return {
        "name": digest(deferred.id, deferred.destination),
        "message_id": deferred.parent.message_id,
        "provider": deferred.parent.consumer,
        "position": deferred.position,
        "destination": deferred.destination,
        "deferred_id": deferred.id,
        "type": message.type,
        "body": message.body,
        "headers": json.dumps(dict(message.headers)),
        "source": message.source,
        "sent_at": message.time and message.time.isoformat(),
        "content_type": message.content_type,
        "ordering_key": message.key,
        "delay_s": float(deferred.delay_s),
        "lane": deferred.lane,
    }


def _message(row: Sequence[Any]) -> DeferredMessage:
    """The message in a row of `_LOADED`."""
    (number, consumer, message_id, position, destination, delay_s, attempts, error) = row[:8]
    (deferred_id, body, type_, headers, source, sent_at, content_type, key) = row[8:]
    message = Message(
        id=deferred_id,
        body=bytes(body),
        type=type_,
        headers=json.loads(headers),
        source=source,
        time=sent_at and datetime.fromisoformat(sent_at),
        content_type=content_type,
        key=key,
    )
    return DeferredMessage(
        id=deferred_id,
        destination=destination,
        message=message,
        parent=Key(consumer, message_id),
        position=position,
        delay_s=delay_s,
        attempts=attempts,
        error=error,
        number=number,
    )


def _number(message: DeferredMessage) -> int:
    """Its place among all; 0, that of no row, for one that was never stored."""
    return message.number or 0


def _numbers(messages: Sequence[DeferredMessage]) -> str:
    return _listed(sorted(map(_number, messages)))


def _listed(numbers: Sequence[int]) -> str:
    """Numbers as SQL has them in a list: whole ones need no parameters."""
    return ", ".join(f"{number:d}" for number in numbers)
