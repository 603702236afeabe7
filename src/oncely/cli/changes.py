"""`oncely settle`, `retry`, `discard`, `forget` and `erase`: decisions about messages."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from oncely import ops
from oncely.cli import options, values
from oncely.cli.options import Note
from oncely.cli.records import one_record
from oncely.cli.terminal import Progress, agreed, put_json, say, tell_audit, words
from oncely.core.errors import ConfigError, RefusedError
from oncely.core.record import Key
from oncely.core.shown import shown
from oncely.core.state_words import RESETTABLE, STATES

if TYPE_CHECKING:
    from oncely.core.record import Record
    from oncely.ledger.ledger import Ledger

_NAMED = 3
_IN_DOUBT_NOW = (
    "in doubt now: under on_in_doubt = retry, a message runs again when a worker of its consumer "
    "takes it from the ledger, or its sender delivers it again; under hold: oncely settle"
)


def _one_record_options(command: options.Command) -> options.Command:
    return options.bundled(
        command, options.message_id, options.consumer(), options.note, options.open_ledger
    )


def _many_options(states: Sequence[str]) -> Callable[[options.Command], options.Command]:
    """A record by its ID, or several by filters."""
    most = options.limit(options.MANY)
    return lambda command: options.bundled(
        command,
        options.optional_message_id,
        options.filters(states),
        most,
        options.yes,
        options.note,
        options.open_ledger,
    )


@options.command("retry", "oncely retry --consumer billing --state failed --why 'fixed in 2.1'")
@_many_options(RESETTABLE)
def retry(ledger: "Ledger", message_id: str | None, filters: "ops.Selection", **typed: Any) -> int:
    """Retry messages that failed, are in doubt, or wait for their retry: at once if the ledger has
    the message, waiting or as a dead letter, else as soon as its sender sends it again. The older
    name of the command is reset.
    """
    consumer = filters.consumer
    has_none = message_id is not None and not ops.find(ledger, message_id, consumer)
    # It may wait, and was never tried: behind another of its ordering key, say.
    if has_none and (keys := ops.waiting_keys(ledger, message_id or "", consumer)):
        changed = ops.retry(ledger, [_one(keys)], **typed["note"])
        return _told(changed, "retried", as_json=typed["as_json"])
    typed |= {"ledger": ledger, "message_id": message_id, "filters": filters}
    return _change("retry", "retried", ops.reset, RESETTABLE, **typed)


@options.command("forget", "oncely forget order-17 --consumer billing --why 'sent by mistake'")
@_many_options(tuple(STATES))
def forget(filters: "ops.Selection", **typed: Any) -> int:
    """Remove records that no worker is processing; the next delivery is treated as new, and so is a
    message that waits in the ledger, which stays there.
    """
    return _change("forget", "forgotten", ops.forget, (), filters=filters, **typed)


@options.command("erase", "oncely erase order-17 --consumer billing --why 'asked for by mail'")
@options.message_id
@options.option("--consumer", values.CONSUMER, "whose message it is", required=True)
@options.note
@options.open_ledger
def erase(ledger: "Ledger", message_id: str, consumer: str, note: Note, as_json: bool) -> None:
    """Remove everything that is kept of one message, for people who ask to be forgotten: its
    record and result, waiting copies, dead letters, its id in the audit. Says what was found.
    """
    found, audit_error = ops.erase(ledger, Key(consumer, message_id), **note)
    if as_json:
        put_json({"erased": found._asdict(), "total": sum(found), "audit_error": audit_error})
    else:
        kept = [f"{words(name)} {count:,}" for name, count in found._asdict().items() if count]
        print(f"erased: {', '.join(kept)}" if kept else "nothing is kept of it")
    tell_audit(audit_error)


@click.group("worker", cls=options.Commands, no_args_is_help=False)
def worker() -> None:
    """Say that a worker is dead; `oncely workers` lists them."""


@options.command("dead", "oncely worker dead shop-2:4711 --why 'its node is gone'", worker)
@click.argument("name", metavar="HOST:PID", help="the worker, as oncely workers shows it")
@options.sure
@options.note
@options.open_ledger
def worker_dead(ledger: "Ledger", name: str, is_sure: bool, note: Note, as_json: bool) -> int:
    """End the claims of a worker that is dead, at once, and not with their leases. What it may
    still write is refused.
    """
    changed = ops.worker_dead(ledger, name, is_sure=is_sure, **note)
    code = _told(changed, "ended", as_json=as_json)
    if not as_json:
        print(_IN_DOUBT_NOW if changed.done else shown(f"{name} held no claims"))
    return code


def _change(
    verb: str,
    done: str,
    change: "Callable[..., ops.Changed[Key]]",
    states: Sequence[str],
    *,
    ledger: "Ledger",
    message_id: str | None,
    filters: "ops.Selection",
    limit: int,
    yes: bool,
    note: Note,
    as_json: bool,
) -> int:
    """Change records; return 1 if one is refused, or if the user answers no. `states` are those to
    look in where no --state is typed.
    """
    others = [filters.states, filters.older_than, filters.text]
    if message_id is not None and any(others):
        raise ConfigError(f"{verb}: an ID takes no filters but --consumer; leave one out")
    if message_id is None and not any([*others, filters.consumer]):
        raise ConfigError(
            f"{verb}: name an ID, or filters such as --consumer billing --state failed"
        )
    if message_id is not None:
        records: Sequence[Record] = [one_record(ledger, message_id, filters.consumer)]
    else:
        selection = replace(filters, states=filters.states or states)
        selected = ops.select(ledger, selection, limit)
        records = selected.records
        if selected.more:
            say(f"only the first {limit:,}; more records match, see --limit")
    if not records:
        say("no matching records")
    names = sorted({record.key.consumer for record in records})
    whose = ", ".join(names) if len(names) <= _NAMED else f"{len(names):,} consumers"
    many = len(records) > 1 and not yes
    if many and not agreed(f"{verb} {len(records):,} records of {whose}"):
        if as_json:
            put_json(_as_dict(ops.Changed([], [], "", ""), done))
        return 1
    with Progress() as progress:
        changed = change(ledger, records, on_each=progress.counter(len(records)), **note)
    return _told(changed, done, as_json=as_json)


@options.command("settle", "oncely settle order-17 --happened --why 'it is on the bill'")
@options.flag("--happened", "it has: the message is completed, and nothing of it runs again")
@options.flag("--not-happened", "it has not: the message is retried")
@options.option(
    "--probe",
    "module:function",
    "ask this function, as a policy's on_in_doubt, importable from the current folder",
)
@options.flag("--worker-is-dead", "first end the claim of a worker that is dead, at once")
@options.sure
@_one_record_options
def settle(
    ledger: "Ledger",
    message_id: str,
    consumer: str | None,
    happened: bool,
    not_happened: bool,
    probe: str | None,
    worker_is_dead: bool,
    is_sure: bool,
    note: Note,
    as_json: bool,
) -> int:
    """Say of a message in doubt whether its effect has happened."""
    from oncely.cli.loading import load_probe

    if sum((happened, not_happened, probe is not None)) != 1:
        raise ConfigError("settle: add --happened, --not-happened or --probe, and one of them only")
    asked = None if probe is None else load_probe(probe)
    record = one_record(ledger, message_id, consumer)
    if worker_is_dead:
        ended = ops.end_claim(ledger, record, is_sure=is_sure, **note)
        if ended.refused:
            return _told(ended, "ended", as_json=as_json)
    if asked is not None:
        return _probed(ops.probe(ledger, record, asked, **note), as_json=as_json)
    decide = ops.happened if happened else ops.not_happened
    return _told(decide(ledger, [record], **note), "settled", as_json=as_json)


def _probed(found: "ops.Probed", *, as_json: bool) -> int:
    """Report what a probe has found; return 1 where it does not know, or that is refused."""
    if as_json:
        told = {"finding": found.finding, "error": found.error}
        put_json(_as_dict(found.changed, "settled") | told)
    elif found.finding == "unknown":
        error = "" if found.error is None else f": {found.error}"
        say(f"oncely: the probe does not know{error}")
    else:
        _tell(found.changed, "settled")
    tell_audit(found.changed.audit_error)
    return int(not found.changed.done)


@options.command("discard", "oncely discard order-21 --why 'withdrawn'")
@_one_record_options
def discard(
    ledger: "Ledger", message_id: str, consumer: str | None, note: Note, as_json: bool
) -> int:
    """Make a dead letter of a message that waits for its retry."""
    keys = ops.waiting_keys(ledger, message_id, consumer)
    if not keys:
        of = "" if consumer is None else f" ({consumer})"
        raise RefusedError(
            f"{message_id!r}{of} does not wait for a retry; to remove a dead letter, type: "
            "oncely dead discard NUMBER"
        )
    changed = ops.discard_waiting(ledger, [_one(keys)], **note)
    return _told(changed, "discarded", as_json=as_json)


def _one(keys: "Sequence[Key]") -> "Key":
    """The only one of these, of one message id."""
    if len(keys) > 1:
        whose = ", ".join(key.consumer for key in keys)
        raise ConfigError(f"{keys[0].message_id!r} waits for {whose}; name one with --consumer")
    return keys[0]


def _told(changed: "ops.Changed[Key]", done: str, *, as_json: bool) -> int:
    """Report a change; return 1 where some was refused."""
    if as_json:
        put_json(_as_dict(changed, done))
    else:
        _tell(changed, done)
    tell_audit(changed.audit_error)
    return int(bool(changed.refused))


def _tell(changed: "ops.Changed[Key]", done: str) -> None:
    why = f": {changed.why}" if changed.why else ""
    for key in changed.done:
        step = f"; {step}" if (step := changed.next_steps.get(key)) else ""
        print(shown(f"{done} {key.message_id!r} ({key.consumer}) by {changed.by}{why}{step}"))
    for refusal in changed.refused:
        say(f"oncely: {refusal.reason}")
    if len(changed.done) + len(changed.refused) > 1:
        say(f"{done} {len(changed.done):,}, refused {len(changed.refused):,}")


def _as_dict(changed: "ops.Changed[Key]", done: str) -> dict[str, Any]:
    return {
        done: [{**key._asdict(), "next": changed.next_steps.get(key)} for key in changed.done],
        "refused": [{**key._asdict(), "reason": reason} for key, reason in changed.refused],
        "by": changed.by,
        "why": changed.why,
        "audit_error": changed.audit_error,
    }
