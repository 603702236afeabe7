"""What a campaign left, judged by what lies in the servers and the log: nothing of oncely here.

The ids of published messages, which are numbers, stand in a file, one a line, in the order in which
they were published; the body of each message is its id. What becomes of a message follows from it:
some fail, some of these permanently, some send a message, whose body is the mode and the id.
Who takes effect leaves a line or a row: the id, the fence under which its handler ran, and its
process. The effects of one mode are rows, of the others lines.
"""

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pika
import psycopg
from pika.exceptions import ChannelClosedByBroker

TRANSACTIONAL = "transactional"
"""Its effects are rows, committed with its claims."""
HELD = "held"
"""Its effects are outside, and never repeated: what is in doubt is held for people."""
REPEATED = "repeated"
"""Its effects are outside, and never lost: what is in doubt runs again."""
ORDERED = "ordered"
"""As `repeated`, by one process at a time, and those of one key in the order of publishing."""
MODES = (TRANSACTIONAL, HELD, REPEATED, ORDERED)
"""Each is the name of a consumer, and of its queue."""
OUT = "out"
"""The queue of what handlers send."""

_KEYS = 40
"""Ordering keys."""
_RECORDS = "SELECT message_id, status, fence FROM processed_messages WHERE provider = %s"
_RETRIES = "SELECT body FROM waiting_messages WHERE queue = %s AND set_aside = %s"
_IN_QUEUE = "SELECT own_id, body FROM waiting_messages WHERE queue = 'queue/' || ?"

_NOT_FOUND = 404
"""The reply code for a queue that was never made."""


def fails(message_id: str) -> bool:
    """Whether the first attempt fails, of one in ten."""
    return int(message_id) % 10 == 3


def fails_permanently(message_id: str) -> bool:
    """Whether every attempt does, of one in a hundred."""
    return int(message_id) % 100 == 50


def sends(message_id: str) -> bool:
    """Whether the handler sends a message, of one in twenty."""
    return int(message_id) % 20 == 7


