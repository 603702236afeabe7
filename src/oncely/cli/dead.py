"""`oncely dead`: dead letters are listed, shown, and put back into their queue."""

import argparse
import json
import sys
from base64 import b64encode
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rich.table import Table

from oncely.cli.ledger_arguments import opened_transport
from oncely.cli.resetting import Resets, reset_failed
from oncely.cli.tables import aligned, cell, cut, fields_table, folded, new_table, put
from oncely.cli.terminal import moment, shortened, span
from oncely.core.errors import ConfigError, RefusedError, mask_passwords
from oncely.core.message import Message
from oncely.transports.transport import DeadLettered, Transport

_SHOWN = 2_000
"""Characters of a body."""
_NO_LEDGER = (
    "no ledger was named, so no tries begin again: what has spent them will be set aside again, "
    "unless it is retried with --ledger URL --consumer NAME"
)


def list_letters(parsed: argparse.Namespace) -> int:
    """Print the dead letters of a queue."""
    with opened_transport(parsed, only_look=True) as transport:
        letters, more = _first(transport, parsed)
    if parsed.json:
        print(json.dumps({"dead_letters": [_as_dict(letter) for letter in letters], "more": more}))
        return 0
    if not letters:
        print(f"{parsed.queue}: no dead letters", file=sys.stderr)
        return 0
    put(_letters_table(letters), last_gives_way=True)
    if more:
        print(f"the first {parsed.limit:,}; there are more, see --limit", file=sys.stderr)
    return 0


def show(parsed: argparse.Namespace) -> int:
    """Print every dead letter of one message in full; as a rule there is one."""
    with opened_transport(parsed, only_look=True) as transport:
        letters, more = _first(transport, parsed)
    letters = [letter for letter in letters if letter.message.id == parsed.id]
    if not letters:
        raise RefusedError(_not_there(parsed, [parsed.id], more=more))
    if parsed.json:
        found = [_as_dict(letter) | _content(letter.message) for letter in letters]
        print(json.dumps({"dead_letters": found}))
        return 0
    for letter in letters:
        put(_letter_table(letter))
    return 0


def retry(parsed: argparse.Namespace) -> int:
    """Put dead letters back; return 1 where one that was named is not there."""
    if bool(parsed.ids) == parsed.all:
        raise ConfigError("retry: name the IDs of messages, or --all, and not both")
    with opened_transport(parsed, only_look=True) as transport:
        letters, more = _first(transport, parsed)
        if not parsed.all:
            letters = [letter for letter in letters if letter.message.id in parsed.ids]
        # Before they go back: a consumer that is quicker would set them aside again. After a crash
        # in between, the same command does the rest.
        resets = reset_failed(parsed, letters) if parsed.ledger else None
        retried = transport.retry(letters)
    there = {letter.message.id for letter in letters}
    missing = [id_ for id_ in parsed.ids if id_ not in there]
    _tell_retried(parsed, retried, missing, resets)
    if missing:
        raise RefusedError(_not_there(parsed, missing, more=more))
    if parsed.all and more:
        print(f"the first {parsed.limit:,} only; there are more, see --limit", file=sys.stderr)
    return 0


def _tell_retried(
    parsed: argparse.Namespace, retried: int, missing: Sequence[str], resets: Resets | None
) -> None:
    if parsed.json:
        counts = {"retried": retried, "missing": missing}
        print(json.dumps(counts if resets is None else counts | resets.as_dict()))
    else:
        reset = "" if resets is None else f"; reset: {resets.done:,}"
        print(f"put back: {retried:,}{reset}")
    if resets is not None:
        resets.tell_left()
    elif retried:
        print(_NO_LEDGER, file=sys.stderr)


def _first(transport: Transport, parsed: argparse.Namespace) -> tuple[list[DeadLettered], bool]:
    """As many as --limit says, and whether there are more."""
    letters = list(transport.dead_letters(parsed.queue, parsed.limit + 1))
    return letters[: parsed.limit], len(letters) > parsed.limit


def _not_there(parsed: argparse.Namespace, ids: Sequence[str], *, more: bool) -> str:
    names = ", ".join(repr(id_) for id_ in ids)
    among = f" among the first {parsed.limit:,}, see --limit" if more else ""
    return f"{parsed.queue}: no dead letter of {names}{among}"


# ---- In words ----------------------------------------------------------------------------------


def _letters_table(letters: Sequence[DeadLettered]) -> Table:
    table = new_table(folded("id"), folded("type"), aligned("deliveries"), aligned("age"), "reason")
    for letter in letters:
        table.add_row(
            cell(letter.message.id),
            cell(letter.message.type or "-"),
            f"{letter.count:,}",
            _age(letter.message),
            cut(mask_passwords(letter.reason)),
        )
    return table


def _letter_table(letter: DeadLettered) -> Table:
    message = letter.message
    fields = {
        "id": message.id,
        "queue": letter.queue,
        "reason": letter.reason,
        "deliveries": f"{letter.count:,}",
        "type": message.type or "-",
        "source": message.source or "-",
        "time": _moment(message.time),
        "key": message.key or "-",
        "content type": message.content_type,
        "headers": json.dumps(dict(message.headers), ensure_ascii=False),
        "body": _body(message.body),
    }
    return fields_table({name: mask_passwords(value) for name, value in fields.items()})


def _body(body: bytes) -> str:
    text = _text(body)
    return f"{len(body):,} bytes that are no text" if text is None else shortened(text, _SHOWN)


def _age(message: Message) -> str:
    return "-" if message.time is None else span(_now() - message.time.timestamp())


def _moment(time: datetime | None) -> str:
    return "-" if time is None else moment(time.timestamp(), _now())


def _now() -> float:
    return datetime.now(UTC).timestamp()


# ---- As JSON -----------------------------------------------------------------------------------


def _as_dict(letter: DeadLettered) -> dict[str, Any]:
    message = letter.message
    return {
        "id": message.id,
        "queue": letter.queue,
        "reason": mask_passwords(letter.reason),
        "deliveries": letter.count,
        "type": message.type,
        "source": message.source,
        "time": None if message.time is None else message.time.timestamp(),
        "key": message.key,
        "content_type": message.content_type,
    }


def _content(message: Message) -> dict[str, Any]:
    headers = {name: _masked_header(name, value) for name, value in message.headers.items()}
    text = _text(message.body)
    return {
        "headers": headers,
        "body": None if text is None else mask_passwords(text),
        "body_base64": b64encode(message.body).decode() if text is None else None,
    }


def _masked_header(name: str, value: str) -> str:
    # With its name, which says what it is.
    return mask_passwords(f"{name}={value}").removeprefix(f"{name}=")


def _text(body: bytes) -> str | None:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None
