"""`oncely dead list`, `groups`, `show` and `export`: looking at dead letters."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import chain, islice
from pathlib import Path
from typing import TextIO

from rich.table import Column, Table

from oncely import ops
from oncely.cli.ledger_arguments import opened
from oncely.cli.tables import Cell, aligned, cell, cut, fields_table, folded, lines, new_table, put
from oncely.core.errors import ConfigError, mask_passwords
from oncely.core.shown import moment, span
from oncely.core.waiting import DeadLetter

_SHOWN = 2_000
"""Characters of a body."""


def list_letters(parsed: argparse.Namespace) -> int:
    """Print the dead letters of a consumer, or of all."""
    with opened(parsed) as ledger:
        newest = parsed.sort == "newest"
        found = ops.dead_letters(
            ledger, parsed.consumer, parsed.limit, newest=newest, with_bodies=False
        )
        now = ledger.now()
    if parsed.json:
        letters = [ops.letter_as_dict(letter) for letter in found.letters]
        print(json.dumps({"dead_letters": letters, "more": found.more}))
        return 0
    if not found.letters:
        print("no dead letters", file=sys.stderr)
        return 0
    put(_letters_table(found, now), last_gives_way=True)
    if found.more:
        print(f"the first {parsed.limit:,}; there are more, see --limit", file=sys.stderr)
    return 0


def list_groups(parsed: argparse.Namespace) -> int:
    """Print how many dead letters failed alike."""
    with opened(parsed) as ledger:
        found = ops.letter_groups(ledger, parsed.consumer, parsed.limit)
        now = ledger.now()
    if parsed.json:
        groups = [group.as_dict() for group in found.groups]
        print(json.dumps({"groups": groups, "looked_at": found.looked_at, "more": found.more}))
        return 0
    if not found.groups:
        print("no dead letters", file=sys.stderr)
        return 0
    put(_groups_table(found, now), last_gives_way=True)
    if found.more:
        print(f"of the first {found.looked_at:,}; there are more, see --limit", file=sys.stderr)
    return 0


def show(parsed: argparse.Namespace) -> int:
    """Print a dead letter in full."""
    with opened(parsed) as ledger:
        letter = ops.letter(ledger, parsed.id)
        now = ledger.now()
    if parsed.json:
        print(json.dumps(ops.letter_as_dict(letter, is_whole=True)))
    else:
        put(fields_table(_fields(letter, now)))
    return 0


def export(parsed: argparse.Namespace) -> int:
    """Write dead letters as they are, one JSON object a line."""
    count = 0
    with opened(parsed) as ledger:
        letters = (
            ops.every_dead_letter(ledger, parsed.consumer)
            if parsed.group is None
            else ops.every_of_group(ledger, parsed.group, parsed.consumer)
        )
        # Read before a file is replaced: the name of the consumer or group may be mistyped.
        first = [*islice(letters, 1)]
        with _written(parsed.file) as file:
            for count, letter in enumerate(chain(first, letters), start=1):  # noqa: B007 - used below.
                fields = ops.letter_as_dict(letter, is_whole=True, masked=False)
                print(json.dumps(fields), file=file)
    if parsed.file == "-":
        print(f"exported {count:,}", file=sys.stderr)
    elif parsed.json:
        print(json.dumps({"exported": count}))
    else:
        print(f"exported {count:,}")
    return 0


@contextmanager
def _written(name: str) -> Iterator[TextIO]:
    """The file of that name, to be written; stdout for a dash. Raises ConfigError."""
    if name == "-":
        yield sys.stdout
        return
    try:
        file = Path(name).open("w", encoding="utf-8")  # noqa: SIM115 - closed below.
    except OSError as error:
        raise ConfigError(f"export: {name!r} cannot be written: {error.strerror}") from error
    with file:
        yield file


# ---- In words ----------------------------------------------------------------------------------


def _letters_table(found: ops.FoundLetters, now: float) -> Table:
    texts = (folded("consumer"), folded("message id"), folded("type"))
    ages = (Column(name, no_wrap=True) for name in ("first seen", "last seen"))
    table = new_table(aligned("id"), *texts, aligned("attempts"), *ages, "reason")
    for letter in found.letters:
        table.add_row(
            str(letter.id),
            cell(letter.key.consumer),
            cell(_message_id(letter)),
            cell(letter.message.type or "-"),
            f"{letter.attempts:,}",
            *(f"{span(now - at)} ago" for at in (letter.first_seen, letter.last_seen)),
            cut(mask_passwords(letter.reason)),
        )
    return table


def _groups_table(found: ops.FoundGroups, now: float) -> Table:
    ages = (Column(name, no_wrap=True) for name in ("first", "last"))
    counts = (aligned("count"), aligned("sample"))
    table = new_table("group", folded("consumer"), *counts, *ages, "error")
    for group in found.groups:
        table.add_row(
            group.id,
            cell(group.consumer),
            f"{group.count:,}",
            str(group.sample),
            *(f"{span(now - at)} ago" for at in (group.first, group.last)),
            cut(group.error),
        )
    return table


def _fields(letter: DeadLetter, now: float) -> dict[str, Cell]:
    # From the JSON form, in which passwords are masked.
    shown = ops.letter_as_dict(letter, is_whole=True)
    message = letter.message
    fields = {
        "id": str(letter.id),
        "consumer": shown["consumer"],
        "message id": _message_id(letter),
        "reason": shown["reason"],
        "attempts": f"{letter.attempts:,}",
        "first seen": moment(letter.first_seen, now),
        "last seen": moment(letter.last_seen, now),
        "type": shown["type"] or "-",
        "source": shown["source"] or "-",
        "time": _time(message.time, now),
        "key": shown["key"] or "-",
        "content type": shown["content_type"],
        "headers": json.dumps(shown["headers"], ensure_ascii=False),
    }
    body = shown["body"]
    if body is None:
        body = f"{len(message.body):,} bytes that are not text"
    elif len(body) > _SHOWN:
        body = f"{body[:_SHOWN]}…"
    return fields | {"body": lines(body), "error": lines(shown["error"] or "-")}


def _message_id(letter: DeadLetter) -> str:
    return letter.key.message_id or letter.message.id or "-"


def _time(time: datetime | None, now: float) -> str:
    return "-" if time is None else moment(time.timestamp(), now)
