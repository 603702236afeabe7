"""`oncely reset` and `oncely forget`: one record by its id, or many by filters."""

import argparse
import getpass
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from oncely import ops
from oncely.cli.ledger_arguments import opened
from oncely.cli.progress import Progress
from oncely.cli.record_commands import one_record, read_filters
from oncely.core.errors import ConfigError
from oncely.core.record import Record
from oncely.core.shown import shown
from oncely.ledger import Ledger

_Change = Callable[..., ops.Changed]

_NAMED = 3


def reset(parsed: argparse.Namespace) -> int:
    """Allow records to run again; return 1 where one is refused."""
    return _change(parsed, "reset", "reset", ops.reset)


def forget(parsed: argparse.Namespace) -> int:
    """Remove records; return 1 where one is refused."""
    return _change(parsed, "forget", "forgotten", ops.forget)


def _change(parsed: argparse.Namespace, verb: str, done: str, change: _Change) -> int:
    with opened(parsed) as ledger:
        records = _chosen(parsed, ledger, verb)
        if not records:
            print("no matching records", file=sys.stderr)
        if len(records) > 1 and not parsed.yes and not _agreed(verb, records):
            if parsed.json:
                print(json.dumps(_as_dict(ops.Changed([], [], "", ""), done)))
            return 1
        with Progress() as progress:
            changed = change(
                ledger,
                records,
                by=parsed.by or login_name(),
                why=parsed.why,
                on_each=lambda turn: progress.show(f"{turn:,} of {len(records):,}"),
            )
    if parsed.json:
        print(json.dumps(_as_dict(changed, done)))
    else:
        _tell(changed, done)
    return int(bool(changed.refused))


def _chosen(parsed: argparse.Namespace, ledger: Ledger, verb: str) -> Sequence[Record]:
    others = [parsed.state, parsed.older_than, parsed.text]
    if parsed.id is not None:
        if any(others):
            raise ConfigError(f"{verb}: an ID takes no filters but --consumer; leave one out")
        return [one_record(ledger, parsed.id, parsed.consumer)]
    if not any([*others, parsed.consumer]):
        raise ConfigError(
            f"{verb}: name an ID, or filters such as --consumer billing --state failed"
        )
    selection = read_filters(parsed)
    if verb == "reset" and not selection.states:
        selection = replace(selection, states=ops.RESETTABLE)
    selected = ops.select(ledger, selection, parsed.limit)
    if selected.more:
        print(f"the first {parsed.limit:,} only; more fit, see --limit", file=sys.stderr)
    return selected.records


def _agreed(verb: str, records: Sequence[Record]) -> bool:
    consumers = sorted({record.key.consumer for record in records})
    names = ", ".join(consumers) if len(consumers) <= _NAMED else f"{len(consumers):,} consumers"
    return agreed(f"{verb} {len(records):,} records of {names}")


def agreed(what: str) -> bool:
    """Whether somebody at the terminal wants that. Raises ConfigError where there is none."""
    what = shown(what)
    if not sys.stdin.isatty():
        raise ConfigError(f"{what}? not a terminal: add --yes to confirm")
    # On stderr: stdout may be read by a program.
    print(f"{what}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() in {"y", "yes"}:
        return True
    print("nothing was changed", file=sys.stderr)
    return False


def login_name() -> str:
    """Who types this."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container may run under a number that no name belongs to.
        return str(os.getuid())


def _tell(changed: ops.Changed, done: str) -> None:
    why = f": {changed.why}" if changed.why else ""
    for key in changed.done:
        print(shown(f"{done} {key.message_id!r} ({key.consumer}) by {changed.by}{why}"))
    for refusal in changed.refused:
        print(shown(f"oncely: {refusal.reason}"), file=sys.stderr)
    if len(changed.done) + len(changed.refused) > 1:
        print(f"{done} {len(changed.done):,}, refused {len(changed.refused):,}", file=sys.stderr)


def _as_dict(changed: ops.Changed, done: str) -> dict[str, Any]:
    return {
        done: [key._asdict() for key in changed.done],
        "refused": [{**key._asdict(), "reason": reason} for key, reason in changed.refused],
        "by": changed.by,
        "why": changed.why,
    }
