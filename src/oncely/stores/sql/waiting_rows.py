"""Waiting messages: the statements that are the same on all databases.

Each runs in the transaction that is open on a link.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from oncely.core.errors import UnreadableRow
from oncely.core.message import Message
from oncely.core.record import Key
from oncely.core.waiting import WaitingMessage, lane_in
from oncely.stores.sql.batches import batches
from oncely.stores.sql.connected_tables import ConnectedTables
from oncely.stores.sql.dialect import SqlConnection
from oncely.stores.sql.record_rows import by_index, split_columns
from oncely.stores.sql.row_values import read
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
"""The columns that are the same for all messages that are put into queues."""
_LOADED = (
    *("id", "queue", "provider", "message_id", "position", "destination", "delay_s", "attempts"),
    *("error", "reason", "set_aside", "name", "lane", *_CONTENT),
)
_BODILESS = tuple(name for name in _LOADED if name != "body")
_TIMES = ("created_at", "updated_at", "due_at")
_GROUPED = ("queue", "set_aside", "due_at")


def keep(
    at: ConnectedTables[SqlConnection], messages: Sequence[WaitingMessage], *, renews: bool = False
) -> None:
    """As Inside says."""
    ordered = sorted(messages, key=lambda message: message.position)
    for batch in batches([_row(message) for message in ordered], lambda row: len(row["body"])):
        at.dialect.keep(at.link, batch, renews=renews)


def put(
    at: ConnectedTables[SqlConnection],
    queue: str,
    messages: Sequence[Message],
    names: Sequence[str],
) -> None:
    """Put messages into a queue under these names, which must be unique, by one statement. The same
    as `keep` of the result of `WaitingMessage.queued`, but faster.
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
    rows = split_columns(columns)
    constant = {**_PUT, "queue": queue, **rows.constant}
    at.dialect.put(at.link, rows._replace(constant=constant))


def _headers(message: Message) -> str:
    # Most messages have no headers.
    return json.dumps(dict(message.headers)) if message.headers else "{}"


def waiting(at: ConnectedTables[SqlConnection], keys: Collection[Key]) -> list[WaitingMessage]:
    """As Inside says."""
    statement = f"SELECT {_columns(at)} {at.dialect.of_keys(at.dialect.waiting_name)}"
    found = [
        _message(at, row)
        for batch in batches(by_index(keys))
        for row in at.run(statement, at.dialect.key_values(batch)).fetchall()
    ]
    return sorted(found, key=_number)


# ---- Taking ------------------------------------------------------------------------------------


def take(
    at: ConnectedTables[SqlConnection],
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
        f"UPDATE {at.dialect.waiting_name} SET held_until = {at.dialect.later('%(hold_s)s')},"
        f" attempts = attempts + {counts:d} WHERE id IN ({_numbers(taken)})"
    )
    at.run(hold, {"hold_s": float(hold_s), "now": at.dialect.now})
    return [replace(each, attempts=each.attempts + 1) for each in taken] if counts else taken


def is_alone(message: WaitingMessage) -> bool:
    """Whether its lane has no other message: such a lane has the message's own name."""
    return message.lane == message.name


def _let_go(at: ConnectedTables[SqlConnection], queue: str) -> None:
    """Mark messages whose hold or delay is over as free, so that they are found in their order."""
    at.run(
        f"UPDATE {at.dialect.waiting_name} SET held_until = {at.dialect.always}"
        " WHERE queue = %(queue)s AND set_aside = false"
        f" AND held_until > {at.dialect.always}"
        # The time is read once, in a subquery: an index does not help for a clock that moves.
        f" AND held_until <= (SELECT {at.dialect.moment})",
        {"queue": queue, "now": at.dialect.now},
    )


def _numbers_of(at: ConnectedTables[SqlConnection], parents: Collection[Key]) -> list[int]:
    # A separate query: joined to the other conditions, planners may begin with those.
    statement = f"SELECT d.id {at.dialect.of_keys(at.dialect.waiting_name)}"
    return [
        number
        for batch in batches(by_index(parents))
        for [number] in at.run(statement, at.dialect.key_values(batch)).fetchall()
    ]


def _choose(
    at: ConnectedTables[SqlConnection],
    queue: str,
    limit: int,
    among: Sequence[int] | None,
    first: str,
) -> list[WaitingMessage]:
    """The first free messages, which are locked; messages that others have locked are skipped.

    `first` is the column that the first message of a lane and the chosen one must have in common:
    `held_until`, so that the first one is free, too; or `id`, so that only the first itself is
    chosen. However many messages wait behind a first one that is not free, they do not hold up
    other lanes.
    """
    these = "" if among is None else f" AND d.id IN ({_listed(among)})"
    dialect, name = at.dialect, at.dialect.waiting_name
    free = f"= {dialect.always}"
    statement = (
        f"SELECT {_columns(at)} FROM {name} AS d"
        f" WHERE d.queue = %(queue)s AND d.set_aside = false AND d.held_until {free}{these}"
        f" AND (d.lane = d.name OR (SELECT h.{first} FROM {name} AS h"
        f" WHERE h.lane = d.lane AND h.lane <> h.name AND h.set_aside = false"
        f" ORDER BY h.id LIMIT 1) = d.{first})"
        f" ORDER BY d.id LIMIT {limit:d} {dialect.skip_locked}"
    )
    chosen = []
    for row in at.run(statement, {"queue": queue}).fetchall():
        try:
            chosen.append(_message(at, row))
        except UnreadableRow as error:
            # For people: the messages behind it must not wait for them.
            aside = f"UPDATE {name} SET set_aside = true, reason = %(why)s WHERE id = {row[0]:d}"
            at.run(aside, {"why": str(error)})
    return chosen


