"""`oncely waiting`: the messages that wait for a retry, and when they are due."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from oncely.cli import lazy_ops as ops
from oncely.cli import options
from oncely.cli.tables import aligned, cut, folded, more_than, put_found, table_of, unbroken
from oncely.cli.terminal import put_json
from oncely.core.shown import span

if TYPE_CHECKING:
    from rich.table import Table

    from oncely.core.waiting import WaitingMessage
    from oncely.ledger import Ledger


@options.command("waiting", "oncely waiting --consumer billing --json")
@options.consumer()
@options.limit()
@options.open_ledger
def waiting(ledger: "Ledger", consumer: str | None, limit: int, as_json: bool) -> None:
    """List failed messages that wait in the ledger for a retry, and when they are due."""
    found = ops.waiting(ledger, consumer, limit, with_bodies=False)
    now = ledger.now()
    if as_json:
        messages = [ops.waiting_as_dict(each, now) for each in found.messages]
        put_json({"waiting": messages, "more": found.more})
    else:
        more = more_than(limit, more=found.more)
        put_found(_table(found.messages, now), "no messages wait for a retry", more)


def _table(found: "Sequence[WaitingMessage]", now: float) -> "Table":
    texts = (folded("consumer"), folded("message id"))
    return table_of(
        (*texts, aligned("attempts"), unbroken("due"), "error"),
        (
            (*each.key, each.attempts, _due((each.due or now) - now), cut(each.error))
            for each in found
        ),
    )


def _due(in_s: float) -> str:
    return f"in {span(in_s)}" if in_s > 0 else f"overdue for {span(-in_s)}"
