"""`oncely waiting`, `outbox` and `queue`: what waits for a retry, to be sent, or in a queue."""

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from oncely import ops
from oncely.cli import options, values
from oncely.cli.options import Note
from oncely.cli.terminal import (
    ago,
    aligned,
    cut_error,
    more_than,
    put_found,
    put_json,
    say,
    tell_changed,
    unbroken,
)
from oncely.core.shown import span
from oncely.core.waiting import queue_named

if TYPE_CHECKING:
    from oncely.ledger.ledger import Ledger


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
    return numbers(options.note(options.open_ledger(command)))


@options.command("status", "oncely outbox status", outbox)
@options.open_ledger
def status(ledger: "Ledger", as_json: bool) -> None:
    """Count messages to be sent by destination, and those that were refused."""
    found = ops.unsent(ledger)
    if as_json:
        destinations = [asdict(each) for each in found.destinations]
        put_json({"destinations": destinations, "more": found.more})
        return
    now = ledger.now()
    put_found(
        ("destination", *map(aligned, ("waiting", "refused", "oldest")), "reason"),
        (
            (
                *(each.destination, each.waiting, each.refused),
                None if each.oldest is None else ago(each.oldest, now),
                cut_error(each.reason),
            )
            for each in found.destinations
        ),
        "nothing is to be sent",
        f"of the first {ops.MOST_UNSENT:,}; there are more" if found.more else None,
    )


@options.command("list", "oncely outbox list --refused --destination mails", outbox)
@options.option("--destination", "NAME", "to this destination only")
@options.flag("--refused", "those that were refused, instead")
@options.limit()
@options.open_ledger
def list_messages(
    ledger: "Ledger", destination: str | None, refused: bool, limit: int, as_json: bool
) -> None:
    """List messages to be sent, in the order in which they came."""
    found = ops.unsent_messages(ledger, destination, limit, is_refused=refused, with_bodies=False)
    none = "nothing was refused" if refused else "nothing waits to be sent; refused ones: --refused"
    _put_messages(found, ledger.now(), limit, none, as_json=as_json)


@options.command("retry", "oncely outbox retry 7 9 --why 'the queue is there now'", outbox)
@_change_options
def retry(ledger: "Ledger", numbers: tuple[int, ...], note: Note, as_json: bool) -> None:
    """Let messages that were refused be sent after all."""
    changed = ops.retry_unsent(ledger, numbers, **note)
    tell_changed(changed, "retried", "refused message", as_json=as_json)


@options.command("discard", "oncely outbox discard 7 --why 'sent by hand'", outbox)
@_change_options
def discard(ledger: "Ledger", numbers: tuple[int, ...], note: Note, as_json: bool) -> None:
    """Remove messages that were refused, which are never sent then."""
    changed = ops.discard_unsent(ledger, numbers, **note)
    tell_changed(changed, "discarded", "refused message", as_json=as_json)


@options.command("queue", "oncely queue webhooks --limit 10")
@click.argument("name", metavar="NAME", help="of the queue, as status shows it")
@options.limit()
@options.open_ledger
def queue(ledger: "Ledger", name: str, limit: int, as_json: bool) -> None:
    """List the messages that wait in a queue of the ledger."""
    found = ops.queued(ledger, name, limit)
    none = f"nothing waits in queue {name!r}; the queues with messages: oncely status"
    _put_messages(found, ledger.now(), limit, none, as_json=as_json)
    free_in_s = ledger.mailbox.free_in_s(queue_named(name))
    if free_in_s and not as_json:
        told = "all are held by workers, or delayed; what a dead worker held is delivered again"
        say(f"{told} when its visibility timeout ends: the first in {span(free_in_s)}")


def _put_messages(
    found: "ops.FoundMessages", now: float, limit: int, none: str, *, as_json: bool
) -> None:
    if as_json:
        messages = [ops.unsent_as_dict(message) for message in found.messages]
        put_json({"messages": messages, "more": found.more})
        return
    texts = ("message id", "destination", "type", aligned("attempts"))
    put_found(
        (aligned("id"), *texts, unbroken("since"), "reason"),
        (
            (
                *(str(each.number), each.id, each.destination, each.message.type, each.attempts),
                ago(each.since or now, now),
                cut_error(each.reason or each.error),
            )
            for each in found.messages
        ),
        none,
        more_than(limit, more=found.more),
    )


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
        rows.append((*each.key, each.attempts, due, cut_error(each.error)))
    put_found(
        ("consumer", "message id", aligned("attempts"), unbroken("due"), "error"),
        rows,
        "no messages wait for a retry",
        more_than(limit, more=found.more),
    )
