"""Messages that wait: the statements that are the same on all databases.

Each is for the transaction that is open on a link.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from oncely.core.message import Message
from oncely.core.record import Key
from oncely.core.waiting import WaitingMessage, lane_in
from oncely.stores.sql.access import Access
from oncely.stores.sql.batches import Split, batches, split_columns
from oncely.stores.sql.database import Link
from oncely.stores.sql.record_rows import by_place
from oncely.stores.store import Backlog, Listing, PutBack

_CONTENT = (
    "own_id",
    "type",
    "body",
    "headers",
    "source",
    "sent_at",
    "content_type",
    "ordering_key",
)
_FREED = ("queue", "lane", *_CONTENT)
_PUT = {
    **dict.fromkeys(("message_id", "provider", "destination"), ""),
    **dict.fromkeys(("position", "attempts"), 0),
    **dict.fromkeys(("error", "reason"), None),
    "delay_s": 0.0,
    "set_aside": False,
}
"""What is the same of all messages that are put into queues."""
_LOADED = (
    *("id", "queue", "provider", "message_id", "position", "destination", "delay_s", "attempts"),
    *("error", "reason", "set_aside", "name", "lane", *_CONTENT),
)
_TIMES = ("created_at", "updated_at", "due_at")


def keep(at: Access[Link], messages: Sequence[WaitingMessage], *, renews: bool = False) -> None:
    """As Inside says."""
    ordered = sorted(messages, key=lambda message: message.position)
    for batch in batches([_row(message) for message in ordered], lambda row: len(row["body"])):
        at.database.keep(at.link, batch, renews=renews)


def put(at: Access[Link], queue: str, messages: Sequence[Message], names: Sequence[str]) -> None:
    """Put messages into a queue under these names, which nothing else has, by one statement: as
    `keep` does what `WaitingMessage.queued` has made, and faster.
    """
    lanes = [
        name if message.key is None else lane_in(queue, message.key)
        for name, message in zip(names, messages, strict=True)
    ]
    columns = {
        "name": names,
        "lane": lanes,
        "own_id": [message.id for message in messages],
        "type": [message.type for message in messages],
        "body": [message.body for message in messages],
        "headers": [_headers(message) for message in messages],
        "source": [message.source for message in messages],
        "sent_at": [message.time and message.time.isoformat() for message in messages],
        "content_type": [message.content_type for message in messages],
        "ordering_key": [message.key for message in messages],
    }
    varying, constant = split_columns(columns)
    at.database.put(at.link, Split(varying, {**_PUT, "queue": queue, **constant}))


def _headers(message: Message) -> str:
    # Most have none.
    return json.dumps(dict(message.headers)) if message.headers else "{}"


def waiting(at: Access[Link], keys: Collection[Key]) -> list[WaitingMessage]:
    """As Inside says."""
    statement = f"SELECT {_columns(at)} {at.database.of_keys(at.database.waiting_name)}"
    found = [
        _message(row)
        for batch in batches(by_place(keys))
        for row in at.run(statement, at.database.key_values(batch)).fetchall()
    ]
    return sorted(found, key=_number)


# ---- Taking ------------------------------------------------------------------------------------


def take(
    at: Access[Link],
    queue: str,
    limit: int,
    hold_s: float,
    parents: Collection[Key] | None = None,
    *,
    one_per_lane: bool = False,
    counts: bool = False,
) -> list[WaitingMessage]:
    """As Inside says."""
    _let_go(at, queue)
    among = None if parents is None else _numbers_of(at, parents)
    first = "id" if one_per_lane else "held_until"
    found = [] if among == [] else _choose(at, queue, limit, among, first)
    first_left = _first_left(at, [each for each in found if not is_alone(each)])
    taken = [m for m in found if _number(m) < first_left.get(m.lane, _number(m) + 1)]
    if not taken:
        return []
    hold = (
        f"UPDATE {at.database.waiting_name} SET held_until = {at.database.later('%(hold_s)s')},"
        f" attempts = attempts + {counts:d} WHERE id IN ({_numbers(taken)})"
    )
    at.run(hold, {"hold_s": float(hold_s), "now": at.database.now})
    return [replace(each, attempts=each.attempts + 1) for each in taken] if counts else taken


def is_alone(message: WaitingMessage) -> bool:
    """Whether nothing else is in its lane: that is called as the message is."""
    return message.lane == message.name


def _let_go(at: Access[Link], queue: str) -> None:
    """Let go of what was held, or had to wait, until now: so that it is found in its order."""
    at.run(
        f"UPDATE {at.database.waiting_name} SET held_until = {at.database.always}"
        " WHERE queue = %(queue)s AND set_aside = false"
        f" AND held_until > {at.database.always}"
        # Asked once, in a query of its own: an index is of no use for a time that goes on.
        f" AND held_until <= (SELECT {at.database.moment})",
        {"queue": queue, "now": at.database.now},
    )


def _numbers_of(at: Access[Link], parents: Collection[Key]) -> list[int]:
    # A query of its own: together with what else is asked for, it would tempt planners to begin
    # with that.
    statement = f"SELECT d.id {at.database.of_keys(at.database.waiting_name)}"
    return [
        number
        for batch in batches(by_place(parents))
        for [number] in at.run(statement, at.database.key_values(batch)).fetchall()
    ]


def _choose(
    at: Access[Link], queue: str, limit: int, among: Sequence[int] | None, first: str
) -> list[WaitingMessage]:
    """The first that are free, locked, without those that others have locked: those of which the
    `first` of their lane is as free, or where that is to be their `id`, each the first itself.

    None of a lane whose first message is not free: however many there are, they keep no other
    lane from being taken.
    """
    these = "" if among is None else f" AND d.id IN ({_listed(among)})"
    database, name = at.database, at.database.waiting_name
    free = f"= {database.always}"
    statement = (
        f"SELECT {_columns(at)} FROM {name} AS d"
        f" WHERE d.queue = %(queue)s AND d.set_aside = false AND d.held_until {free}{these}"
        f" AND (d.lane = d.name OR (SELECT h.{first} FROM {name} AS h"
        f" WHERE h.lane = d.lane AND h.lane <> h.name AND h.set_aside = false"
        f" ORDER BY h.id LIMIT 1) = d.{first})"
        f" ORDER BY d.id LIMIT {limit:d} {database.skip_locked}"
    )
    return [_message(row) for row in at.run(statement, {"queue": queue}).fetchall()]


def _first_left(at: Access[Link], chosen: Sequence[WaitingMessage]) -> dict[str, int]:
    """For each lane of these, the number of the first that is not chosen: it is held, has to wait,
    or another is at it.
    """
    if not chosen:
        return {}
    name, numbers = at.database.waiting_name, _numbers(chosen)
    found = at.run(
        f"SELECT d.lane, MIN(d.id) FROM {name} AS d"
        f" WHERE d.lane IN (SELECT c.lane FROM {name} AS c WHERE c.id IN ({numbers}))"
        f" AND d.lane <> d.name AND d.set_aside = false AND d.id < {max(map(_number, chosen))}"
        f" AND d.id NOT IN ({numbers}) GROUP BY d.lane",
    )
    return dict(found.fetchall())


# ---- What becomes of those that were taken -----------------------------------------------------


def remove(at: Access[Link], messages: Sequence[WaitingMessage]) -> None:
    """As Inside says."""
    for batch in batches(messages):
        numbers = _numbers(batch)
        at.run(f"DELETE FROM {at.database.waiting_name} WHERE id IN ({numbers})")


def held(at: Access[Link], messages: Sequence[WaitingMessage]) -> set[int]:
    """As Inside says."""
    found: dict[int, tuple[str, int]] = {}
    for batch in batches(messages):
        statement = (
            f"SELECT d.id, d.queue, d.attempts FROM {at.database.waiting_name} AS d"
            f" WHERE d.id IN ({_numbers(batch)}) AND d.set_aside = false"
            f" AND d.held_until > {at.database.always} ORDER BY d.id {at.database.locked}"
        )
        rows = at.run(statement).fetchall()
        found |= {number: (queue, attempts) for number, queue, attempts in rows}
    as_taken = ((_number(each), (each.queue, each.attempts)) for each in messages)
    return {number for number, taken in as_taken if found.get(number) == taken}


def remove_held(at: Access[Link], messages: Sequence[WaitingMessage]) -> set[int]:
    """As Inside says."""
    numbers = held(at, messages)
    remove(at, [each for each in messages if _number(each) in numbers])
    if not all(map(is_alone, messages)):
        at.database.tell(at.link)
    return numbers


def put_back(at: Access[Link], changes: Sequence[PutBack]) -> None:
    """As Inside says."""
    later = at.database.later("%(retry_s)s")
    free_from = f"CASE WHEN %(retry_s)s > 0 THEN {later} ELSE {at.database.always} END"
    written = (
        f"UPDATE {at.database.waiting_name} SET attempts = attempts + %(tried)s,"
        f" error = coalesce(%(error)s, error), updated_at = {at.database.moment}"
    )
    aside = f"{written}, set_aside = true, reason = %(error)s WHERE id = %(id)s"
    again = f"{written}, due_at = {later}, held_until = {free_from} WHERE id = %(id)s"
    for message, error, retry_s, is_try in sorted(changes, key=lambda each: _number(each.message)):
        values: dict[str, Any] = {"id": message.number, "error": error, "tried": int(is_try)}
        values["now"] = at.database.now
        if retry_s is None:
            at.run(aside, values)
        else:
            at.run(again, {**values, "retry_s": float(retry_s)})
    if any(change.retry_s == 0 for change in changes):
        at.database.tell(at.link)


def free(at: Access[Link], messages: Sequence[WaitingMessage]) -> None:
    """As Inside says."""
    content = ", ".join(f"{name} = %({name})s" for name in _FREED)
    moment = at.database.moment
    statement = (
        f"UPDATE {at.database.waiting_name} SET {content}, set_aside = false, attempts = 0,"
        f" due_at = {moment}, held_until = {at.database.always}, updated_at = {moment}"
        " WHERE id = %(id)s"
    )
    for message in sorted(messages, key=_number):
        row = _row(message)
        given = {name: row[name] for name in _FREED}
        at.run(statement, {**given, "id": message.number, "now": at.database.now})
    at.database.tell(at.link)


# ---- What waits --------------------------------------------------------------------------------


def lanes(at: Access[Link], lanes: Collection[str]) -> set[str]:
    """As Inside says."""
    found: set[str] = set()
    for batch in batches(sorted(lanes)):
        # Digests, of hexadecimal digits.
        given = ", ".join(f"'{lane}'" for lane in batch)
        statement = (
            f"SELECT DISTINCT lane FROM {at.database.waiting_name}"
            f" WHERE lane IN ({given}) AND lane <> name AND set_aside = false"
        )
        found |= {lane for [lane] in at.run(statement).fetchall()}
    return found


def numbered(at: Access[Link], numbers: Collection[int]) -> list[WaitingMessage]:
    """As Inside says."""
    found: list[WaitingMessage] = []
    for batch in batches(sorted(numbers)):
        statement = (
            f"SELECT {_columns(at)} FROM {at.database.waiting_name} AS d"
            f" WHERE d.id IN ({_listed(batch)}) ORDER BY d.id"
        )
        found += map(_message, at.run(statement).fetchall())
    return found


def listed(at: Access[Link], listing: Listing) -> list[WaitingMessage]:
    """As Store says."""
    queue, is_many = listing.queue.removesuffix("*"), listing.queue.endswith("*")
    among = "d.queue >= %(queue)s AND d.queue < %(end)s" if is_many else "d.queue = %(queue)s"
    # The letter after the last one ends the names that begin so.
    end = queue[:-1] + chr(ord(queue[-1]) + 1) if is_many else ""
    statement = (
        f"SELECT {_columns(at)} FROM {at.database.waiting_name} AS d WHERE {among}"
        f" AND d.set_aside = {'true' if listing.is_set_aside else 'false'}"
        f" AND d.id > {listing.after:d} ORDER BY d.id LIMIT {listing.limit:d}"
    )
    values = {"queue": queue, "end": end} if is_many else {"queue": queue}
    return [_message(row) for row in at.run(statement, values).fetchall()]


def backlogs(at: Access[Link]) -> Mapping[str, Backlog]:
    """As Store says."""
    now, oldest = at.database.time(at.link), at.database.epoch_text("MIN(due_at)")
    found = at.run(
        f"SELECT queue, set_aside, COUNT(*), {oldest} FROM {at.database.waiting_name}"
        " GROUP BY queue, set_aside ORDER BY queue"
    ).fetchall()
    backlogs: dict[str, Backlog] = {}
    for queue, is_aside, count, due_at in found:
        before = backlogs.get(queue, Backlog(0, 0, 0.0))
        if is_aside:
            backlogs[queue] = replace(before, set_aside=count)
        else:
            backlogs[queue] = replace(before, waiting=count, lag_s=max(0.0, now - due_at))
    return backlogs


def free_in_s(at: Access[Link], queue: str) -> float | None:
    """As Store says."""
    first = at.database.epoch_text("MIN(held_until)")
    statement = (
        f"SELECT {first} FROM {at.database.waiting_name}"
        " WHERE queue = %(queue)s AND set_aside = false"
    )
    [free_at] = at.run(statement, {"queue": queue}).fetchone()
    return None if free_at is None else max(0.0, float(free_at) - at.database.time(at.link))


def newest(at: Access[Link]) -> int:
    """The highest number of any; 0 where there are none."""
    statement = f"SELECT COALESCE(MAX(id), 0) FROM {at.database.waiting_name}"
    return int(at.run(statement).fetchone()[0])


# ---- Between messages and rows -----------------------------------------------------------------


def _row(waiting: WaitingMessage) -> dict[str, Any]:
    message = waiting.message
    return {
        "queue": waiting.queue,
        "name": waiting.name,
        "message_id": waiting.parent.message_id,
        "provider": waiting.parent.consumer,
        "position": waiting.position,
        "destination": waiting.destination,
        "own_id": waiting.id,
        "type": message.type,
        "body": message.body,
        "headers": _headers(message),
        "source": message.source,
        "sent_at": message.time and message.time.isoformat(),
        "content_type": message.content_type,
        "ordering_key": message.key,
        "delay_s": float(waiting.delay_s),
        "lane": waiting.lane,
        "attempts": waiting.attempts,
        "error": waiting.error,
        "reason": waiting.reason,
        "set_aside": waiting.is_set_aside,
    }


def _columns(at: Access[Link]) -> str:
    """What `_message` is made from, of the table `d`."""
    times = (at.database.epoch_text(f"d.{name}") for name in _TIMES)
    return ", ".join((*(f"d.{name}" for name in _LOADED), *times))


def _message(row: Sequence[Any]) -> WaitingMessage:
    """The message in a row of `_columns`."""
    of = dict(zip((*_LOADED, *_TIMES), row, strict=True))
    sent_at = of["sent_at"]
    message = Message(
        id=of["own_id"],
        body=bytes(of["body"]),
        type=of["type"],
        headers=json.loads(of["headers"]),
        source=of["source"],
        time=sent_at and datetime.fromisoformat(sent_at),
        content_type=of["content_type"],
        key=of["ordering_key"],
    )
    return WaitingMessage(
        id=of["own_id"],
        destination=of["destination"],
        message=message,
        parent=Key(of["provider"], of["message_id"]),
        position=of["position"],
        delay_s=of["delay_s"],
        attempts=of["attempts"],
        error=of["error"],
        number=of["id"],
        queue=of["queue"],
        reason=of["reason"],
        is_set_aside=bool(of["set_aside"]),
        name=of["name"],
        lane=of["lane"],
        since=float(of["created_at"]),
        last_seen=float(of["updated_at"]),
        due=float(of["due_at"]),
    )


def _number(message: WaitingMessage) -> int:
    """Its place among all; 0, that of no row, for one that was never stored."""
    return message.number or 0


def _numbers(messages: Sequence[WaitingMessage]) -> str:
    return _listed(sorted(map(_number, messages)))


def _listed(numbers: Sequence[int]) -> str:
    """Numbers as SQL has them in a list: whole ones need no parameters."""
    return ", ".join(f"{number:d}" for number in numbers)
