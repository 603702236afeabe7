"""What a faulty run on Spark left, judged by the logs and the tables: nothing of oncely here.

The ids of what was published stand in a file, one a line, copies included. An effect is a line of
a log or a row of a table, one for each mode. Once all is over, everything is written to the sink
once more, and what that run counted stands in a file too: it has to know what became of every
message.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
from psycopg.sql import SQL, Identifier
from tests.chaos.check import Standing

HELD = "held"
"""Effects outside, never repeated: what is in doubt is held for people."""
REPEATED = "repeated"
"""Effects outside, never lost: what is in doubt runs again."""
TRANSACTIONAL = "transactional"
"""Effects are rows that the handler writes, committed with their claims."""
ROWS = "rows"
"""Effects are the rows of the DataFrame, committed with their records."""
BATCHES = "batches"
"""Effects are rows that a batch handler writes, with a probe that knows which batches it wrote."""
MODES = (HELD, REPEATED, TRANSACTIONAL, ROWS, BATCHES)
"""Each is the name of a consumer, and of its log or table."""

PUBLISHED = "published"
LOG = "effects-"
AUDIT = "audit-"
"""The name of the mode follows."""

_IN_DATABASE = (TRANSACTIONAL, ROWS, BATCHES)
_RECORDS = "SELECT message_id, status, fence FROM processed_messages WHERE provider = %s"
_ROWS = "SELECT message_id, fence FROM {}"
_COUNT = "SELECT count(*) FROM {}"


class Left(NamedTuple):
    """What is there of one run, once it is over."""

    effects: Mapping[str, Sequence[int]]
    """By message, the fences under which it took effect; in mode rows there are none, but zeros."""
    records: Mapping[str, Standing]
    audit: Mapping[str, Any]
    """What the last run counted."""


def faults(mode: str, published: Sequence[str], left: Left) -> list[str]:
    """What must not be, a sentence each."""
    strangers = {*left.effects, *left.records} - {*published}
    found = [f"{stranger} was never published" for stranger in sorted(strangers)]
    for message_id in sorted({*published}):
        fences = left.effects.get(message_id, [])
        standing = left.records.get(message_id)
        found += [
            f"{mode} {message_id}: {fault} (effects under the fences {fences}, {standing})"
            for fault in [*_losses(mode, fences, standing), *_repetitions(mode, fences, standing)]
        ]
    return found + _untold(published, left)


def _losses(mode: str, fences: Sequence[int], standing: Standing | None) -> list[str]:
    if standing is not None and standing.status == "sent":
        return [] if fences else ["lost: it is completed without an effect"]
    if mode == HELD and standing is not None and standing.status == "processing":
        return []
    return ["lost: it is not completed"]


def _repetitions(mode: str, fences: Sequence[int], standing: Standing | None) -> list[str]:
    if mode != REPEATED:
        return ["twice: it took effect more than once"] if len(fences) > 1 else []
    found = []
    if len(fences) != len({*fences}):
        found.append("twice: it took effect again under the same claim")
    if standing is not None and len(fences) > standing.fence:
        found.append("twice: it took effect again without having been in doubt")
    return found


def _untold(published: Sequence[str], left: Left) -> list[str]:
    """Every delivery of the last run is a duplicate, or of a message that is in doubt."""
    done = Counter(
        "duplicate" if left.records[each].status == "sent" else "in doubt"
        for each in published
        if each in left.records
    )
    expected = {
        "received": len(published),
        "handled": 0,
        "duplicates": done["duplicate"],
        "quarantined": 0,
        "failed": 0,
        "in_doubt": done["in doubt"],
    }
    told = {name: _sum(left.audit[name]) for name in expected}
    return [] if told == expected else [f"the last run counts {told}, and not {expected}"]


def _sum(count: int | Mapping[str, int]) -> int:
    return count if isinstance(count, int) else sum(count.values())


def left_of(mode: str, folder: Path, ledger_url: str) -> Left:
    """Read the log and the last counts in `folder`, and the tables."""
    effects = defaultdict(list)
    with psycopg.connect(ledger_url) as connection:
        pairs = _rows(connection, mode) if mode in _IN_DATABASE else _lines(mode, folder)
        records = {
            message_id: Standing(status, fence)
            for message_id, status, fence in connection.execute(_RECORDS, (mode,))
        }
    for message_id, fence in pairs:
        effects[message_id].append(fence)
    return Left(effects, records, json.loads((folder / f"{AUDIT}{mode}").read_text()))


def count_effects(mode: str, folder: Path, ledger_url: str) -> int:
    if mode not in _IN_DATABASE:
        return len(_lines(mode, folder))
    with psycopg.connect(ledger_url) as connection:
        [[count]] = connection.execute(SQL(_COUNT).format(Identifier(mode)))
    return int(count)


def _rows(connection: psycopg.Connection, mode: str) -> list[tuple[str, int]]:
    return list(connection.execute(SQL(_ROWS).format(Identifier(mode))))


def _lines(mode: str, folder: Path) -> list[tuple[str, int]]:
    log = folder / f"{LOG}{mode}"
    # What follows the last end of a line is being written.
    whole, _, _ = (log.read_text() if log.exists() else "").rpartition("\n")
    lines = [line.split() for line in whole.splitlines()]
    return [(message_id, int(fence)) for message_id, fence, _attempt, _pid in lines]