def _first_left(
    at: ConnectedTables[SqlConnection], chosen: Sequence[WaitingMessage]
) -> dict[str, int]:
    """For each lane of these, the number of the first message that is not chosen: it is held, has
    to wait, or is locked by another worker.
    """
    if not chosen:
        return {}
    name, numbers = at.dialect.waiting_name, _numbers(chosen)
    found = at.run(
        f"SELECT d.lane, MIN(d.id) FROM {name} AS d"
        f" WHERE d.lane IN (SELECT c.lane FROM {name} AS c WHERE c.id IN ({numbers}))"
        f" AND d.lane <> d.name AND d.set_aside = false AND d.id < {max(map(_number, chosen))}"
        f" AND d.id NOT IN ({numbers}) GROUP BY d.lane",
    )
    return dict(found.fetchall())


# ---- What becomes of those that were taken -----------------------------------------------------


def remove(at: ConnectedTables[SqlConnection], messages: Sequence[WaitingMessage]) -> None:
    """As Inside says."""
    for batch in batches(messages):
        numbers = _numbers(batch)
        at.run(f"DELETE FROM {at.dialect.waiting_name} WHERE id IN ({numbers})")


def held(at: ConnectedTables[SqlConnection], messages: Sequence[WaitingMessage]) -> set[int]:
    """As Inside says."""
    found: dict[int, tuple[str, int]] = {}
    for batch in batches(messages):
        statement = (
            f"SELECT d.id, d.queue, d.attempts FROM {at.dialect.waiting_name} AS d"
            f" WHERE d.id IN ({_numbers(batch)}) AND d.set_aside = false"
            f" AND d.held_until > {at.dialect.always} ORDER BY d.id {at.dialect.locked}"
        )
        rows = at.run(statement).fetchall()
        found |= {number: (queue, attempts) for number, queue, attempts in rows}
    as_taken = ((_number(each), (each.queue, each.attempts)) for each in messages)
    return {number for number, taken in as_taken if found.get(number) == taken}


def remove_held(at: ConnectedTables[SqlConnection], messages: Sequence[WaitingMessage]) -> set[int]:
    """As Inside says."""
    numbers = held(at, messages)
    remove(at, [each for each in messages if _number(each) in numbers])
    if not all(map(is_alone, messages)):
        at.dialect.tell(at.link)
    return numbers


def put_back(at: ConnectedTables[SqlConnection], changes: Sequence[PutBack]) -> None:
    """As Inside says."""
    later = at.dialect.later("%(retry_s)s")
    free_from = f"CASE WHEN %(retry_s)s > 0 THEN {later} ELSE {at.dialect.always} END"
    written = (
        f"UPDATE {at.dialect.waiting_name} SET attempts = attempts + %(tried)s,"
        f" error = coalesce(%(error)s, error), updated_at = {at.dialect.moment}"
    )
    aside = f"{written}, set_aside = true, reason = %(error)s WHERE id = %(id)s"
    again = f"{written}, due_at = {later}, held_until = {free_from} WHERE id = %(id)s"
    for message, error, retry_s, is_try in sorted(changes, key=lambda each: _number(each.message)):
        values: dict[str, Any] = {"id": message.number, "error": error, "tried": int(is_try)}
        values["now"] = at.dialect.now
        if retry_s is None:
            at.run(aside, values)
        else:
            at.run(again, {**values, "retry_s": float(retry_s)})
    if any(change.retry_s == 0 for change in changes):
        at.dialect.tell(at.link)


def free(at: ConnectedTables[SqlConnection], messages: Sequence[WaitingMessage]) -> None:
    """As Inside says."""
    content = ", ".join(f"{name} = %({name})s" for name in _FREED)
    moment = at.dialect.moment
    statement = (
        f"UPDATE {at.dialect.waiting_name} SET {content}, set_aside = false, attempts = 0,"
        f" due_at = {moment}, held_until = {at.dialect.always}, updated_at = {moment}"
        " WHERE id = %(id)s"
    )
    for message in sorted(messages, key=_number):
        row = _row(message)
        given = {name: row[name] for name in _FREED}
        at.run(statement, {**given, "id": message.number, "now": at.dialect.now})
    at.dialect.tell(at.link)


# ---- What waits --------------------------------------------------------------------------------


