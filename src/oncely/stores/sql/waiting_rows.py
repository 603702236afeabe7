"""Waiting messages: the statements that are the same on all databases.

Each runs in the transaction that is open on a link. A call without a docstring is the one by its
name of the Transaction or the Store protocol.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from oncely._util.chance import new_name
from oncely.core.errors import UnreadableRow
from oncely.core.message import Message
from oncely.core.record import Key
from oncely.core.waiting import WaitingMessage, lane_in
from oncely.stores.sql.dialect import AnyTables
from oncely.stores.sql.record_rows import batches, split_columns
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

_PORTION = 1_000
"""So many messages that are due are freed at a time."""
_LANES = 100
"""So many lanes, and two for each message that is wanted, are looked up at a time."""
_LAST_LANE = "~"
"""Comes after each lane."""
_MOST_IN_UNION = 400
"""SQLite takes at most 500 queries in one UNION."""
_PAGE = 100


def keep(at: AnyTables, messages: Sequence[WaitingMessage], *, renews: bool = False) -> None:
    ordered = sorted(messages, key=lambda message: message.position)
    for batch in batches([_row(message) for message in ordered], lambda row: len(row["body"])):
        at.dialect.keep(at.link, batch, renews=renews)


def put(at: AnyTables, queue: str, messages: Sequence[Message], names: Sequence[str]) -> None:
    """Put messages into a queue under these names, which must be unique, by one statement. The same
    as `keep` of the result of `WaitingMessage.queued`, but faster.
    """
    lanes = [
        name if message.key is None else lane_in(queue, message.key)
        for name, message in zip(names, messages, strict=True)
    ]
    content = zip(*map(_content, messages), strict=True)
    columns = {"name": names, "lane": lanes, **dict(zip(_CONTENT, content, strict=True))}
    rows = split_columns(columns)
    constant = {**_PUT, "queue": queue, **rows.constant}
    at.dialect.put(at.link, rows._replace(constant=constant))


def waiting(at: AnyTables, keys: Collection[Key]) -> list[WaitingMessage]:
    statement = f"SELECT {_columns(at)} {at.dialect.of_keys(at.dialect.waiting_name)}"
    found = [
        _message(at, row)
        for batch in batches(sorted(keys))
        for row in at.run(statement, at.dialect.key_values(batch)).fetchall()
    ]
    return sorted(found, key=_number)


def unparented(at: AnyTables, message_id: str) -> list[WaitingMessage]:
    statement = (
        f"SELECT {_columns(at, _BODILESS)} FROM {at.dialect.waiting_name} AS d"
        " WHERE d.own_id = %(id)s AND d.provider = '' ORDER BY d.id"
    )
    rows = at.run(statement, {"id": message_id}).fetchall()
    return [_message(at, row, _BODILESS) for row in rows]


# ---- Taking ------------------------------------------------------------------------------------


def take(
    at: AnyTables,
    queue: str,
    limit: int,
    hold_s: float,
    parents: Collection[Key] | None = None,
    *,
    one_per_lane: bool = False,
    counts: bool = False,
) -> list[WaitingMessage]:
    among: list[int] | None = None
    if parents is not None:
        # A separate query: joined to the other conditions, planners may begin with those.
        of_these = f"SELECT d.id {at.dialect.of_keys(at.dialect.waiting_name)}"
        among = [
            number
            for batch in batches(sorted(parents))
            for [number] in at.run(of_these, at.dialect.key_values(batch)).fetchall()
        ]
    first = "id" if one_per_lane else "held_until"
    taken: list[WaitingMessage] = []
    is_portion = True
    while is_portion and not taken and among != []:
        is_portion = _let_go(at, queue, max(_PORTION, limit))
        found = _choose(at, queue, limit, among, first)
        first_left = _first_left(at, queue, [each for each in found if not is_alone(each)])
        taken = [m for m in found if _number(m) < first_left.get(m.lane, _number(m) + 1)]
    if not taken:
        return []
    hold = (
        f"UPDATE {at.dialect.waiting_name} SET held_until = {at.dialect.later('%(hold_s)s')},"
        f" attempts = attempts + {counts:d} WHERE id IN ({_numbers(taken)})"
    )
    at.run(hold, {"hold_s": float(hold_s), "now": at.dialect.now()})
    return [replace(each, attempts=each.attempts + 1) for each in taken] if counts else taken


def is_alone(message: WaitingMessage) -> bool:
    """Whether its lane has no other message: such a lane has the message's own name."""
    return message.lane == message.name


