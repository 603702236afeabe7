"""`oncely dead retry`, `edit` and `discard`: changes to dead letters."""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from oncely import ops
from oncely.cli.changes import agreed, login_name, tell_audit
from oncely.cli.ledger_arguments import opened
from oncely.cli.progress import Progress
from oncely.cli.values import letter as as_number
from oncely.core.errors import ConfigError, RefusedError
from oncely.core.message import Message
from oncely.ledger import Ledger

_Change = Callable[..., ops.LettersChanged]


def retry(parsed: argparse.Namespace) -> int:
    """Retry dead letters; return 1 if one of the named IDs does not exist."""
    with opened(parsed) as ledger:
        return _change(parsed, ledger, _chosen(parsed, ledger, "retry"), "retried")


def discard(parsed: argparse.Namespace) -> int:
    """Remove dead letters; return 1 if a named ID does not exist, or if the user answers no."""
    with opened(parsed) as ledger:
        ids = _chosen(parsed, ledger, "discard")
        what = f"discard {len(ids):,} dead letters permanently"
        if len(ids) > 1 and not parsed.yes and not agreed(what):
            if parsed.json:
                print(json.dumps(_as_dict(ops.LettersChanged([], [], "", ""), "discarded")))
            return 1
        return _change(parsed, ledger, ids, "discarded", ops.discard_letters)


def edit(parsed: argparse.Namespace) -> int:
    """Retry a dead letter with other content; return 1 if the content is unchanged."""
    with opened(parsed) as ledger:
        message = ops.letter(ledger, parsed.id).message
        edited = _edited(parsed, message)
        if edited == message:
            print("nothing was changed", file=sys.stderr)
            return 1
        return _change(parsed, ledger, [parsed.id], "retried", message=edited)


def _chosen(parsed: argparse.Namespace, ledger: Ledger, verb: str) -> Sequence[int]:
    """The numbers of the dead letters to change."""
    if sum((bool(parsed.ids), parsed.all, parsed.group is not None)) != 1:
        raise ConfigError(
            f"{verb}: name the IDs of dead letters, or --all, or --group, and one of them only"
        )
    if parsed.group is not None:
        of_group = ops.letter_group(ledger, parsed.group, parsed.consumer, parsed.limit)
        if of_group.more:
            looked_at = f"of the first {of_group.looked_at:,} dead letters only"
            print(f"{looked_at}; there are more, see --limit", file=sys.stderr)
        return of_group.group.ids
    if parsed.ids:
        if parsed.consumer is not None:
            raise ConfigError(f"{verb}: IDs need no --consumer; leave it out, or say --all")
        return [as_number(id_) for id_ in parsed.ids]
    found = ops.dead_letters(ledger, parsed.consumer, parsed.limit, with_bodies=False)
    if not found.letters:
        print("no dead letters", file=sys.stderr)
    if found.more:
        print(f"the first {parsed.limit:,} only; there are more, see --limit", file=sys.stderr)
    return [letter.id for letter in found.letters]


def _change(
    parsed: argparse.Namespace,
    ledger: Ledger,
    ids: Sequence[int],
    done: str,
    change: _Change = ops.retry_letters,
    **how: Any,
) -> int:
    with Progress() as progress:
        changed = change(
            ledger,
            ids,
            by=parsed.by or login_name(),
            why=parsed.why,
            on_each=lambda turn: progress.show(f"{turn:,} of {len(ids):,}"),
            **how,
        )
    if parsed.json:
        print(json.dumps(_as_dict(changed, done)))
    else:
        print(f"{done}: {len(changed.done):,}")
    tell_audit(changed.audit_error)
    if changed.missing:
        numbers = ", ".join(map(str, changed.missing))
        raise RefusedError(f"there is no dead letter {numbers}")
    return 0


def _as_dict(changed: ops.LettersChanged, done: str) -> dict[str, Any]:
    return {
        done: changed.done,
        "missing": changed.missing,
        "by": changed.by,
        "why": changed.why,
        "audit_error": changed.audit_error,
    }


# ---- Editing -----------------------------------------------------------------------------------


def _edited(parsed: argparse.Namespace, message: Message) -> Message:
    """The message, with the typed values in place of its own."""
    if not message.id and parsed.new_id is None:
        raise ConfigError("edit: the message has no id, which it needs; add --id ID")
    typed = {"id": parsed.new_id, "type": parsed.type}
    others: dict[str, Any] = {name: text for name, text in typed.items() if text is not None}
    if parsed.header:
        others["headers"] = {**message.headers, **dict(parsed.header)}
    if parsed.body is not None:
        others["body"] = _read(parsed.body)
    elif not others:
        others["body"] = _from_editor(message)
    return replace(message, **others)


def _read(name: str) -> bytes:
    if name == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(f"--body: {name!r} cannot be read: {error.strerror}") from error


def _from_editor(message: Message) -> bytes:
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
