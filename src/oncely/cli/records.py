"""`oncely list` and `oncely show`: looking at records."""

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from oncely.cli import lazy_ops as ops
from oncely.cli import options, values
from oncely.cli.opening import opened
from oncely.cli.options import Filters, LedgerName
from oncely.cli.tables import (
    Cell,
    aligned,
    cell,
    cut,
    fields_table,
    folded,
    loud,
    new_table,
    put,
    put_found,
    unbroken,
)
from oncely.cli.terminal import put_json
from oncely.core.errors import ConfigError, RefusedError, mask_passwords
from oncely.core.record import Record
from oncely.core.shown import moment, shown, span
from oncely.core.state_words import IN_DOUBT, STATES

if TYPE_CHECKING:
    from rich.table import Table

    from oncely.core.waiting import WaitingMessage
    from oncely.ledger import Ledger

_NAMED = 5
_NONE = "no matching records"


@click.command(
    "list", epilog=options.example("oncely list --state failed --consumer billing --older-than 1h")
)
@options.filters(STATES)
@options.limit()
@click.option(
    "--sort",
    type=click.Choice(("oldest", "newest", "id")),
    default="oldest",
    help="which to list first: oldest and newest read all records that match; id reads until "
    "--limit are found",
)
@click.option(
    "--id-begins",
    "begins",
    type=values.TEXT,
    help="with --sort id: only message ids that begin with this text",
)
@click.option(
    "--after",
    metavar="ID",
    help="with --sort id: go on after this message id, where the list before has ended",
)
@options.ledger
def list_records(
    at: LedgerName,
    filters: Filters,
    limit: int,
    sort: str,
    begins: str | None,
    after: str | None,
    as_json: bool,
) -> None:
    """List records, the least recently seen first, or in the order of their ids."""
    if sort != "id" and (begins is not None or after is not None):
        raise ConfigError("list: --id-begins and --after need --sort id")
    with opened(at) as ledger:
        if sort == "id":
            _search(ledger, filters, limit, begins, after, as_json=as_json)
        else:
            _select(ledger, filters, limit, newest=sort == "newest", as_json=as_json)


def _select(ledger: "Ledger", filters: Filters, limit: int, *, newest: bool, as_json: bool) -> None:
    """Print the records that match, by when they were last seen."""
    selected = ops.select(ledger, ops.Selection(**filters), limit, newest=newest)
    now = ledger.now()
    if as_json:
        is_doubt = filters["states"] == (IN_DOUBT,)
        doubts = ops.doubts(ledger, selected.records) if is_doubt else []
        found = [each.as_dict(now) for each in doubts] or _as_dicts(selected.records, now)
        put_json({"records": found, "more": selected.more})
    else:
        more = f"the first {limit:,}; more records match, see --limit" if selected.more else None
        put_found(records_table(selected.records, now), _NONE, more)


def _search(
    ledger: "Ledger",
    filters: Filters,
    limit: int,
    begins: str | None,
    after: str | None,
    *,
    as_json: bool,
) -> None:
    """Print the records that match, in the order of their ids."""
    searched = ops.search(
        ledger, ops.Selection(**filters), limit, begins=begins, after=after, within_s=math.inf
    )
    now, end = ledger.now(), searched.end
    if as_json:
        said = {"more": end is not None, "looked_at": searched.looked_at, "end": end}
        put_json({"records": _as_dicts(searched.records, now), **said})
    else:
        go_on = f"more records may match; go on with: --after={shlex.quote(end or '')}"
        put_found(records_table(searched.records, now), _NONE, None if end is None else go_on)


def _as_dicts(records: Sequence[Record], now: float) -> Sequence[dict[str, Any]]:
    return [ops.record_as_dict(each, now) for each in records]


@click.command("show", epilog=options.example("oncely show order-17 --consumer billing"))
@options.message_id
@options.consumer()
@click.option(
    "--story",
    is_flag=True,
    help="and all that is known of it in the order of time, people's changes among it",
)
@options.ledger
def show(at: LedgerName, message_id: str, consumer: str | None, story: bool, as_json: bool) -> None:
    """Show all fields of a message's record, of each consumer that has one."""
    with opened(at) as ledger:
        records = _records_of(ledger, message_id, consumer)
        found = [(record, ops.details(ledger, record.key)) for record in records]
        stories = [ops.story(ledger, record.key) for record in records if story]
        now = ledger.now()
    if as_json:
        dicts = [
            ops.record_as_dict(record, now) | details.as_dict(now) for record, details in found
        ]
        if stories:
            pairs = zip(dicts, stories, strict=True)
            dicts = [fields | story.as_dict() for fields, story in pairs]
        put_json(dicts[0] if len(dicts) == 1 else {"records": dicts})
        return
    for turn, (record, details) in enumerate(found):
        if turn:
            print()
        _show(record, details, now)
        if stories:
            print()
            put(_story_table(stories[turn], now), last_gives_way=True)