def _let_go(at: AnyTables, queue: str, most: int) -> bool:
    """Mark messages whose hold or delay is over as free, so that they are found in their order; at
    most so many, since hundreds of thousands may be due at the same moment. Whether it was as many.
    """
    name, dialect = at.dialect.waiting_name, at.dialect
    is_due = f"d.set_aside = false AND d.held_until > {dialect.always} AND d.held_until <="
    values = {"queue": queue, "now": dialect.now()}
    beyond, due = "", []
    while True:
        # Without locks: MariaDB would lock all that are held as well, and whoever acknowledges them
        # would wait. The time is read once, in a subquery: an index does not help for a clock that
        # moves.
        due = at.run(
            f"SELECT d.held_until, d.id FROM {name} AS d WHERE d.queue = %(queue)s AND {is_due}"
            f" (SELECT {dialect.moment}){beyond}"
            f" ORDER BY d.held_until, d.id {dialect.limit.format(most)}",
            values,
        ).fetchall()
        if not due:
            return False
        these = _listed(sorted(number for _, number in due))
        locked = (
            f"SELECT d.id FROM {name} AS d WHERE d.id IN ({these}) AND {is_due} {dialect.moment}"
        )
        found = at.run(f"{locked} ORDER BY d.id {dialect.skip_locked}", values).fetchall()
        if found:
            numbers = _listed([number for [number] in found])
            at.run(f"UPDATE {name} SET held_until = {dialect.always} WHERE id IN ({numbers})")
        if found or len(due) < most:
            return len(due) == most
        # Others free these at the same time.
        values["held_until"], last = due[-1]
        beyond = f" AND {dialect.after_in_order.format('%(held_until)s', last)}"


def _choose(
    at: AnyTables,
    queue: str,
    limit: int,
    among: Sequence[int] | None,
    first: str,
) -> list[WaitingMessage]:
    """Free messages that need not wait for others, which are locked; messages that others have
    locked are skipped.

    The first free ones are read, in their order. Where some of these have to wait behind others,
    the rest is chosen from the first messages of all lanes: what waits behind those is not read.
    """
    if among is not None:
        return [each for each, _ in _locked(at, queue, limit, first, among)]
    rows = _locked(at, queue, limit, first)
    found = [message for message, is_open in rows if is_open]
    heads = _heads(at, queue, 2 * limit + _LANES)
    while len(found) < limit == len(rows) and (some := next(heads, None)) is not None:
        others = [*some - {*map(_number, found)}]
        found += [each for each, _ in _locked(at, queue, limit - len(found), first, others)]
    return sorted(found, key=_number)


def _heads(at: AnyTables, queue: str, limit: int) -> Iterator[set[int]]:
    """The numbers of the first messages of all lanes, about `limit` at a time. They begin with any
    lane, so that none is always the last.
    """
    begin, statement = new_name(), at.dialect.heads(limit)
    heads: set[int] = set()
    for lane, last in ((begin, _LAST_LANE), ("", begin)):
        after = lane
        while after < last:
            rows = at.run(statement, {"queue": queue, "after": after}).fetchall()
            firsts = dict(reversed(rows))
            heads |= {number for lane, number in firsts.items() if lane <= last}
            after = rows[-1][0] if len(rows) == limit else last
            if len(heads) >= limit:
                yield heads
                heads = set()
    yield heads


def _locked(
    at: AnyTables,
    queue: str,
    limit: int,
    first: str,
    among: Sequence[int] | None = None,
) -> list[tuple[WaitingMessage, bool]]:
    """The first free messages, now locked, and whether each is open: no other of its lane is before
    it. `among` these, only those that are open.

    `first` is the column that the first message of a lane and the open one must have in common:
    `held_until`, so that the first one is free, too; or `id`, so that only the first itself is
    open.
    """
    if among is not None and not among:
        return []
    dialect, name = at.dialect, at.dialect.waiting_name
    there = f"d.queue = %(queue)s AND d.set_aside = false AND {dialect.is_free}"
    is_open = f"(d.lane = d.name OR {dialect.first_in('d.lane', first)} = d.{first})"
    if among is not None:
        # By their numbers: planners would begin with what can be read from another index.
        these = f"d.id IN ({_listed(among)}) AND CASE WHEN {there} THEN 1 END = 1"
        there, is_open = f"{these} AND {is_open}", "true"
    statement = (
        f"SELECT {_columns(at)}, {is_open} FROM {name} AS d WHERE {there}"
        f" ORDER BY d.held_until, d.id {dialect.limit.format(limit)} {dialect.skip_locked}"
    )
    found = []
    for row in at.run(statement, {"queue": queue}).fetchall():
        try:
            found.append((_message(at, row), bool(row[-1])))
        except UnreadableRow as error:
            # For people: the messages behind it must not wait for them.
            aside = f"UPDATE {name} SET set_aside = true, reason = %(why)s WHERE id = {row[0]:d}"
            at.run(aside, {"why": str(error)})
    return found


