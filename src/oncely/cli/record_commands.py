"""`oncely list` and `oncely show`: looking at records."""

import argparse
import json
import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Column, Table

from oncely import ops
from oncely.cli.ledger_arguments import opened
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
)
from oncely.core.errors import ConfigError, RefusedError, mask_passwords
from oncely.core.record import Record
from oncely.core.shown import moment, shown, span
from oncely.core.waiting import WaitingMessage
from oncely.ledger import Ledger

_NAMED = 5


def list_records(parsed: argparse.Namespace) -> int:
    """Print the records that match the filters."""
    if parsed.sort == "id":
        return _search(parsed)
    if parsed.begins is not None or parsed.after is not None:
        raise ConfigError("list: --id-begins and --after need --sort id")
    with opened(parsed) as ledger:
        newest = parsed.sort == "newest"
        selected = ops.select(ledger, read_filters(parsed), parsed.limit, newest=newest)
        now = ledger.now()
        doubts = ops.doubts(ledger, selected.records) if parsed.state == ops.IN_DOUBT else []
    if parsed.json:
        found = [each.as_dict(now) for each in doubts] or _as_dicts(selected.records, now)
        print(json.dumps({"records": found, "more": selected.more}))
    else:
        cut = f"the first {parsed.limit:,}; more records match, see --limit"
        _print_table(selected.records, now, cut if selected.more else None)
    return 0


def _search(parsed: argparse.Namespace) -> int:
    """Print the records that match the filters, in the order of their ids."""
    with opened(parsed) as ledger:
        searched = ops.search(
            ledger,
            read_filters(parsed),
            parsed.limit,
            begins=parsed.begins,
            after=parsed.after,
            within_s=math.inf,
        )
        now = ledger.now()
    end = searched.end
    if parsed.json:
        said = {"more": end is not None, "looked_at": searched.looked_at, "end": end}
        print(json.dumps({"records": _as_dicts(searched.records, now), **said}))
    else:
        go_on = f"more records may match; go on with: --after={shlex.quote(end or '')}"
        _print_table(searched.records, now, None if end is None else go_on)
    return 0


def _as_dicts(records: Sequence[Record], now: float) -> Sequence[dict[str, Any]]:
    return [ops.record_as_dict(each, now) for each in records]


def _print_table(records: Sequence[Record], now: float, said: str | None) -> None:
    if not records:
        print("no matching records", file=sys.stderr)
        return
    put(records_table(records, now), last_gives_way=True)
    if said is not None:
        print(shown(said), file=sys.stderr)


def show(parsed: argparse.Namespace) -> int:
    """Print all fields of a message's records, its waiting messages, and its finished steps."""
    with opened(parsed) as ledger:
        records = _records_of(ledger, parsed.id, parsed.consumer)
        found = [(record, ops.details(ledger, record.key)) for record in records]
        stories = [ops.story(ledger, record.key) for record in records if parsed.story]
        now = ledger.now()
    if parsed.json:
        dicts = [
            ops.record_as_dict(record, now) | details.as_dict(now) for record, details in found
        ]
        if stories:
            pairs = zip(dicts, stories, strict=True)
            dicts = [fields | story.as_dict() for fields, story in pairs]
        print(json.dumps(dicts[0] if len(dicts) == 1 else {"records": dicts}))
        return 0
    for turn, (record, details) in enumerate(found):
        if turn:
            print()
        _show(record, details, now)
        if stories:
            print()
            put(_story_table(stories[turn], now), last_gives_way=True)
    return 0


def _show(record: Record, details: ops.Details, now: float) -> None:
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


def _waiting_lines(details: ops.Details, now: float) -> Iterator[str]:
    """Where the message itself is kept, and what shows it."""
    if details.retry is not None:
        due = details.retry.due or now
        yield f"waits for a retry: {moment(due, now)}"
    for letter in details.letters:
        yield shown(f"dead letter {letter.id}: {mask_passwords(letter.reason)}")


def read_filters(parsed: argparse.Namespace) -> ops.Selection:
    """The filters that were typed."""
    return ops.Selection(
        consumer=parsed.consumer,
        states=() if parsed.state is None else (parsed.state,),
        older_than=parsed.older_than,
        text=parsed.text,
    )


def one_record(ledger: Ledger, message_id: str, consumer: str | None) -> Record:
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


def _records_of(ledger: Ledger, message_id: str, consumer: str | None) -> Sequence[Record]:
    """The records of a message, at least one. Raises RefusedError if there are none."""
    found = ops.find(ledger, message_id, consumer)
    if not found:
        of = "" if consumer is None else f" ({consumer})"
        raise RefusedError(f"{message_id!r}{of} is not in the ledger")
    return found


def records_table(records: Sequence[Record], now: float) -> Table:
    """A row for each record."""
    texts = (folded("consumer"), folded("id"), Column("state", no_wrap=True))
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


def waiting_table(deferred: Sequence[WaitingMessage]) -> Table:
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


def steps_table(steps: Mapping[str, Any]) -> Table:
    """A row for each finished step."""
    table = new_table(folded("finished step"), "result")
    for name, result in steps.items():
        table.add_row(cell(name), cut(json.dumps(result, ensure_ascii=False)))
    return table


def _story_table(story: ops.Story, now: float) -> Table:
    """A row for each thing that is known."""
    table = new_table(Column("when", no_wrap=True), "what", "details")
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
