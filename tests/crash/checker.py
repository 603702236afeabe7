"""What a crash left, read from the effects and the queue alone: nothing of oncely is imported."""

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

_SENT = "SELECT own_id, body FROM waiting_messages WHERE queue = 'queue/out' ORDER BY id"
_REJECTED = "SELECT own_id FROM waiting_messages WHERE queue = 'queue/in.dead'"
_WAITING = "SELECT count(*) FROM waiting_messages WHERE queue = 'queue/in'"

_POSITIONS = [0, 1]
"""Of what each handler sends."""


class Left(NamedTuple):
    """What is there of one round, once its queue is drained."""

    effects: Sequence[Mapping[str, Any]]
    """In their order."""
    sent: Sequence[Mapping[str, Any]]
    """The deferred messages that were sent, copies too, in their order: their bodies, and `id`."""
    dead: Mapping[str, str]
    """Why which messages were set aside."""
    waiting: int
    """What is in the queue still."""


def left_in(queue: Path, effects: Iterable[str], letters: Iterable[tuple[str, str]]) -> Left:
    """Read the queue's file; the effects are the lines that they wrote, the letters the ledger's
    dead ones, with their reasons.
    """
    with closing(sqlite3.connect(queue)) as connection:
        sent = [{**json.loads(body), "id": own_id} for own_id, body in connection.execute(_SENT)]
        # Of what is rejected the broker is not told why; nothing is but what is in doubt.
        dead = {own_id: "in doubt" for [own_id] in connection.execute(_REJECTED)}
        [waiting] = connection.execute(_WAITING).fetchone()
    dead |= dict(letters)
    return Left([json.loads(line) for line in effects], sent, dead, waiting)


def faults(mode: str, published: Sequence[str], left: Left) -> list[str]:
    """What must not be, a sentence each."""
    found = [f"{left.waiting} messages were never acknowledged"] if left.waiting else []
    strangers = {effect["id"] for effect in left.effects} - set(published)
    found += [f"{message_id} took effect and was never published" for message_id in strangers]
    for message_id in published:
        effects = [effect for effect in left.effects if effect["id"] == message_id]
        sent = [one for one in left.sent if one["of"] == message_id]
        reason = left.dead.get(message_id)
        wrong = _faults_in_outcome(mode, len(effects), sent, reason) + _faults_in_runs(
            effects, sent
        )
        found += [f"{message_id}: {fault}" for fault in wrong]
    return found


_Lines = Sequence[Mapping[str, Any]]


def _faults_in_outcome(mode: str, effects: int, sent: _Lines, reason: str | None) -> list[str]:
    """What the mode promises of one message."""
    positions = sorted({one["position"] for one in sent})
    is_done = effects > 0 and positions == _POSITIONS and reason is None
    is_told = mode == "at_most_once" and not sent and "in doubt" in (reason or "")
    found = []
    if not is_done and not is_told:
        found.append(f"{effects} effects, sent {positions}, set aside: {reason}")
    if effects > 1 and mode != "at_least_once":
        found.append(f"{effects} effects")
    return found


def _faults_in_runs(effects: _Lines, sent: _Lines) -> list[str]:
    """What holds in every mode for the runs of one message's handler, and for what they sent."""
    found = []
    if not {one["run"] for one in sent} <= {effect["run"] for effect in effects}:
        found.append("sent for a run that took no effect")
    order = list(dict.fromkeys(one["position"] for one in sent))
    if order != sorted(order):
        found.append(f"sent in the order {order}")
    for position in _POSITIONS:
        ids = {effect["deferred"][position] for effect in effects}
        ids |= {one["id"] for one in sent if one["position"] == position}
        if len(ids) > 1:
            found.append(f"what is sent at {position} has {len(ids)} ids")
    fences, attempts = ([effect[name] for effect in effects] for name in ("fence", "attempt"))
    if fences != sorted(set(fences)):
        found.append(f"the fence of its runs does not grow: {fences}")
    # A death in company costs no attempt.
    if attempts != sorted(attempts):
        found.append(f"the attempt of its runs shrinks: {attempts}")
    return found
