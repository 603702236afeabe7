"""`oncely dead`: looks at dead letters, retries, edits, exports and discards them."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import click

from oncely import ops
from oncely.cli import options, values
from oncely.cli.options import Note
from oncely.cli.terminal import (
    Cell,
    Progress,
    ago,
    agreed,
    aligned,
    cut_error,
    fields_table,
    lines,
    more_than,
    put,
    put_found,
    put_json,
    say,
    tell_changed,
    unbroken,
)
from oncely.core.errors import ConfigError, RefusedError
from oncely.core.shown import moment

if TYPE_CHECKING:
    from oncely.core.message import Message
    from oncely.core.waiting import DeadLetter
    from oncely.ledger.ledger import Ledger

_SHOWN = 2_000
"""Characters of a body."""

_letter_argument = click.argument(
    "number", metavar="ID", type=values.LETTER, help="the number of a dead letter, as list shows it"
)
_group_option = options.option(
    "--group", "GROUP", "those that failed alike; its id is shown by: oncely dead groups"
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
    options.flag("--all", "all, or all of --consumer", "has_all"),
    _group_option,
    options.consumer("with --all or --group: of this consumer only"),
    options.limit(options.MANY, "with --all or --group: how many are looked at, at most"),
)


@click.group("dead", cls=options.Commands, no_args_is_help=False)
def dead() -> None:
    """List, show, retry, edit, export and discard dead letters."""


@options.command("list", "oncely dead list --consumer billing --sort newest", dead)
@options.consumer()
@options.limit()
@options.option(
    "--sort",
    ("oldest", "newest"),
    "which to list first; --limit leaves out the rest",
    default="oldest",
)
@options.open_ledger
def list_letters(
    ledger: "Ledger", consumer: str | None, limit: int, sort: str, as_json: bool
) -> None:
    """List dead letters, the oldest or the newest first."""
    newest = sort == "newest"
    found = ops.dead_letters(ledger, consumer, limit, newest=newest, with_bodies=False)
    if as_json:
        letters = [ops.letter_as_dict(letter) for letter in found.letters]
        put_json({"dead_letters": letters, "more": found.more})
        return
    now = ledger.now()
    texts = ("consumer", "message id", "type", aligned("attempts"))
    put_found(
        (aligned("id"), *texts, unbroken("first seen"), unbroken("last seen"), "reason"),
        (
            (
                *(str(each.id), each.key.consumer, _message_id(each)),
                *(each.message.type, each.attempts),
                *(ago(each.first_seen, now), ago(each.last_seen, now)),
                cut_error(each.reason),
            )
            for each in found.letters
        ),
        "no dead letters",
        more_than(limit, more=found.more),
    )


@options.command("groups", "oncely dead groups --consumer billing", dead)
@options.consumer()
@options.limit(options.MANY, "how many dead letters are looked at, at most")
@options.open_ledger
def list_groups(ledger: "Ledger", consumer: str | None, limit: int, as_json: bool) -> None:
    """Count dead letters by consumer and error, those that failed alike together."""
    found = ops.letter_groups(ledger, consumer, limit)
    if as_json:
        groups = [asdict(group) for group in found.groups]
        put_json({"groups": groups, "looked_at": found.looked_at, "more": found.more})
        return
    now, looked_at = ledger.now(), f"of the first {found.looked_at:,}; there are more, see --limit"
    counts, ages = map(aligned, ("count", "sample")), map(unbroken, ("first", "last"))
    put_found(
        ("group", "consumer", *counts, *ages, "error"),
        (
            (
                *(each.id, each.consumer, each.count, str(each.sample)),
                *(ago(each.first, now), ago(each.last, now), cut_error(each.error)),
            )
            for each in found.groups
        ),
        "no dead letters",
        looked_at if found.more else None,
    )


@options.command("show", "oncely dead show 42", dead)
@_letter_argument
@options.open_ledger
def show(ledger: "Ledger", number: int, as_json: bool) -> None:
    """Show a dead letter in full, with headers, body and error; passwords are masked."""
    letter = ops.letter(ledger, number)
    if as_json:
        put_json(ops.letter_as_dict(letter, is_whole=True))
    else:
        put(fields_table(_fields(letter, ledger.now())))


@options.command("export", "oncely dead export dead.jsonl --consumer billing", dead)
@click.argument(
    "file",
    metavar="FILE",
    type=values.FILE,
    help="the file to write, - for stdout; an existing file is replaced",
)
@options.consumer()
@_group_option
@options.open_ledger
def export(
    ledger: "Ledger", file: str, consumer: str | None, group: str | None, as_json: bool
) -> None:
    """Write dead letters to a file, one JSON object a line, as they came: passwords are not masked;
    the dead letters stay in the ledger.
    """
    count = 0
    letters = ops.letters_to_export(ledger, consumer, group)
    with _written(file) as to:
        for count, letter in enumerate(letters, start=1):  # noqa: B007 - used below.
            fields = ops.letter_as_dict(letter, is_whole=True, masked=False)
            print(json.dumps(fields), file=to)
    if as_json and file != "-":
        put_json({"exported": count})
    else:
        print(f"exported {count:,}", file=sys.stderr if file == "-" else sys.stdout)


@options.command(
    "retry", "oncely dead retry --all --consumer billing --why 'the bank is back'", dead
)
@_letters_options
@options.note
@options.open_ledger
def retry(ledger: "Ledger", letters: _Letters, note: Note, as_json: bool) -> None:
    """Retry dead letters at once; their attempts are counted from zero."""
    _retry(ledger, _chosen(ledger, letters, "retry"), note, as_json=as_json)


@options.command("discard", "oncely dead discard 42 43 --why 'test messages'", dead)
@_letters_options
@options.yes
@options.note
@options.open_ledger
def discard(
    ledger: "Ledger", letters: _Letters, yes: bool, note: Note, as_json: bool
) -> int | None:
    """Remove dead letters permanently; their records stay as they are."""
    numbers = _chosen(ledger, letters, "discard")
    what = f"discard {len(numbers):,} dead letters permanently"
    if len(numbers) > 1 and not yes and not agreed(what):
        if as_json:
            nothing: ops.Changed[int] = ops.Changed([], [], "", "")
            tell_changed(nothing, "discarded", "dead letter", as_json=True)
        return 1
    with Progress() as progress:
        count = progress.counter(len(numbers))
        changed = ops.discard_letters(ledger, numbers, on_each=count, **note)
    tell_changed(changed, "discarded", "dead letter", as_json=as_json)
    return None


@options.command("edit", "oncely dead edit 42 --body order.json --why 'wrong amount'", dead)
@_letter_argument
@options.option("--body", values.FILE, "the file of the new body; - for stdin", metavar="FILE")
@options.option(
    "--header", values.HEADER, "set one header; may be repeated", "headers", multiple=True
)
@options.option("--type", "TYPE", "the new type", "type_")
@options.option("--id", values.MESSAGE_ID, "the message id, for a message that has none", "new_id")
@options.note
@options.open_ledger
def edit(
    ledger: "Ledger",
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
            looked_at = of_group.looked_at
            say(f"of the first {looked_at:,} dead letters only; there are more, see --limit")
        return of_group.groups[0].ids
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


def _fields(letter: "DeadLetter", now: float) -> Mapping[str, Cell]:
    # From the JSON form, in which passwords are masked.
    shown = ops.letter_as_dict(letter, is_whole=True)
    message, body = letter.message, shown["body"]
    if body is None:
        body = f"{len(message.body):,} bytes that are not text"
    elif len(body) > _SHOWN:
        body = f"{body[:_SHOWN]}…"
    return {
        "id": str(letter.id),
        "consumer": shown["consumer"],
        "message id": _message_id(letter),
        "reason": shown["reason"],
        "attempts": letter.attempts,
        "first seen": moment(letter.first_seen, now),
        "last seen": moment(letter.last_seen, now),
        "type": shown["type"],
        "source": shown["source"],
        "time": None if message.time is None else moment(message.time.timestamp(), now),
        "key": shown["key"],
        "content type": shown["content_type"],
        "headers": json.dumps(shown["headers"], ensure_ascii=False),
        "body": lines(body),
        "error": lines(shown["error"] or "-"),
    }


def _message_id(letter: "DeadLetter") -> str:
    return letter.key.message_id or letter.message.id
