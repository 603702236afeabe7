"""What a campaign left, judged by what lies in the servers and the log: nothing of oncely here.

The ids of published messages stand in a file, one a line; the body of each message is its id.
Who takes effect leaves a line or a row: the id, the fence under which its handler ran, and its
process. The effects of one mode are rows, of the others lines; in that mode each handler also
sends a message, whose body is the id again.
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
MODES = (TRANSACTIONAL, HELD, REPEATED)
"""Each is the name of a consumer, and of its queue."""
OUT = "out"
"""The queue of what handlers send."""

_RECORDS = "SELECT message_id, status, attempts FROM processed_messages WHERE provider = %s"
_UNSENT = "SELECT body FROM deferred_messages WHERE provider = %s"
_IN_QUEUE = "SELECT body FROM queue_messages WHERE queue = ?"
_DEAD = "SELECT body FROM queue_dead_letters WHERE queue = ?"

_DELAYS = ("", ".delay.10", ".delay.1000", ".delay.longer")
"""How the names of queues end where a message may be that is to be handled."""

_NOT_FOUND = 404
"""The reply code for a queue that was never made."""


class Standing(NamedTuple):
    """What the ledger knows of a message."""

    status: str
    attempts: int


class Left(NamedTuple):
    """What is there of one mode, once its queue is drained."""

    effects: Mapping[str, Sequence[int]]
    """By message, the fences under which it took effect."""
    records: Mapping[str, Standing]
    dead: frozenset[str]
    """Which messages were set aside."""
    waiting: int
    """How many are in the queue still."""
    sent: frozenset[str]
    """The messages whose handlers have sent theirs; or a relay is to, since it is stored."""


def faults(mode: str, published: Iterable[str], left: Left) -> list[str]:
    """What must not be, a sentence each."""
    ids = set(published)
    found = [f"{left.waiting} messages are waiting still"] if left.waiting else []
    found += [
        f"{stranger} was never published"
        for stranger in {*left.effects, *left.records, *left.dead, *left.sent} - ids
    ]
    for message_id in sorted(ids):
        fences = left.effects.get(message_id, [])
        standing = left.records.get(message_id)
        is_dead = message_id in left.dead
        wrong = [
            *_losses(mode, len(fences), standing, is_dead=is_dead),
            *_repetitions(mode, fences, standing),
        ]
        if mode == TRANSACTIONAL and message_id not in left.sent:
            wrong.append("lost: what its handler sends")
        if mode != HELD and is_dead:
            wrong.append("given up: no handler has failed")
        about = f"(effects under the fences {fences}, {standing}, set aside: {is_dead})"
        found += [f"{mode} {message_id}: {fault} {about}" for fault in wrong]
    return found


def _losses(mode: str, effects: int, standing: Standing | None, *, is_dead: bool) -> list[str]:
    if standing is not None and standing.status in ("sent", "handled"):
        return [] if effects else ["lost: it is completed without an effect"]
    if mode != HELD:
        return ["lost: it is not completed"]
    if not is_dead:
        return ["lost: in doubt, and not told"]
    # Whose claim ran out before the handler began gives it back, and that may come after people
    # were told: the ledger knows nothing of it then, as of a message that never came.
    is_right = standing.status == "processing" if standing else not effects
    return [] if is_right else ["lost: the ledger does not know of its effect"]


def _repetitions(mode: str, fences: Sequence[int], standing: Standing | None) -> list[str]:
    found = []
    if len(fences) > 1 and mode != REPEATED:
        found.append("twice: it took effect more than once")
    if len(fences) != len(set(fences)):
        found.append("twice: it took effect again under the same claim")
    if standing is not None and len(fences) > standing.attempts:
        found.append("twice: it took effect again without having been in doubt")
    return found


def left_of(mode: str, folder: Path, queue_url: str, ledger_url: str) -> Left:
    """Read the log in `folder`, the tables, and the queue."""
    rows = rows_of(ledger_url) if mode == TRANSACTIONAL else lines_of(mode, folder)
    effects = defaultdict(list)
    for message_id, fence in rows:
        effects[message_id].append(fence)
    with psycopg.connect(ledger_url) as connection:
        records = {
            message_id: Standing(status, attempts)
            for message_id, status, attempts in connection.execute(_RECORDS, (mode,))
        }
        unsent = [bytes(body).decode() for [body] in connection.execute(_UNSENT, (mode,))]
    waiting = sum(len(_in_queue(queue_url, f"{mode}{suffix}")) for suffix in _DELAYS)
    dead = _set_aside(queue_url, mode)
    sent = [*_in_queue(queue_url, OUT), *unsent] if mode == TRANSACTIONAL else []
    return Left(effects, records, frozenset(dead), waiting, frozenset(sent))


def rows_of(ledger_url: str) -> list[tuple[str, int]]:
    """The effects that are rows: message and fence."""
    with psycopg.connect(ledger_url) as connection:
        return list(connection.execute("SELECT message_id, fence FROM effects"))


def lines_of(mode: str, folder: Path) -> list[tuple[str, int]]:
    """The effects that are lines: message and fence."""
    effects = []
    for log in folder.glob(f"{mode}-*.log"):
        # What follows the last end of a line is being written.
        whole, _, _ = log.read_text().rpartition("\n")
        for message_id, fence, _ in map(str.split, whole.splitlines()):
            effects.append((message_id, int(fence)))
    return effects


def _in_queue(url: str, queue: str) -> list[str]:
    """The bodies of what waits in a queue."""
    return _in_file(url, _IN_QUEUE, queue) if _is_file(url) else _at_broker(url, queue)


def _set_aside(url: str, queue: str) -> list[str]:
    """The bodies of a queue's dead letters."""
    return _in_file(url, _DEAD, queue) if _is_file(url) else _at_broker(url, f"{queue}.dead")


def _is_file(url: str) -> bool:
    return url.startswith("sqlite:///")


def _in_file(url: str, statement: str, queue: str) -> list[str]:
    file = url.removeprefix("sqlite:///").partition("?")[0]
    with closing(sqlite3.connect(file)) as connection:
        return [body.decode() for [body] in connection.execute(statement, (queue,))]


def _at_broker(url: str, queue: str) -> list[str]:
    """They come back to their queue as the connection is closed."""
    bodies: list[str] = []
    with closing(pika.BlockingConnection(pika.URLParameters(url))) as connection:
        channel = connection.channel()
        try:
            while (body := channel.basic_get(queue)[2]) is not None:
                bodies.append(body.decode())
        except ChannelClosedByBroker as closed:
            if closed.reply_code != _NOT_FOUND:
                raise
    return bodies
