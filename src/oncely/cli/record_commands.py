"""`oncely list` and `oncely show`: looking at records."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
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
from oncely.cli.terminal import moment, span
from oncely.core.errors import ConfigError, RefusedError
from oncely.core.record import Record
from oncely.core.waiting import WaitingMessage
from oncely.ledger import Ledger

_NAMED = 5


def list_records(parsed: argparse.Namespace) -> int:
    """Print the records that fit the filters."""
    with opened(parsed) as ledger:
        newest = parsed.sort == "newest"
        selected = ops.select(ledger, read_filters(parsed), parsed.limit, newest=newest)
        now = ledger.now()
    if parsed.json:
        records = [ops.record_as_dict(record, now) for record in selected.records]
        print(json.dumps({"records": records, "more": selected.more}))
        return 0
    if not selected.records:
        print("no matching records", file=sys.stderr)
        return 0
    put(records_table(selected, now), last_gives_way=True)
    if selected.more:
        print(f"the first {parsed.limit:,}; more fit, see --limit", file=sys.stderr)
    return 0


def show(parsed: argparse.Namespace) -> int:
    """Print all fields of the records of one message, what of each waits to be sent, and its
    finished steps.
    """
    with opened(parsed) as ledger:
        records = _records_of(ledger, parsed.id, parsed.consumer)
        found = [(record, ops.details(ledger, record.key)) for record in records]
        now = ledger.now()
    if parsed.json:
        dicts = [ops.record_as_dict(record, now) | details.as_dict() for record, details in found]
        print(json.dumps(dicts[0] if len(dicts) == 1 else {"records": dicts}))
        return 0
    for turn, (record, details) in enumerate(found):
        if turn:
            print()
        _show(record, details, now)
    return 0


def _show(record: Record, details: ops.Details, now: float) -> None:
    put(fields_table(_fields(record, now)))
    if details.deferred:
        print()
        put(waiting_table(details.deferred), last_gives_way=True)
    if details.steps:
        print()
        put(steps_table(details.steps), last_gives_way=True)


def read_filters(parsed: argparse.Namespace) -> ops.Selection:
    """The filters that were typed."""
    return ops.Selection(
        consumer=parsed.consumer,
        states=() if parsed.state is None else (parsed.state,),
        older_than=parsed.older_than,
        text=parsed.text,
    )


def one_record(ledger: Ledger, message_id: str, consumer: str | None) -> Record:
    """The record of a message that one consumer has, or `consumer`.

    Raises RefusedError where there is none, ConfigError where several consumers have one.
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
    """The records of a message, of which there is one at least. Raises RefusedError."""
    found = ops.find(ledger, message_id, consumer)
    if not found:
        of = "" if consumer is None else f" ({consumer})"
        raise RefusedError(f"{message_id!r}{of} is not in the ledger")
    return found


def records_table(selected: ops.Selected, now: float) -> Table:
    """A row for each record."""
    texts = (folded("consumer"), folded("id"), Column("state", no_wrap=True))
    table = new_table(*texts, *map(aligned, ("attempts", "fence", "last seen")), "error")
    for record in selected.records:
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