def _first_left(at: AnyTables, queue: str, chosen: Sequence[WaitingMessage]) -> dict[str, int]:
    """For each lane of these, the number of the first message that is not chosen, where there is
    one: it is held, has to wait, or is locked by another worker.
    """
    if not chosen:
        return {}
    one_of_each = _listed([*{each.lane: _number(each) for each in chosen}.values()])
    left = at.dialect.first_in("d.lane", condition=f" AND h.id NOT IN ({_numbers(chosen)})")
    found = at.run(
        f"SELECT d.lane, {left} FROM {at.dialect.waiting_name} AS d WHERE d.id IN ({one_of_each})",
        {"queue": queue},
    )
    return {lane: left for lane, left in found.fetchall() if left is not None}


# ---- What becomes of those that were taken -----------------------------------------------------


def remove(at: AnyTables, messages: Sequence[WaitingMessage]) -> None:
    for batch in batches(messages):
        numbers = _numbers(batch)
        at.run(f"DELETE FROM {at.dialect.waiting_name} WHERE id IN ({numbers})")


def held(at: AnyTables, messages: Sequence[WaitingMessage]) -> set[int]:
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


def remove_held(at: AnyTables, messages: Sequence[WaitingMessage]) -> set[int]:
    numbers = held(at, messages)
    remove(at, [each for each in messages if _number(each) in numbers])
    if not all(map(is_alone, messages)):
        at.dialect.tell(at.link)
    return numbers


def put_back(at: AnyTables, changes: Sequence[PutBack]) -> None:
    later = at.dialect.later("%(retry_s)s")
    free_from = f"CASE WHEN %(retry_s)s > 0 THEN {later} ELSE {at.dialect.always} END"
    written = (
        f"UPDATE {at.dialect.waiting_name} SET attempts = attempts + %(tried)s,"
        f" error = coalesce(%(error)s, error), updated_at = {at.dialect.moment}"
    )
    # Free, so that dead letters are listed in their order by an index.
    aside = (
        f"{written}, set_aside = true, held_until = {at.dialect.always}, reason = %(error)s"
        " WHERE id = %(id)s"
    )
    again = f"{written}, due_at = {later}, held_until = {free_from} WHERE id = %(id)s"
    for message, error, retry_s, is_try in sorted(changes, key=lambda each: _number(each.message)):
        values: dict[str, Any] = {"id": message.number, "error": error, "tried": int(is_try)}
        values["now"] = at.dialect.now()
        if retry_s is None:
            at.run(aside, values)
        else:
            at.run(again, {**values, "retry_s": float(retry_s)})
    if any(change.retry_s == 0 for change in changes):
        at.dialect.tell(at.link)


def free(at: AnyTables, messages: Sequence[WaitingMessage]) -> None:
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
        at.run(statement, {**given, "id": message.number, "now": at.dialect.now()})
    at.dialect.tell(at.link)


def rename(at: AnyTables, messages: Sequence[WaitingMessage]) -> None:
    statement = f"UPDATE {at.dialect.waiting_name} SET name = %(name)s WHERE id = %(id)s"
    for message in sorted(messages, key=_number):
        at.run(statement, {"name": message.name, "id": message.number})


# ---- What waits --------------------------------------------------------------------------------


def lanes(at: AnyTables, queue: str, lanes: Collection[str]) -> set[str]:
    found: set[str] = set()
    ordered = sorted(lanes)
    for start in range(0, len(ordered), _MOST_IN_UNION):
        # Lanes are digests of hexadecimal digits, which need no escaping.
        given = " UNION ALL ".join(
            f"SELECT '{lane}' AS lane" for lane in ordered[start : start + _MOST_IN_UNION]
        )
        first = at.dialect.first_in("d.lane")
        statement = f"SELECT d.lane FROM ({given}) AS d WHERE {first} IS NOT NULL"
        found |= {lane for [lane] in at.run(statement, {"queue": queue}).fetchall()}
    return found


def numbered(at: AnyTables, numbers: Collection[int]) -> list[WaitingMessage]:
    return _found(at, numbers, "")


def idle(at: AnyTables, numbers: Collection[int]) -> list[WaitingMessage]:
    # A delay ends when the message is due, a hold later.
    by_nobody = (
        f" AND (d.set_aside = true OR d.held_until <= d.due_at"
        f" OR d.held_until <= (SELECT {at.dialect.moment}))"
    )
    return _found(at, numbers, by_nobody, at.dialect.locked)