def lanes(at: ConnectedTables[SqlConnection], lanes: Collection[str]) -> set[str]:
    """As Inside says."""
    found: set[str] = set()
    for batch in batches(sorted(lanes)):
        # Lanes are digests of hexadecimal digits, which need no escaping.
        given = ", ".join(f"'{lane}'" for lane in batch)
        statement = (
            f"SELECT DISTINCT lane FROM {at.dialect.waiting_name}"
            f" WHERE lane IN ({given}) AND lane <> name AND set_aside = false"
        )
        found |= {lane for [lane] in at.run(statement).fetchall()}
    return found


def numbered(at: ConnectedTables[SqlConnection], numbers: Collection[int]) -> list[WaitingMessage]:
    """As Inside says."""
    found: list[WaitingMessage] = []
    for batch in batches(sorted(numbers)):
        statement = (
            f"SELECT {_columns(at)} FROM {at.dialect.waiting_name} AS d"
            f" WHERE d.id IN ({_listed(batch)}) ORDER BY d.id"
        )
        found += [_message(at, row) for row in at.run(statement).fetchall()]
    return found


def listed(at: ConnectedTables[SqlConnection], listing: Listing) -> list[WaitingMessage]:
    """As Store says."""
    queue, is_many = listing.queue.removesuffix("*"), listing.queue.endswith("*")
    among = "d.queue >= %(queue)s AND d.queue < %(end)s" if is_many else "d.queue = %(queue)s"
    # The range of names with a prefix ends where its last character is replaced by the next one.
    end = queue[:-1] + chr(ord(queue[-1]) + 1) if is_many else ""
    loaded = _LOADED if listing.with_bodies else _BODILESS
    statement = (
        f"SELECT {_columns(at, loaded)} FROM {at.dialect.waiting_name} AS d WHERE {among}"
        f" AND d.set_aside = {'true' if listing.is_set_aside else 'false'}"
        f" AND d.id > {listing.after:d} ORDER BY d.id LIMIT {listing.limit:d}"
    )
    values = {"queue": queue, "end": end} if is_many else {"queue": queue}
    return [_message(at, row, loaded) for row in at.run(statement, values).fetchall()]


def backlogs(at: ConnectedTables[SqlConnection]) -> Mapping[str, Backlog]:
    """As Store says."""
    now, oldest_at = at.dialect.time(at.link), at.dialect.epoch_text("MIN(due_at)")
    found = at.run(
        f"SELECT queue, set_aside, {oldest_at}, COUNT(*) FROM {at.dialect.waiting_name}"
        " GROUP BY queue, set_aside ORDER BY queue"
    ).fetchall()
    backlogs: dict[str, Backlog] = {}
    for row in found:
        queue, is_aside, oldest = read(at.dialect.waiting_table, _GROUPED, row).values()
        before = backlogs.get(queue, Backlog(0, 0, 0.0))
        if is_aside:
            backlogs[queue] = replace(before, set_aside=row[-1])
        else:
            lag_s = max(0.0, now - oldest)
            backlogs[queue] = replace(before, waiting=row[-1], lag_s=lag_s)
    return backlogs


def free_in_s(at: ConnectedTables[SqlConnection], queue: str) -> float | None:
    """As Store says."""
    first = at.dialect.epoch_text("MIN(held_until)")
    statement = (
        f"SELECT {first} FROM {at.dialect.waiting_name}"
        " WHERE queue = %(queue)s AND set_aside = false"
    )
    [first_at] = at.run(statement, {"queue": queue}).fetchone()
    if first_at is None:
        return None
    found = read(at.dialect.waiting_table, ("queue", "held_until"), (queue, first_at))
    return max(0.0, float(found["held_until"]) - at.dialect.time(at.link))


def newest(at: ConnectedTables[SqlConnection]) -> int:
    """The highest number of any message; 0 where there are none."""
    statement = f"SELECT COALESCE(MAX(id), 0) FROM {at.dialect.waiting_name}"
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


def _columns(at: ConnectedTables[SqlConnection], loaded: Sequence[str] = _LOADED) -> str:
    """The columns of the table `d` that `_message` reads."""
    times = (at.dialect.epoch_text(f"d.{name}") for name in _TIMES)
    return ", ".join((*(f"d.{name}" for name in loaded), *times))


def _message(
    at: ConnectedTables[SqlConnection], row: Sequence[Any], loaded: Sequence[str] = _LOADED
) -> WaitingMessage:
    """The message in a row of `_columns`. Raises UnreadableRow."""
    of = read(at.dialect.waiting_table, (*loaded, *_TIMES), row)
    message = Message(
        id=of["own_id"],
        body=of.get("body", b""),
        type=of["type"],
        headers=of["headers"],
        source=of["source"],
        time=of["sent_at"],
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
        is_set_aside=of["set_aside"],
        name=of["name"],
        lane=of["lane"],
        since=of["created_at"],
        last_seen=of["updated_at"],
        due=of["due_at"],
    )


def _number(message: WaitingMessage) -> int:
    """The number of a message; 0, which no row has, for one that was never stored."""
    return message.number or 0


def _numbers(messages: Sequence[WaitingMessage]) -> str:
    return _listed(sorted(map(_number, messages)))


def _listed(numbers: Sequence[int]) -> str:
    """A SQL list of whole numbers, which need no parameters."""
    return ", ".join(f"{number:d}" for number in numbers)
