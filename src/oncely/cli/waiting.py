"""`oncely waiting`: the messages that wait for a retry, and when they are due."""

import argparse
import json
import sys

from rich.table import Column, Table

from oncely import ops
from oncely.cli.ledger_arguments import opened
from oncely.cli.tables import aligned, cell, cut, folded, new_table, put
from oncely.core.shown import span


def waiting(parsed: argparse.Namespace) -> int:
    """Print the messages that wait for a retry."""
    with opened(parsed) as ledger:
        found = ops.waiting(ledger, parsed.consumer, parsed.limit, with_bodies=False)
        now = ledger.now()
    if parsed.json:
        messages = [ops.waiting_as_dict(message, now) for message in found.messages]
        print(json.dumps({"waiting": messages, "more": found.more}))
        return 0
    if not found.messages:
        print("no messages wait for a retry", file=sys.stderr)
        return 0
    put(_table(found, now), last_gives_way=True)
    if found.more:
        print(f"the first {parsed.limit:,}; there are more, see --limit", file=sys.stderr)
    return 0


def _table(found: ops.FoundWaiting, now: float) -> Table:
    texts = (folded("consumer"), folded("message id"))
    table = new_table(*texts, aligned("attempts"), Column("due", no_wrap=True), "error")
    for message in found.messages:
        table.add_row(
            cell(message.key.consumer),
            cell(message.key.message_id),
            f"{message.attempts:,}",
            _due((message.due or now) - now),
            cut(message.error or "-"),
        )
    return table


def _due(in_s: float) -> str:
    return f"in {span(in_s)}" if in_s > 0 else f"overdue for {span(-in_s)}"
