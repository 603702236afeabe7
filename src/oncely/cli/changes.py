"""`oncely reset` and `oncely forget`: one record by its id, or many by filters; and `settle`."""

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
from oncely.cli.loading import load_probe
from oncely.cli.progress import Progress
from oncely.cli.record_commands import one_record, read_filters
from oncely.core.errors import ConfigError
from oncely.core.record import Record
from oncely.core.shown import shown
from oncely.ledger import Ledger

_Change = Callable[..., ops.Changed]

_NAMED = 3


def reset(parsed: argparse.Namespace) -> int:
    """Allow records to run again; return 1 if one is refused."""
    return _change(parsed, "reset", "reset", ops.reset)


def forget(parsed: argparse.Namespace) -> int:
    """Remove records; return 1 if one is refused."""
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
    return _told(parsed, changed, done)


def settle(parsed: argparse.Namespace) -> int:
    """Say of a message in doubt whether its effect has happened, or have a probe say so; return 1
    where that is refused, or the probe does not know.
    """
    probe = None if parsed.probe is None else load_probe(parsed.probe)
    with opened(parsed) as ledger:
        record = one_record(ledger, parsed.id, parsed.consumer)
        note = {"by": parsed.by or login_name(), "why": parsed.why}
        if probe is not None:
            return _probed(parsed, ops.probe(ledger, record, probe, **note))
        decide = ops.happened if parsed.happened else ops.not_happened
        changed = decide(ledger, [record], **note)
    return _told(parsed, changed, "completed" if parsed.happened else "reset")


def _probed(parsed: argparse.Namespace, found: ops.Probed) -> int:
    done = "completed" if found.finding == "happened" else "reset"
    if parsed.json:
        told = {"finding": found.finding, "error": found.error}
        print(json.dumps(_as_dict(found.changed, done) | told))
    elif found.finding == "unknown":
        error = "" if found.error is None else f": {found.error}"
        print(shown(f"oncely: the probe does not know{error}"), file=sys.stderr)
    else:
        _tell(found.changed, done)
    tell_audit(found.changed.audit_error)
    return int(not found.changed.done)


def run_now(parsed: argparse.Namespace) -> int:
    """Make a waiting retry due at once; return 1 where that is refused."""
    return _change_waiting(parsed, ops.run_now, "due now")


def cancel(parsed: argparse.Namespace) -> int:
    """Make a waiting retry a dead letter; return 1 where that is refused."""
    return _change_waiting(parsed, ops.cancel, "cancelled")


def _change_waiting(parsed: argparse.Namespace, change: _Change, done: str) -> int:
    with opened(parsed) as ledger:
        key = ops.waiting_key(ledger, parsed.id, parsed.consumer)
        changed = change(ledger, [key], by=parsed.by or login_name(), why=parsed.why)
    return _told(parsed, changed, done)


def _told(parsed: argparse.Namespace, changed: ops.Changed, done: str) -> int:
    if parsed.json:
        print(json.dumps(_as_dict(changed, done)))
    else:
        _tell(changed, done)
    tell_audit(changed.audit_error)
    return int(bool(changed.refused))


def tell_audit(error: str | None) -> None:
    """Say where the counts of a change are not in the audit."""
    if error is not None:
        told = f"oncely: done, but the audit does not say how many were changed: {error}"
        print(shown(told), file=sys.stderr)


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
        print(f"only the first {parsed.limit:,}; more records match, see --limit", file=sys.stderr)
    return selected.records


def _agreed(verb: str, records: Sequence[Record]) -> bool:
    consumers = sorted({record.key.consumer for record in records})
    names = ", ".join(consumers) if len(consumers) <= _NAMED else f"{len(consumers):,} consumers"
    return agreed(f"{verb} {len(records):,} records of {names}")


def agreed(what: str) -> bool:
    """Ask at the terminal whether to do that. Raises ConfigError if stdin is not a terminal."""
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
    """The login name of the user."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container may run under a user id that has no name.
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
        done.replace(" ", "_"): [key._asdict() for key in changed.done],
        "refused": [{**key._asdict(), "reason": reason} for key, reason in changed.refused],
        "by": changed.by,
        "why": changed.why,
        "audit_error": changed.audit_error,
    }
