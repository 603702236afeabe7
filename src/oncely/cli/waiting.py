"""`oncely waiting`: the messages that wait for a retry, and when they are due."""

from typing import TYPE_CHECKING

import click

from oncely.cli import lazy_ops as ops
from oncely.cli import options
from oncely.cli.opening import opened
from oncely.cli.options import LedgerName
from oncely.cli.tables import aligned, cell, cut, folded, new_table, put_found, unbroken
from oncely.cli.terminal import put_json
from oncely.core.shown import span

if TYPE_CHECKING:
    from rich.table import Table


@click.command("waiting", epilog=options.example("oncely waiting --consumer billing --json"))
@options.consumer()
@options.limit()
@options.ledger
def waiting(at: LedgerName, consumer: str | None, limit: int, as_json: bool) -> None:
    """List failed messages that wait in the ledger for a retry, and when they are due."""
    with opened(at) as ledger:
        found = ops.waiting(ledger, consumer, limit, with_bodies=False)
        now = ledger.now()
    if as_json:
        messages = [ops.waiting_as_dict(message, now) for message in found.messages]
        put_json({"waiting": messages, "more": found.more})
    else:
        more = f"the first {limit:,}; there are more, see --limit" if found.more else None
        put_found(_table(found, now), "no messages wait for a retry", more)


def _table(found: "ops.FoundWaiting", now: float) -> "Table":
    texts = (folded("consumer"), folded("message id"))
    table = new_table(*texts, aligned("attempts"), unbroken("due"), "error")
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
