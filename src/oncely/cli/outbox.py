"""`oncely outbox` and `oncely queue`: messages to be sent, and those that wait in a queue."""

import argparse
import json
import sys
from collections.abc import Callable

from rich.table import Column, Table

from oncely import ops
from oncely.cli.changes import login_name, tell_audit
from oncely.cli.ledger_arguments import opened
from oncely.cli.tables import aligned, cell, cut, folded, new_table, put
from oncely.core.errors import RefusedError, mask_passwords
from oncely.core.shown import span


def status(parsed: argparse.Namespace) -> int:
    """Print how many messages are to be sent to each destination."""
    with opened(parsed) as ledger:
        found, now = ops.unsent(ledger), ledger.now()
    if parsed.json:
        destinations = [each.as_dict() for each in found.destinations]
        print(json.dumps({"destinations": destinations, "more": found.more}))
        return 0
    if not found.destinations:
        print("nothing is to be sent", file=sys.stderr)
        return 0
    counts = (aligned("waiting"), aligned("refused"), aligned("oldest"))
    table = new_table(folded("destination"), *counts, "reason")
    for each in found.destinations:
        oldest = "-" if each.oldest is None else f"{span(now - each.oldest)} ago"
        table.add_row(
            cell(each.destination),
            f"{each.waiting:,}",
            f"{each.refused:,}",
            oldest,
            cut(each.reason or "-"),
        )
    put(table, last_gives_way=True)
    if found.more:
        print(f"of the first {ops.MOST_UNSENT:,}; there are more", file=sys.stderr)
    return 0


def list_messages(parsed: argparse.Namespace) -> int:
    """Print messages to be sent, or those that were refused."""
    with opened(parsed) as ledger:
        found = ops.unsent_messages(
            ledger,
            parsed.destination,
            parsed.limit,
            is_refused=parsed.refused,
            with_bodies=False,
        )
        now = ledger.now()
    return _print(parsed, found, now, "nothing is to be sent")


def queue(parsed: argparse.Namespace) -> int:
    """Print what waits in a queue of the ledger."""
    with opened(parsed) as ledger:
        found, now = ops.queued(ledger, parsed.name, parsed.limit), ledger.now()
    return _print(parsed, found, now, f"nothing waits in queue {parsed.name!r}")


def send_again(parsed: argparse.Namespace) -> int:
    """Let those that were refused be sent; return 1 where one is not there."""
    return _change(parsed, ops.send_again, "sent again")


def discard(parsed: argparse.Namespace) -> int:
    """Remove those that were refused; return 1 where one is not there."""
    return _change(parsed, ops.discard_unsent, "discarded")


def _change(
    parsed: argparse.Namespace, change: Callable[..., ops.LettersChanged], done: str
) -> int:
    ids = [int(id_) for id_ in parsed.ids]
    with opened(parsed) as ledger:
        changed = change(ledger, ids, by=parsed.by or login_name(), why=parsed.why)
    if parsed.json:
        note = {"by": changed.by, "why": changed.why, "audit_error": changed.audit_error}
        told = {done.replace(" ", "_"): changed.done, "missing": changed.missing}
        print(json.dumps({**told, **note}))
    else:
        print(f"{done}: {len(changed.done):,}")
    tell_audit(changed.audit_error)
    if changed.missing:
        numbers = ", ".join(map(str, changed.missing))
        raise RefusedError(f"there is no refused message {numbers}")
    return 0


def _print(parsed: argparse.Namespace, found: ops.FoundMessages, now: float, none: str) -> int:
    if parsed.json:
        messages = [ops.unsent_as_dict(message) for message in found.messages]
        print(json.dumps({"messages": messages, "more": found.more}))
        return 0
    if not found.messages:
        print(none, file=sys.stderr)
        return 0
    put(_table(found, now), last_gives_way=True)
    if found.more:
        print(f"the first {parsed.limit:,}; there are more, see --limit", file=sys.stderr)
    return 0


def _table(found: ops.FoundMessages, now: float) -> Table:
    texts = (folded("message id"), folded("destination"), folded("type"))
    table = new_table(
        aligned("id"), *texts, aligned("attempts"), Column("since", no_wrap=True), "reason"
    )
    for message in found.messages:
        table.add_row(
            str(message.number),
            cell(message.id),
            cell(message.destination or "-"),
            cell(message.message.type or "-"),
            f"{message.attempts:,}",
            f"{span(now - (message.since or now))} ago",
            cut(mask_passwords(message.reason or message.error or "-")),
        )
    return table
