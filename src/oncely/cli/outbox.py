"""`oncely outbox` and `oncely queue`: messages to be sent, and those that wait in a queue."""

from typing import TYPE_CHECKING

import click

from oncely.cli import lazy_ops as ops
from oncely.cli import options, values
from oncely.cli.opening import opened
from oncely.cli.options import LedgerName, Note
from oncely.cli.tables import aligned, cell, cut, folded, new_table, put_found, unbroken
from oncely.cli.terminal import put_json, tell_changed
from oncely.core.errors import mask_passwords
from oncely.core.shown import span

if TYPE_CHECKING:
    from rich.table import Table


@click.group("outbox", cls=options.Commands, no_args_is_help=False)
def outbox() -> None:
    """Look at messages to be sent, and say what becomes of those that were refused."""


def _change_options(command: options.Command) -> options.Command:
    numbers = click.argument(
        "numbers",
        metavar="ID...",
        nargs=-1,
        required=True,
        type=values.LETTER,
        help="the numbers of messages, as list --refused shows them",
    )
    return numbers(options.note(options.ledger(command)))


@outbox.command("status", epilog=options.example("oncely outbox status"))
@options.ledger
def status(at: LedgerName, as_json: bool) -> None:
    """Count messages to be sent by destination, and those that were refused."""
    with opened(at) as ledger:
        found, now = ops.unsent(ledger), ledger.now()
    if as_json:
        destinations = [each.as_dict() for each in found.destinations]
        put_json({"destinations": destinations, "more": found.more})
    else:
        more = f"of the first {ops.MOST_UNSENT:,}; there are more" if found.more else None
        put_found(_destinations_table(found, now), "nothing is to be sent", more)


@outbox.command("list", epilog=options.example("oncely outbox list --refused --destination mails"))
@click.option("--destination", metavar="NAME", help="to this destination only")
@click.option("--refused", is_flag=True, help="those that were refused, instead")
@options.limit()
@options.ledger
def list_messages(
    at: LedgerName, destination: str | None, refused: bool, limit: int, as_json: bool
) -> None:
    """List messages to be sent, in the order in which they came."""
    with opened(at) as ledger:
        found = ops.unsent_messages(
            ledger, destination, limit, is_refused=refused, with_bodies=False
        )
        now = ledger.now()
    _put_messages(found, now, limit, "nothing is to be sent", as_json=as_json)


@outbox.command(
    "send-again",
    epilog=options.example("oncely outbox send-again 7 9 --why 'the queue is there now'"),
)
@_change_options
def send_again(at: LedgerName, numbers: tuple[int, ...], note: Note, as_json: bool) -> None:
    """Let messages that were refused be sent after all."""
    with opened(at) as ledger:
        changed = ops.send_again(ledger, numbers, **note)
    tell_changed(changed, "sent again", "refused message", as_json=as_json)


@outbox.command("discard", epilog=options.example("oncely outbox discard 7 --why 'sent by hand'"))
@_change_options
def discard(at: LedgerName, numbers: tuple[int, ...], note: Note, as_json: bool) -> None:
    """Remove messages that were refused, which are never sent then."""
    with opened(at) as ledger:
        changed = ops.discard_unsent(ledger, numbers, **note)
    tell_changed(changed, "discarded", "refused message", as_json=as_json)


@click.command("queue", epilog=options.example("oncely queue webhooks --limit 10"))
@click.argument("name", metavar="NAME", help="of the queue, as status shows it")
@options.limit()
@options.ledger
def queue(at: LedgerName, name: str, limit: int, as_json: bool) -> None:
    """List the messages that wait in a queue of the ledger."""
    with opened(at) as ledger:
        found, now = ops.queued(ledger, name, limit), ledger.now()
    _put_messages(found, now, limit, f"nothing waits in queue {name!r}", as_json=as_json)


def _put_messages(
    found: "ops.FoundMessages", now: float, limit: int, none: str, *, as_json: bool
) -> None:
    if as_json:
        messages = [ops.unsent_as_dict(message) for message in found.messages]
        put_json({"messages": messages, "more": found.more})
    else:
        more = f"the first {limit:,}; there are more, see --limit" if found.more else None
        put_found(_table(found, now), none, more)


def _destinations_table(found: "ops.FoundUnsent", now: float) -> "Table":
    counts = (aligned("waiting"), aligned("refused"), aligned("oldest"))
    table = new_table(folded("destination"), *counts, "reason")
    for each in found.destinations:
        table.add_row(
            cell(each.destination),
            f"{each.waiting:,}",
            f"{each.refused:,}",
            "-" if each.oldest is None else f"{span(now - each.oldest)} ago",
            cut(each.reason or "-"),
        )
    return table


def _table(found: "ops.FoundMessages", now: float) -> "Table":
    texts = (folded("message id"), folded("destination"), folded("type"))
    table = new_table(aligned("id"), *texts, aligned("attempts"), unbroken("since"), "reason")
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
