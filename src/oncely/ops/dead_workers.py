"""What people say of a worker that is dead: its claims end."""

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from oncely.core.activity import LATE_S
from oncely.core.errors import ConfigError, RefusedError
from oncely.core.record import Key, Record
from oncely.core.shown import span, utc
from oncely.ledger.ledger import Ledger
from oncely.ops.auditing import Changed, Noted
from oncely.ops.decisions import change_keys
from oncely.ops.known import check_kept
from oncely.ops.workers import SeenWorker, left_by, workers


def worker_dead(
    ledger: Ledger, name: str, *, is_sure: bool = False, **noted: Unpack[Noted]
) -> Changed[Key]:
    """End the claims of the worker HOST:PID, as somebody knows that it is dead: each message is in
    doubt at once, and what that worker still writes is refused. Noted as by `reset`.

    Raises RefusedError for one that is alive, unless somebody `is_sure`, and ConfigError where the
    ledger knows none of that name.
    """
    check_kept(ledger)
    # Of one name there may be several, of which one lives: all have pid 1 in their containers.
    named = [each for each in workers(ledger) if each.worker.name == name]
    if not named:
        raise ConfigError(f"{name!r} is not a worker of this ledger; see: oncely workers")
    if live := all(each.is_alive for each in named):
        _check_sure(ledger, named[0], is_sure=is_sure)
    return _end(ledger, left_by(ledger, named, alive=live), noted, name)


def end_claim(
    ledger: Ledger, record: Record, *, is_sure: bool = False, **noted: Unpack[Noted]
) -> Changed[Key]:
    """The same for the claim on one record."""
    name = "its worker"
    for each in workers(ledger):
        if each.worker.number == record.worker is not None:
            name = each.worker.name
            if each.is_alive:
                _check_sure(ledger, each, is_sure=is_sure)
    return _end(ledger, [record], noted, name)


def _check_sure(ledger: Ledger, seen: SeenWorker, *, is_sure: bool) -> None:
    if not is_sure:
        at = seen.worker.seen
        raise RefusedError(
            f"{seen.worker.name} is alive: seen {span(ledger.now() - at)} ago; it is gone if it is "
            f"not seen again until {utc(at + LATE_S)}. If you know that it is dead, add --yes to: "
            f"oncely worker dead {seen.worker.name}"
        )


def _end(ledger: Ledger, found: Sequence[Record], noted: Noted, name: str) -> Changed[Key]:
    records = {record.key: record for record in found}
    why = noted.get("why")
    noted = Noted(**{**noted, "why": f"{name} is dead{f'; {why}' if why else ''}"})

    def end(key: Key, note: Mapping[str, Any]) -> None:
        ledger.end_claim(records[key], **note)

    return change_keys(ledger, [*records], "worker_dead", end, **noted)
