"""`oncely waiting`: the messages that wait for a retry, and when they are due."""

from typing import TYPE_CHECKING

import click

from oncely.cli.opening import opened
from oncely.cli.options import LedgerName, consumer_option, example, ledger_options, limit_option
from oncely.cli.tables import aligned, cell, cut, folded, new_table, put_found, unbroken
from oncely.cli.terminal import put_json
from oncely.core.shown import span

if TYPE_CHECKING:
    from rich.table import Table

    from oncely import ops


@click.command("waiting", epilog=example("oncely waiting --consumer billing --json"))
@consumer_option()
@limit_option()
@ledger_options
def waiting(at: LedgerName, consumer: str | None, limit: int, as_json: bool) -> None:
    """List failed messages that wait in the ledger for a retry, and when they are due."""
    from oncely import ops

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