def _show(record: Record, details: "ops.Details", now: float) -> None:
    put(fields_table(_fields(record, now)))
    if details.deferred:
        print()
        put(waiting_table(details.deferred), last_gives_way=True)
    if details.steps:
        print()
        put(steps_table(details.steps), last_gives_way=True)
    lines = [*_waiting_lines(details, now)]
    if lines:
        print("", *lines, sep="\n")


def _waiting_lines(details: "ops.Details", now: float) -> Iterator[str]:
    """Where the message itself is kept, and what shows it."""
    if details.retry is not None:
        due = details.retry.due or now
        yield f"waits for a retry: {moment(due, now)}"
    for letter in details.letters:
        yield shown(f"dead letter {letter.id}: {mask_passwords(letter.reason)}")


def one_record(ledger: "Ledger", message_id: str, consumer: str | None) -> Record:
    """The record of a message, of the only consumer that has one, or of `consumer`.

    Raises RefusedError if there is no record, ConfigError if several consumers have one.
    """
    found = _records_of(ledger, message_id, consumer)
    if len(found) > 1:
        names = ", ".join(record.key.consumer for record in found[:_NAMED])
        others = f" and {len(found) - _NAMED} others" if len(found) > _NAMED else ""
        raise ConfigError(
            f"{message_id!r} is a message of {names}{others}; name one with --consumer"
        )
    return found[0]


def _records_of(ledger: "Ledger", message_id: str, consumer: str | None) -> Sequence[Record]:
    """The records of a message, at least one. Raises RefusedError if there are none."""
    found = ops.find(ledger, message_id, consumer)
    if not found:
        of = "" if consumer is None else f" ({consumer})"
        raise RefusedError(f"{message_id!r}{of} is not in the ledger")
    return found


def records_table(records: Sequence[Record], now: float) -> "Table":
    """A row for each record."""
    texts = (folded("consumer"), folded("id"), unbroken("state"))
    table = new_table(*texts, *map(aligned, ("attempts", "fence", "last seen")), "error")
    for record in records:
        word = ops.word_for(record, now)
        table.add_row(
            cell(record.key.consumer),
            cell(record.key.message_id),
            loud(word, word),
            f"{record.attempts:,}",
            f"{record.fence:,}",
            f"{span(now - record.last_seen)} ago",
            cut(record.error or ""),
        )
    return table


def waiting_table(deferred: Sequence["WaitingMessage"]) -> "Table":
    """A row for each message that waits to be sent."""
    table = new_table(folded("waits to be sent"), folded("to"), aligned("attempts"), "error")
    for message in deferred:
        table.add_row(
            cell(message.id),
            cell(message.destination),
            f"{message.attempts:,}",
            cut(message.error or ""),
        )
    return table


def steps_table(steps: Mapping[str, Any]) -> "Table":
    """A row for each finished step."""
    table = new_table(folded("finished step"), "result")
    for name, result in steps.items():
        table.add_row(cell(name), cut(json.dumps(result, ensure_ascii=False)))
    return table


def _story_table(story: "ops.Story", now: float) -> "Table":
    """A row for each thing that is known."""
    table = new_table(unbroken("when"), "what", "details")
    for chapter in story.chapters:
        when = "-" if chapter.at is None else f"{span(now - chapter.at)} ago"
        what = cell(chapter.what.replace("_", " "))
        table.add_row(when, what, cut(chapter.in_words(now) or "-"))
    return table


def _fields(record: Record, now: float) -> dict[str, Cell]:
    lease_until = record.lease_until
    word = ops.word_for(record, now)
    return {
        "consumer": record.key.consumer,
        "id": record.key.message_id,
        "state": loud(word, word),
        "attempts": f"{record.attempts:,}",
        "fence": f"{record.fence:,}",
        "first seen": moment(record.first_seen, now),
        "last seen": moment(record.last_seen, now),
        "lease until": "none" if lease_until is None else moment(lease_until, now),
        "duplicates": f"{record.duplicates:,}",
        "error": record.error or "-",
        "metadata": _as_json(record.metadata),
        "result": _as_json(record.result),
        "fingerprint": record.fingerprint or "-",
        "version": str(record.version),
    }


def _as_json(value: object) -> str:
    return "-" if value is None else json.dumps(value, ensure_ascii=False)
