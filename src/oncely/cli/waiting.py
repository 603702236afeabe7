"""`oncely waiting`: the messages that wait for a retry, and when they are due."""

from typing import TYPE_CHECKING

from oncely.cli import lazy_ops as ops
from oncely.cli import options
from oncely.cli.tables import aligned, cut, folded, more_than, put_found, unbroken
from oncely.cli.terminal import put_json
from oncely.core.shown import span

if TYPE_CHECKING:
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
        return
    rows = []
    for each in found.messages:
        in_s = (each.due or now) - now
        due = f"in {span(in_s)}" if in_s > 0 else f"overdue for {span(-in_s)}"
        rows.append((*each.key, each.attempts, due, cut(each.error)))
    texts = (folded("consumer"), folded("message id"))
    put_found(
        (*texts, aligned("attempts"), unbroken("due"), "error"),
        rows,
        "no messages wait for a retry",
        more_than(limit, more=found.more),
    )