def key_of(message_id: str) -> str:
    """The ordering key: some of each fail."""
    return str(int(message_id) // 10 % _KEYS)


class Standing(NamedTuple):
    """What the ledger knows of a message."""

    status: str
    fence: int
    """How many claims were granted: attempts do not count each of them."""


class Left(NamedTuple):
    """What is there of one mode, once its queue is drained."""

    effects: Mapping[str, Sequence[int]]
    """By message, the fences under which it took effect."""
    records: Mapping[str, Standing]
    dead: frozenset[str]
    """Which messages were set aside."""
    waiting: int
    """How many are in the queue still."""
    sent: Mapping[str, frozenset[str]]
    """The messages whose handlers have sent theirs, or a relay is to, since it is stored; with the
    ids under which they were sent."""
    order: Sequence[str] = ()
    """The messages in the order in which they took effect, where that is promised."""


def faults(mode: str, published: Iterable[str], left: Left) -> list[str]:
    """What must not be, a sentence each; `published` are the messages in their order."""
    ids = list(dict.fromkeys(published))
    found = [f"{left.waiting} messages are waiting still"] if left.waiting else []
    found += [
        f"{stranger} was never published"
        for stranger in {*left.effects, *left.records, *left.dead, *left.sent} - {*ids}
    ]
    for message_id in sorted(ids):
        fences = left.effects.get(message_id, [])
        standing = left.records.get(message_id)
        is_dead = message_id in left.dead
        wrong = [
            *_losses(mode, message_id, len(fences), standing, is_dead=is_dead),
            *_repetitions(mode, message_id, fences, standing),
            *_faults_in_sending(message_id, left.sent.get(message_id), standing),
        ]
        if mode != HELD and is_dead and not fails_permanently(message_id):
            wrong.append("given up: no handler has failed permanently")
        about = f"(effects under the fences {fences}, {standing}, set aside: {is_dead})"
        found += [f"{mode} {message_id}: {fault} {about}" for fault in wrong]
    return found + [f"{mode} {fault}" for fault in _disorder(ids, left.order)]


def _losses(
    mode: str, message_id: str, effects: int, standing: Standing | None, *, is_dead: bool
) -> list[str]:
    if standing is not None and standing.status in ("sent", "handled"):
        return [] if effects else ["lost: it is completed without an effect"]
    if fails_permanently(message_id) and mode != HELD:
        is_told = is_dead and standing is not None and standing.status == "failed"
        return [] if is_told else ["lost: it has failed permanently, and is not told"]
    if mode != HELD:
        return ["lost: it is not completed"]
    if not is_dead:
        return ["lost: in doubt or failed, and not told"]
    if standing is not None and standing.status == "failed":
        has_failed = fails(message_id) or fails_permanently(message_id)
        return [] if has_failed and not effects else ["lost: it cannot have failed"]
    # Whose claim ran out before the handler began gives it back, and that may come after people
    # were told: the ledger knows nothing of it then, as of a message that never came.
    is_right = standing.status == "processing" if standing else not effects
    return [] if is_right else ["lost: the ledger does not know of its effect"]


def _repetitions(
    mode: str, message_id: str, fences: Sequence[int], standing: Standing | None
) -> list[str]:
    found = []
    if len(fences) > 1 and mode not in (REPEATED, ORDERED):
        found.append("twice: it took effect more than once")
    if len(fences) != len(set(fences)):
        found.append("twice: it took effect again under the same claim")
    if standing is not None and len(fences) > standing.fence:
        found.append("twice: it took effect again without having been in doubt")
    if fences and fails_permanently(message_id):
        found.append("it took effect, though it always fails before that")
    if fences and mode == HELD and fails(message_id):
        found.append("twice: it ran again after it had failed")
    return found


def _faults_in_sending(
    message_id: str, ids: frozenset[str] | None, standing: Standing | None
) -> list[str]:
    is_done = standing is not None and standing.status in ("sent", "handled")
    if is_done and sends(message_id) and not ids:
        return ["lost: what its handler sends"]
    if ids and not (is_done and sends(message_id)):
        return ["sent, and its handler has not succeeded"]
    return [f"what it sends has {len(ids)} ids"] if ids and len(ids) > 1 else []


def _disorder(published: Sequence[str], order: Sequence[str]) -> list[str]:
    """Which messages took effect after one that comes behind them in their key."""
    places = {message_id: place for place, message_id in enumerate(published)}
    last: dict[str, str] = {}
    found = []
    for message_id in order:
        before = last.setdefault(key_of(message_id), message_id)
        if places.get(message_id, 0) < places.get(before, 0):
            found.append(f"{message_id}: out of order: it took effect after {before}")
        last[key_of(message_id)] = message_id
    return found


def left_of(mode: str, folder: Path, queue_url: str, ledger_url: str) -> Left:
    """Read the log in `folder`, the tables, and the queue."""
    rows = rows_of(ledger_url) if mode == TRANSACTIONAL else lines_of(mode, folder)
    effects = defaultdict(list)
    for message_id, fence in rows:
        effects[message_id].append(fence)
    with psycopg.connect(ledger_url) as connection:
        records = {
            message_id: Standing(status, fence)
            for message_id, status, fence in connection.execute(_RECORDS, (mode,))
        }
        retries, dead = (
            [bytes(body).decode() for [body] in connection.execute(_RETRIES, (queue, is_aside))]
            for queue, is_aside in ((f"retry/{mode}", False), (f"retry/{mode}", True))
        )
    waiting = len(retries) + len(_in_queue(queue_url, mode))
    sent = _sent_by(mode, _in_queue(queue_url, OUT))
    order = [message_id for message_id, _ in rows] if mode == ORDERED else []
    return Left(effects, records, frozenset(dead), waiting, sent, order)


def _sent_by(mode: str, messages: Iterable[tuple[str, str]]) -> Mapping[str, frozenset[str]]:
    sent: dict[str, frozenset[str]] = {}
    for own_id, body in messages:
        of, message_id = body.split()
        if of == mode:
            sent[message_id] = sent.get(message_id, frozenset()) | {own_id}
    return sent


def rows_of(ledger_url: str) -> list[tuple[str, int]]:
    """The effects that are rows: message and fence."""
    with psycopg.connect(ledger_url) as connection:
        return list(connection.execute("SELECT message_id, fence FROM effects"))


def lines_of(mode: str, folder: Path) -> list[tuple[str, int]]:
    """The effects that are lines: message and fence; in their order, where one process at a time
    has them.
    """
    effects = []
    for log in folder.glob(f"{mode}-*.log"):
        # What follows the last end of a line is being written.
        whole, _, _ = log.read_text().rpartition("\n")
        for message_id, fence, _ in map(str.split, whole.splitlines()):
            effects.append((message_id, int(fence)))
    return effects


def _in_queue(url: str, queue: str) -> list[tuple[str, str]]:
    """The ids and bodies of what waits in a queue."""
    return _in_file(url, _IN_QUEUE, queue) if _is_file(url) else _at_broker(url, queue)


def _is_file(url: str) -> bool:
    return url.startswith("sqlite:///")


def _in_file(url: str, statement: str, queue: str) -> list[tuple[str, str]]:
    file = url.removeprefix("sqlite:///").partition("?")[0]
    with closing(sqlite3.connect(file)) as connection:
        rows = connection.execute(statement, (queue,))
        return [(own_id, body.decode()) for own_id, body in rows]


def _at_broker(url: str, queue: str) -> list[tuple[str, str]]:
    """They come back to their queue as the connection is closed."""
    found: list[tuple[str, str]] = []
    with closing(pika.BlockingConnection(pika.URLParameters(url))) as connection:
        channel = connection.channel()
        try:
            while True:
                _, properties, body = channel.basic_get(queue)
                if properties is None or body is None:
                    break
                found.append((properties.message_id or "", body.decode()))
        except ChannelClosedByBroker as closed:
            if closed.reply_code != _NOT_FOUND:
                raise
    return found
