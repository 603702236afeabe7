"""`oncely dead`: looks at dead letters, retries, edits, exports and discards them."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import click

from oncely.cli import lazy_ops as ops
from oncely.cli import options, values
from oncely.cli.opening import opened
from oncely.cli.options import LedgerName, Note
from oncely.cli.progress import Progress
from oncely.cli.tables import (
    Cell,
    aligned,
    cell,
    cut,
    fields_table,
    folded,
    lines,
    new_table,
    put,
    put_found,
    unbroken,
)
from oncely.cli.terminal import agreed, put_json, say, tell_changed
from oncely.core.errors import ConfigError, RefusedError, mask_passwords
from oncely.core.shown import moment, span

if TYPE_CHECKING:
    from rich.table import Table

    from oncely.core.message import Message
    from oncely.core.waiting import DeadLetter
    from oncely.ledger import Ledger

_SHOWN = 2_000
"""Characters of a body."""

_letter_argument = click.argument(
    "number", metavar="ID", type=values.LETTER, help="the number of a dead letter, as list shows it"
)
_group_option = click.option(
    "--group",
    metavar="GROUP",
    help="those that failed alike; its id is shown by: oncely dead groups",
)


class _Letters(NamedTuple):
    """Which dead letters to change."""

    numbers: Sequence[int]
    has_all: bool
    group: str | None
    consumer: str | None
    limit: int


_letters_options = options.bundle(
    "letters",
    _Letters,
    click.argument(
        "numbers",
        metavar="[ID...]",
        nargs=-1,
        type=values.LETTER,
        help="the numbers of dead letters, as list shows them",
    ),
    click.option("--all", "has_all", is_flag=True, help="all, or all of --consumer"),
    _group_option,
    options.consumer("with --all or --group: of this consumer only"),
    options.limit(options.MANY, "with --all or --group: how many are looked at, at most"),
)


@click.group("dead", cls=options.Commands, no_args_is_help=False)
def dead() -> None:
    """List, show, retry, edit, export and discard dead letters."""


@dead.command("list", epilog=options.example("oncely dead list --consumer billing --sort newest"))
@options.consumer()
@options.limit()
@click.option(
    "--sort",
    type=click.Choice(("oldest", "newest")),
    default="oldest",
    help="which to list first; --limit leaves out the rest",
)
@options.ledger
def list_letters(
    at: LedgerName, consumer: str | None, limit: int, sort: str, as_json: bool
) -> None:
    """List dead letters, the oldest or the newest first."""
    with opened(at) as ledger:
        newest = sort == "newest"
        found = ops.dead_letters(ledger, consumer, limit, newest=newest, with_bodies=False)
        now = ledger.now()
    if as_json:
        letters = [ops.letter_as_dict(letter) for letter in found.letters]
        put_json({"dead_letters": letters, "more": found.more})
    else:
        more = f"the first {limit:,}; there are more, see --limit" if found.more else None
        put_found(_letters_table(found, now), "no dead letters", more)


@dead.command("groups", epilog=options.example("oncely dead groups --consumer billing"))
@options.consumer()
@options.limit(options.MANY, "how many dead letters are looked at, at most")
@options.ledger
def list_groups(at: LedgerName, consumer: str | None, limit: int, as_json: bool) -> None:
    """Count dead letters by consumer and error, those that failed alike together."""
    with opened(at) as ledger:
        found = ops.letter_groups(ledger, consumer, limit)
        now = ledger.now()
    if as_json:
        groups = [group.as_dict() for group in found.groups]
        put_json({"groups": groups, "looked_at": found.looked_at, "more": found.more})
    else:
        looked_at = f"of the first {found.looked_at:,}; there are more, see --limit"
        put_found(_groups_table(found, now), "no dead letters", looked_at if found.more else None)


@dead.command("show", epilog=options.example("oncely dead show 42"))
@_letter_argument
@options.ledger
def show(at: LedgerName, number: int, as_json: bool) -> None:
    """Show a dead letter in full, with headers, body and error; passwords are masked."""
    with opened(at) as ledger:
        letter = ops.letter(ledger, number)
        now = ledger.now()
    if as_json:
        put_json(ops.letter_as_dict(letter, is_whole=True))
    else:
        put(fields_table(_fields(letter, now)))


@dead.command("export", epilog=options.example("oncely dead export dead.jsonl --consumer billing"))
@click.argument(
    "file",
    metavar="FILE",
    type=values.FILE,
    help="the file to write, - for stdout; an existing file is replaced",
)
@options.consumer()
@_group_option
@options.ledger
def export(
    at: LedgerName, file: str, consumer: str | None, group: str | None, as_json: bool
) -> None:
    """Write dead letters to a file, one JSON object a line, as they came: passwords are not masked;
    the dead letters stay in the ledger.
    """
    count = 0
    with opened(at) as ledger:
        letters = (
            ops.every_dead_letter(ledger, consumer)
            if group is None
            else ops.every_of_group(ledger, group, consumer)
        )
        # Read before a file is replaced: the name of the consumer or group may be mistyped.
        first = [*islice(letters, 1)]
        with _written(file) as to:
            for count, letter in enumerate(chain(first, letters), start=1):  # noqa: B007 - used below.
                fields = ops.letter_as_dict(letter, is_whole=True, masked=False)
                print(json.dumps(fields), file=to)
    if file == "-":
        say(f"exported {count:,}")
    elif as_json:
        put_json({"exported": count})
    else:
        print(f"exported {count:,}")


@dead.command(
    "retry",
    epilog=options.example("oncely dead retry --all --consumer billing --why 'the bank is back'"),
)
@_letters_options
@options.note
@options.ledger
def retry(at: LedgerName, letters: _Letters, note: Note, as_json: bool) -> None:
    """Retry dead letters at once; their attempts are counted from zero."""
    with opened(at) as ledger:
        _retry(ledger, _chosen(ledger, letters, "retry"), note, as_json=as_json)


@dead.command("discard", epilog=options.example("oncely dead discard 42 43 --why 'test messages'"))
@_letters_options
@options.yes
@options.note
@options.ledger
def discard(at: LedgerName, letters: _Letters, yes: bool, note: Note, as_json: bool) -> int | None:
    """Remove dead letters permanently; their records stay as they are."""
    with opened(at) as ledger:
        numbers = _chosen(ledger, letters, "discard")
        what = f"discard {len(numbers):,} dead letters permanently"
        if len(numbers) > 1 and not yes and not agreed(what):
            if as_json:
                tell_changed(
                    ops.LettersChanged([], [], "", ""), "discarded", "dead letter", as_json=True
                )
            return 1
        with Progress() as progress:
            changed = ops.discard_letters(
                ledger, numbers, on_each=progress.counter(len(numbers)), **note
            )
    tell_changed(changed, "discarded", "dead letter", as_json=as_json)
    return None


@dead.command(
    "edit", epilog=options.example("oncely dead edit 42 --body order.json --why 'wrong amount'")
)
@_letter_argument
@click.option(
    "--body", metavar="FILE", type=values.FILE, help="the file of the new body; - for stdin"
)
@click.option(
    "--header", "headers", type=values.HEADER, multiple=True, help="set one header; may be repeated"
)
@click.option("--type", "type_", metavar="TYPE", help="the new type")
@click.option(
    "--id", "new_id", type=values.MESSAGE_ID, help="the message id, for a message that has none"
)
@options.note
@options.ledger
def edit(
    at: LedgerName,
    number: int,
    body: str | None,
    headers: tuple[tuple[str, str], ...],
    type_: str | None,
    new_id: str | None,
    note: Note,
    as_json: bool,
) -> int | None:
    """Retry a dead letter with other content: what the options name, or the body as you edit it in
    $EDITOR.
    """
    with opened(at) as ledger:
        message = ops.letter(ledger, number).message
        if not message.id and new_id is None:
            raise ConfigError("edit: the message has no id, which it needs; add --id ID")
        typed = {"id": new_id, "type": type_}
        others: dict[str, Any] = {name: text for name, text in typed.items() if text is not None}
        if headers:
            others["headers"] = {**message.headers, **dict(headers)}
        if body is not None:
            others["body"] = _read(body)
        elif not others:
            others["body"] = _from_editor(message)
        edited = replace(message, **others)
        if edited == message:
            say("nothing was changed")
            return 1
        _retry(ledger, [number], note, as_json=as_json, message=edited)
    return None


def _chosen(ledger: "Ledger", letters: _Letters, verb: str) -> Sequence[int]:
    """The numbers of the dead letters to change."""
    numbers, has_all, group, consumer, limit = letters
    if sum((bool(numbers), has_all, group is not None)) != 1:
        raise ConfigError(
            f"{verb}: name the IDs of dead letters, or --all, or --group, and one of them only"
        )
    if group is not None:
        of_group = ops.letter_group(ledger, group, consumer, limit)
        if of_group.more:
            looked_at = f"of the first {of_group.looked_at:,} dead letters only"
            say(f"{looked_at}; there are more, see --limit")
        return of_group.group.ids
    if numbers:
        if consumer is not None:
            raise ConfigError(f"{verb}: IDs need no --consumer; leave it out, or say --all")
        return numbers
    found = ops.dead_letters(ledger, consumer, limit, with_bodies=False)
    if not found.letters:
        say("no dead letters")
    if found.more:
        say(f"the first {limit:,} only; there are more, see --limit")
    return [letter.id for letter in found.letters]


def _retry(
    ledger: "Ledger",
    numbers: Sequence[int],
    note: Note,
    *,
    as_json: bool,
    message: "Message | None" = None,
) -> None:
    with Progress() as progress:
        count = progress.counter(len(numbers))
        changed = ops.retry_letters(ledger, numbers, on_each=count, message=message, **note)
    tell_changed(changed, "retried", "dead letter", as_json=as_json)


# ---- Files and the editor ---------------------------------------------------------------------


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


def _read(name: str) -> bytes:
    if name == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(f"--body: {name!r} cannot be read: {error.strerror}") from error


def _from_editor(message: "Message") -> bytes:
    """The body after the user has edited it."""
    if not sys.stdin.isatty():
        raise ConfigError(
            "edit: not a terminal, so no editor can be opened; add --body FILE, "
            "--header NAME=VALUE, --type TYPE or --id ID"
        )
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    # Its name tells the editor what is in it.
    suffix = ".json" if message.content_type.endswith("json") else ".txt"
    with TemporaryDirectory(prefix="oncely-") as folder:
        file = Path(folder, f"body{suffix}")
        file.write_bytes(message.body)
        try:
            code = subprocess.run([*shlex.split(editor), str(file)], check=False).returncode
        except OSError as error:
            raise ConfigError(
                f"edit: the editor {editor!r} cannot be run: {error.strerror}; set EDITOR"
            ) from error
        if code:
            raise RefusedError(f"the editor exited with code {code}; nothing was changed")
        return file.read_bytes()


# ---- Tables -------------------------------------------------------------------------------------


def _letters_table(found: "ops.FoundLetters", now: float) -> "Table":
    texts = (folded("consumer"), folded("message id"), folded("type"))
    ages = map(unbroken, ("first seen", "last seen"))
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


def _groups_table(found: "ops.FoundGroups", now: float) -> "Table":
    ages = map(unbroken, ("first", "last"))
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


def _fields(letter: "DeadLetter", now: float) -> dict[str, Cell]:
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


def _message_id(letter: "DeadLetter") -> str:
    return letter.key.message_id or letter.message.id or "-"


def _time(time: datetime | None, now: float) -> str:
    return "-" if time is None else moment(time.timestamp(), now)
