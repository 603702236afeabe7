"""`oncely list` and `oncely show`: looking at records."""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from oncely import ops
from oncely.cli import options, values
from oncely.cli.terminal import (
    Cell,
    ago,
    aligned,
    cut,
    cut_error,
    fields_table,
    loud,
    put,
    put_found,
    put_json,
    unbroken,
    words,
)
from oncely.core.errors import ConfigError, RefusedError, mask_passwords
from oncely.core.errors_by_kind import headline
from oncely.core.record import Record
from oncely.core.shown import moment, shown
from oncely.core.state_words import IN_DOUBT, STATES

if TYPE_CHECKING:
    from oncely.ledger.ledger import Ledger

_NAMED = 5


@options.command("list", "oncely list --state failed --consumer billing --older-than 1h")
@options.filters(STATES)
@options.limit()
@options.option(
    "--sort",
    ("oldest", "newest", "id"),
    "which to list first: oldest and newest read all records that match; id reads until --limit "
    "are found",
    default="oldest",
)
@options.option(
    "--id-begins",
    values.TEXT,
    "with --sort id: only message ids that begin with this text",
    "begins",
)
@options.option(
    "--after", "ID", "with --sort id: go on after this message id, where the list before has ended"
)
@options.open_ledger
def list_records(
    ledger: "Ledger",
    filters: "ops.Selection",
    limit: int,
    sort: str,
    begins: str | None,
    after: str | None,
    as_json: bool,
) -> None:
    """List records, the least recently seen first, or in the order of their ids."""
    if sort != "id" and (begins is not None or after is not None):
        raise ConfigError("list: --id-begins and --after need --sort id")
    more: str | None = None
    if sort == "id":
        records, looked_at, end = ops.search(
            ledger, filters, limit, begins=begins, after=after, within_s=math.inf
        )
        said: dict[str, Any] = {"more": end is not None, "looked_at": looked_at, "end": end}
        if end is not None:
            more = f"more records may match; go on with: --after={shlex.quote(end)}"
    else:
        records, has_more = ops.select(ledger, filters, limit, newest=sort == "newest")
        said = {"more": has_more}
        if has_more:
            more = f"the first {limit:,}; more records match, see --limit"
    now = ledger.now()
    if as_json:
        is_doubt = sort != "id" and filters.states == (IN_DOUBT,)
        doubts = ops.doubts(ledger, records) if is_doubt else []
        found = [each.as_dict(now) for each in doubts]
        found = found or [ops.record_as_dict(each, now) for each in records]
        put_json({"records": found, **said})
        return
    counts = map(aligned, ("attempts", "fence", "last seen"))
    put_found(
        ("consumer", "id", unbroken("state"), *counts, "error"),
        (
            (
                *(*each.key, _state(each, now), each.attempts, each.fence),
                *(ago(each.last_seen, now), cut_error(each.error or "")),
            )
            for each in records
        ),
        "no matching records",
        more,
    )


@options.command("show", "oncely show order-17 --consumer billing")
@options.message_id
@options.consumer()
@options.flag(
    "--story", "and all that is known of it in the order of time, people's changes among it"
)
@options.open_ledger
def show(
    ledger: "Ledger", message_id: str, consumer: str | None, story: bool, as_json: bool
) -> None:
    """Show all fields of a message's record, of each consumer that has one."""
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
            put_found(
                (unbroken("when"), "what", "details"),
                (
                    (
                        None if each.at is None else ago(each.at, now),
                        words(each.what),
                        cut(each.in_words(now) or None),
                    )
                    for each in stories[turn].chapters
                ),
            )


def _show(record: Record, details: "ops.Details", now: float) -> None:
    put(fields_table(_fields(record, now)))
    if details.deferred:
        print()
        put_found(
            ("waits to be sent", "to", aligned("attempts"), "error"),
            (
                (each.id, each.destination, each.attempts, cut_error(each.error or ""))
                for each in details.deferred
            ),
        )
    if details.steps:
        print()
        told = ((n, json.dumps(each, ensure_ascii=False)) for n, each in details.steps.items())
        put_found(("finished step", "result"), ((name, cut(result)) for name, result in told))
    # Where the message itself is kept.
    lines = [
        shown(f"dead letter {x.id}: {mask_passwords(headline(x.reason))}") for x in details.letters
    ]
    if details.retry is not None:
        lines.insert(0, f"waits for a retry: {moment(details.retry.due or now, now)}")
    if lines:
        print("", *lines, sep="\n")


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


def _state(record: Record, now: float) -> Cell:
    word = ops.word_for(record, now)
    return loud(word, word)


def _fields(record: Record, now: float) -> Mapping[str, Cell]:
    lease_until = record.lease_until
    return {
        "consumer": record.key.consumer,
        "id": record.key.message_id,
        "state": _state(record, now),
        "attempts": record.attempts,
        "fence": record.fence,
        "first seen": moment(record.first_seen, now),
        "last seen": moment(record.last_seen, now),
        "lease until": "none" if lease_until is None else moment(lease_until, now),
        "duplicates": record.duplicates,
        "error": record.error,
        "metadata": _as_json(record.metadata),
        "result": _as_json(record.result),
        "fingerprint": record.fingerprint,
        "version": str(record.version),
    }


def _as_json(value: object) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False)