def _found(
    at: AnyTables, numbers: Collection[int], condition: str, lock: str = ""
) -> list[WaitingMessage]:
    found: list[WaitingMessage] = []
    for batch in batches(sorted(numbers)):
        statement = (
            f"SELECT {_columns(at)} FROM {at.dialect.waiting_name} AS d"
            f" WHERE d.id IN ({_listed(batch)}){condition} ORDER BY d.id {lock}"
        )
        rows = at.run(statement, {"now": at.dialect.now()}).fetchall()
        found += [_message(at, row) for row in rows]
    return found


class Listed(NamedTuple):
    """A message, and its place among those of its queue that are listed."""

    held_until: Any
    """As the driver has it."""
    number: int
    message: WaitingMessage


def queues(at: AnyTables, asked: str) -> list[str]:
    """The queues in which anything waits that have this name, or where it ends with `*`, whose
    names begin with it.
    """
    if not asked.endswith("*"):
        return [asked]
    begin = asked[:-1]
    # The range of names with a prefix ends where its last character is replaced by the next one.
    values = {"after": begin, "end": begin[:-1] + chr(ord(begin[-1]) + 1)}
    statement = (
        f"SELECT d.queue FROM {at.dialect.waiting_name} AS d"
        " WHERE d.queue > %(after)s AND d.queue < %(end)s ORDER BY d.queue LIMIT 1"
    )
    found = []
    while row := at.run(statement, values).fetchone():
        values["after"] = row[0]
        found.append(row[0])
    return found


def page(at: AnyTables, queue: str, listing: Listing, after: Listed | None) -> list[Listed]:
    """The next messages of a queue that are listed, in the order of an index: at most a page."""
    loaded = _LOADED if listing.with_bodies else _BODILESS
    most = min(listing.limit, _PAGE if listing.with_bodies else 10 * _PAGE)
    beyond = (
        ""
        if after is None
        else f" AND {at.dialect.after_in_order.format('%(held_until)s', after.number)}"
    )
    statement = (
        f"SELECT {_columns(at, loaded)}, d.held_until FROM {at.dialect.waiting_name} AS d"
        f" WHERE d.queue = %(queue)s AND d.set_aside = {listing.is_set_aside}{beyond}"
        f" ORDER BY d.held_until, d.id {at.dialect.limit.format(most)}"
    )
    values = {"queue": queue} if after is None else {"queue": queue, "held_until": after.held_until}
    rows = at.run(statement, values).fetchall()
    return [Listed(row[-1], row[0], _message(at, row[:-1], loaded)) for row in rows]


def backlogs(at: AnyTables) -> Mapping[str, Backlog]:
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


def free_in_s(at: AnyTables, queue: str) -> float | None:
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


def newest(at: AnyTables) -> int:
    """The highest number of any message; 0 where there are none."""
    statement = f"SELECT COALESCE(MAX(id), 0) FROM {at.dialect.waiting_name}"
    return int(at.run(statement).fetchone()[0])


# ---- Between messages and rows -----------------------------------------------------------------


def _content(message: Message) -> tuple[Any, ...]:
    """The values of `_CONTENT`."""
    return (
        message.id,
        message.type,
        message.body,
        # Most messages have no headers.
        json.dumps(dict(message.headers)) if message.headers else "{}",
        message.source,
        message.time and message.time.isoformat(),
        message.content_type,
        message.key,
    )


def _row(waiting: WaitingMessage) -> dict[str, Any]:
    return {
        **dict(zip(_CONTENT, _content(waiting.message), strict=True)),
        "queue": waiting.queue,
        "name": waiting.name,
        "message_id": waiting.parent.message_id,
        "provider": waiting.parent.consumer,
        "position": waiting.position,
        "destination": waiting.destination,
        "own_id": waiting.id,
        "delay_s": float(waiting.delay_s),
        "lane": waiting.lane,
        "attempts": waiting.attempts,
        "error": waiting.error,
        "reason": waiting.reason,
        "set_aside": waiting.is_set_aside,
    }


def _columns(at: AnyTables, loaded: Sequence[str] = _LOADED) -> str:
    """The columns of the table `d` that `_message` reads."""
    times = (at.dialect.epoch_text(f"d.{name}") for name in _TIMES)
    return ", ".join((*(f"d.{name}" for name in loaded), *times))


def _message(at: AnyTables, row: Sequence[Any], loaded: Sequence[str] = _LOADED) -> WaitingMessage:
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
