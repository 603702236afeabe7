"""What each page shows, as its template takes it: the dashboard and the report show the same."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from heapq import nlargest
from itertools import groupby
from typing import Any, TypeVar

from oncely import ops
from oncely.core.durations import seconds
from oncely.core.errors import ConfigError
from oncely.core.record import Key
from oncely.core.shown import span
from oncely.ledger.ledger import Ledger
from oncely.ops import Snag

LIMIT = 100
"""Rows of a list, where nobody asks for more."""
WHERE: Mapping[Snag, str] = {
    Snag.IN_DOUBT: "/in-doubt",
    Snag.FOR_SENDER: "/in-doubt",
    Snag.DEAD_LETTERS: "/failed",
    Snag.RETRIES: "/waiting",
    Snag.OUTBOX: "/outbox",
    Snag.SET_ASIDE: "/outbox",
    Snag.QUEUE: "/queues",
}
"""The page of each thing that can be stuck."""
CONSUMERS = 1_000
"""Rows of a table of consumers, at most: some ledgers have a consumer for each customer."""
WORKERS = 1_000
"""Processes that are shown, at most: one may be killed and started again all day."""
_HOUR_S = 3_600
_GROUPED = 2_000
"""Messages that are grouped: a page shows no more of them in time."""

_UNUSABLE = (ValueError, TypeError, OverflowError, RecursionError)
"""What JSON raises of others, and what it gives where we expect names and a number."""

Row = TypeVar("Row")
Contents = dict[str, Any]
"""The values of a template in `templates/parts`."""


# ---- The whole ---------------------------------------------------------------------------------


def overview(found: ops.LedgerOverview) -> Contents:
    """Where the ledger stands; as `oncely status --json` has it."""
    return {
        "tab_counts": tab_counts(found.status),
        "found": found.as_dict(),
        "stuck": [(each, WHERE[each.what]) for each in found.stuck],
        "by_consumer": _by_consumer(found.status),
    }


def tab_counts(found: ops.Status) -> Mapping[str, int]:
    """How many messages stand on a page, of those that people look at."""
    return {
        "/in-doubt": found.total.in_doubt,
        "/failed": found.total.dead_letters,
        "/waiting": found.total.waiting,
        "/outbox": found.backlog.waiting + found.backlog.set_aside,
        "/queues": sum(each.waiting for each in found.queues.values()),
    }


def _worst(rows: Mapping[str, Row], badness: Callable[[Row], int]) -> Mapping[str, Row]:
    """All, in their order; of too many, those that are worst off, the worst first."""
    if len(rows) <= CONSUMERS:
        return rows
    return dict(nlargest(CONSUMERS, rows.items(), key=lambda row: badness(row[1])))


def _by_consumer(found: ops.Status) -> Contents:
    shown = _worst(found.consumers, lambda each: each.in_doubt + each.dead_letters)
    return {name: summary.as_dict() for name, summary in shown.items()}


def last_day(ledger: Ledger, went_on: ops.FoundActivity, now: float) -> Contents:
    """What was handled and what went wrong, hour by hour and by consumer; as `oncely activity
    --json` has it.
    """
    hours = []
    for number, group in groupby(went_on.points, key=lambda point: point.began // _HOUR_S):
        _, *counts = zip(*group, strict=True)
        hours.append(ops.Point(number * _HOUR_S, *map(sum, counts)))
    return _kept(
        ledger,
        now,
        hours=hours,
        top=_round_up(max((sum(each[1:]) for each in hours), default=0)),
        hour=went_on.hour,
        day=_worst(went_on.day, lambda each: each.in_doubt + each.failed_attempts + each.failed),
        day_count=len(went_on.day),
    )


def _round_up(tallest: int) -> int:
    """The end of an axis whose half is a whole number, too."""
    step: int = max(2, 10 ** (len(str(tallest)) - 1) // 5)
    return max(step, -(-tallest // step) * step)


def _kept(ledger: Ledger, now: float, **shown: Any) -> Contents:
    """What a store keeps for operators, and whether it keeps anything."""
    return {**shown, "is_kept": ledger.operations.keeps_operations, "now": now}


def consumers(ledger: Ledger, found: ops.Status) -> Contents:
    """Every consumer that the ledger knows, and how long its records are kept."""
    shown = _by_consumer(found)
    kept = ops.policy_retentions(ledger, shown)
    return {
        "tab_counts": tab_counts(found),
        "found": found.as_dict(),
        "by_consumer": shown,
        "retentions": {name: span(seconds(each, "retention")) for name, each in kept.items()},
    }


# ---- Lists of messages -------------------------------------------------------------------------


def in_doubt(ledger: Ledger, consumer: str | None, limit: int, now: float) -> Contents:
    """Those in doubt of a consumer, or of all, and those that may run again, and wait for their
    sender; as `oncely list --state in-doubt --json` has them. Raises ConfigError for a consumer
    that the ledger does not know.
    """
    selection = ops.Selection(consumer=consumer, states=[ops.IN_DOUBT])
    found = ops.select(ledger, selection, limit)
    allowed = ops.select(ledger, replace(selection, states=[ops.FOR_SENDER]), limit)
    return {
        "records": [
            (mark(each.record.key, each.record.version), each.as_dict(now))
            for each in ops.doubts(ledger, found.records)
        ],
        "for_sender": allowed.records,
        "more_for_sender": allowed.more,
        "more": found.more,
        "now": now,
    }


def failed(ledger: Ledger, consumer: str | None, limit: int, now: float) -> Contents:
    """The dead letters of a consumer, or of all; as `oncely dead groups --json` and `oncely dead
    list --json` have them. Raises ConfigError as `in_doubt` does, and where the ledger keeps none.
    """
    found = ops.dead_letters(ledger, consumer, limit, with_bodies=False)
    return {
        "letters": [ops.letter_as_dict(letter) for letter in found.letters],
        "grouped": ops.letter_groups(ledger, consumer, _GROUPED),
        "more": found.more,
        "now": now,
    }


def samples(ledger: Ledger, numbers: Sequence[int], now: float) -> Contents:
    """These dead letters without their headers, which may be personal; as `oncely dead show --json`
    has them. One that was retried meanwhile is left out.
    """
    found = ops.letters_numbered(ledger, numbers)
    shown = [ops.letter_as_dict(letter, is_whole=True) | {"headers": {}} for letter in found]
    return {"samples": shown, "now": now}


def waiting(ledger: Ledger, consumer: str | None, limit: int, now: float) -> Contents:
    """The messages of a consumer, or of all, that wait for a retry; as `oncely waiting --json` has
    them. Raises ConfigError as `failed` does.
    """
    found = ops.waiting(ledger, consumer, limit, with_bodies=False)
    return {
        "messages": [(mark(each.key), ops.waiting_as_dict(each, now)) for each in found.messages],
        "grouped": ops.waiting_groups(ledger, consumer, _GROUPED),
        "more": found.more,
        "now": now,
    }


def outbox(ledger: Ledger, waiting: ops.Backlogs, now: float) -> Contents:
    """What waits to be sent and what was refused; as `oncely outbox status --json` and `oncely
    outbox list --refused --json` have it.
    """
    keeps = ledger.can_defer
    unsent = ops.unsent(ledger) if keeps else ops.FoundUnsent([], more=False)
    refused = (
        ops.unsent_messages(ledger, None, LIMIT, is_refused=True, with_bodies=False)
        if keeps
        else ops.FoundMessages([], more=False)
    )
    return {
        "backlog": asdict(waiting.outbox),
        "keeps": keeps,
        "destinations": [asdict(each) for each in unsent.destinations],
        "more": unsent.more,
        "refused": [ops.unsent_as_dict(each) for each in refused.messages],
        "more_refused": refused.more,
        "late_s": ops.LATE_S,
        "now": now,
    }


def queues(waiting: ops.Backlogs) -> Contents:
    """The queues of the ledger, and how much waits in each."""
    return {"queues": {name: asdict(backlog) for name, backlog in waiting.queues.items()}}


# ---- Operations --------------------------------------------------------------------------------


def workers(ledger: Ledger, now: float) -> Contents:
    """The processes that work with the ledger; as `oncely workers --json` has them."""
    found = ops.workers(ledger)
    shown = [each.as_dict() for each in found[:WORKERS]]
    return _kept(ledger, now, workers=shown, count=len(found))


def runs(ledger: Ledger, limit: int, now: float) -> Contents:
    """The runs on Spark that began last; as `oncely runs --json` has them."""
    found, more = ops.first(ops.runs(ledger, limit + 1), limit)
    return _kept(ledger, now, runs=found, more=more)


def audit(ledger: Ledger, before: int | None, now: float) -> Contents:
    """What people changed last, or before an entry; as `oncely audit --json` has it."""
    found, more = ops.first(ledger.operations.audit(LIMIT + 1, before), LIMIT)
    return _kept(ledger, now, entries=found, more=more)


# ---- Marks: how a form names records and waiting messages ----------------------------------------


def mark(key: Key, version: int = 0) -> str:
    """A record as it was when it was shown, which its version says; or a waiting message."""
    return json.dumps([*key, version])


def read_mark(text: str) -> tuple[Key, int]:
    """The key and the version. Raises ConfigError for what is not such a mark."""
    try:
        consumer, message_id, version = json.loads(text)
        return Key(str(consumer), str(message_id)), int(version)
    except _UNUSABLE:
        raise ConfigError("record: what the form names is not a record") from None
