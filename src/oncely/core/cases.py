"""Cases: commands that stand alike, so that the rules are asked once and answer for all.

Some commands are answered before their records are read: an Acquire for a message of which no
record is known, and a command of a claim whose record is believed to be as the claim last saw it.
The rules are asked about the first of a case. The others get the same answer, with what is their
own in it. A batch has thousands of them, so little is done for each.
"""

from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple, cast

from oncely.core.change import Change, at_time
from oncely.core.commands import (
    Acquire,
    Command,
    Company,
    Complete,
    Doubt,
    Extend,
    Fail,
    Granted,
    Held,
    Outcome,
    Release,
    Written,
)
from oncely.core.record import Claim, Key, Record, State, version_of
from oncely.core.rules import is_too_old, noted

Row = tuple[Any, ...]

_claim = partial(tuple.__new__, Claim)
_record = partial(tuple.__new__, Record)


class Case(NamedTuple):
    """What is written in several records: in all of them the same and, in each, what is its own."""

    change: Change
    """Of the first. Its version and its fields of the names in `own` are those of that one only."""
    own: Sequence[str]
    rows: Sequence[Row]
    """Each a key, the version that is believed to be stored (None: no record), the new version, and
    the values of `own`."""

    def written(
        self, rows: Sequence[Row], former: Sequence[Record] | None, now: float
    ) -> Iterable[Record]:
        """The records of these rows, one or more, after a write at `now` by the store's clock. They
        were `former`; None: there were none.
        """
        if len(rows) == 1 and not self.own:
            key, _, version = rows[0]
            change = self.change._replace(version=version)
            return [change.to(former[0], now) if former else change.to_new(key, now)]
        keys, _, versions, *values = zip(*rows, strict=True)
        if former is None:
            blank = Record(keys[0], State.PROCESSING, 0, 0, now, now)
            columns: dict[str, Any] = {name: repeat(v) for name, v in blank._asdict().items()}
            columns["key"] = keys
        else:
            columns = dict(zip(Record._fields, zip(*former, strict=True), strict=True))
        fields = {name: of for name, of in self.change.fields.items() if name not in self.own}
        columns |= {name: repeat(value) for name, value in at_time(fields, now).items()}
        columns |= {"version": versions, **dict(zip(self.own, values, strict=True))}
        if (leases := columns.pop("lease_s", None)) is not None:
            columns["lease_until"] = [None if value is None else now + value for value in leases]
        return map(_record, zip(*columns.values()))  # noqa: B905 - what repeats has no end.


def terms_of(command: Command, horizon: float | None) -> Hashable:
    """What the answer to a command depends on before its record is read; None where it cannot be
    answered then.
    """
    if isinstance(command, Acquire):
        if command.is_ahead or command.company in (Company.AGAIN, Company.ALONE):
            return None
        is_old = horizon is not None and is_too_old(command, horizon)
        return Acquire, command.lease_s, command.worker, is_old
    if not isinstance(command, Held) or isinstance(command, Doubt):
        return None
    kind, claim = type(command), command.claim
    if isinstance(command, Complete):
        return kind, claim.state, command.result is None
    if isinstance(command, Fail):
        return kind, claim.state, command.final, command.retry_s
    if isinstance(command, Extend):
        return kind, claim.state, command.lease_s
    if isinstance(command, Release) and claim.former is not None:
        # What stood before differs.
        return kind, claim.state, claim.key, claim.version
    return kind, claim.state


def believed_by(command: Command) -> Record | None:
    """The record that the sender of a command believes in; its times are not known."""
    if not isinstance(command, Held):
        return None
    key, fence, version, attempts, _, metadata, state = command.claim
    return Record(key, state, attempts, fence, 0.0, 0.0, metadata=metadata, version=version)


def case_of(change: Change, commands: Sequence[Command]) -> Case:
    """What one or more commands with equal terms write, of which the first writes `change`."""
    if len(commands) == 1:
        command = commands[0]
        if isinstance(command, Held):
            return Case(change, (), [(command.claim.key, command.claim.version, change.version)])
        return Case(change, (), [(command.key, None, change.version)])
    if isinstance(commands[0], Acquire):
        return _case_of_asks(change, cast(Sequence[Acquire], commands))
    held: Any = commands
    claims = [command.claim for command in held]
    versions = [claim.version for claim in claims]
    columns = [[claim.key for claim in claims], versions, [version + 1 for version in versions]]
    own: tuple[str, ...] = ()
    if "metadata" in change.fields:
        own = ("metadata",)
        columns.append([noted(each.claim.metadata, each.error) for each in held])
    elif "result" in change.fields:
        own = ("result",)
        columns.append([each.result for each in held])
    return Case(change, own, [*zip(*columns, strict=True)])


def _case_of_asks(change: Change, asks: Sequence[Acquire]) -> Case:
    keys = [ask.key for ask in asks]
    drawn = [(ask.token, ask.count_from) for ask in asks]
    versions: Iterable[int] = repeat(change.version)
    if drawn.count(drawn[0]) < len(drawn):
        versions = [version_of(*each) for each in drawn]
    kept, marks = [ask.metadata for ask in asks], [ask.fingerprint for ask in asks]
    if _is_one(kept) and _is_one(marks):
        return Case(change, (), [*zip(keys, repeat(None), versions)])
    rows = [*zip(keys, repeat(None), versions, kept, marks)]
    return Case(change, ("metadata", "fingerprint"), rows)


def _is_one(values: Sequence[Any]) -> bool:
    """Whether these are one object: 1 and True are equal."""
    return len({*map(id, values)}) == 1


def answers_of(outcome: Outcome, case: Case, commands: Sequence[Command]) -> Iterable[Outcome]:
    """What each of a case of several is answered, of which the first is answered `outcome`."""
    keys, _, versions, *__ = zip(*case.rows, strict=True)
    if not isinstance(outcome, Granted):
        return map(Written, versions)
    claim = outcome.claim
    kept = map(attrgetter("metadata"), commands)
    same = (claim.fence, claim.attempts, claim.former, claim.state)
    fence, attempts, former, state = map(repeat, same)
    return map(Granted, map(_claim, zip(keys, fence, versions, attempts, former, kept, state)))  # noqa: B905


def cases_of(changes: Iterable[tuple[Key, int | None, Change]]) -> Sequence[Case]:
    """The cases of any changes: those of the same fields are one. Each is given with its key, and
    the version that is believed to be stored.
    """
    found: dict[Hashable, list[tuple[Key, int | None, Change]]] = {}
    for key, believed, change in changes:
        # New records of one consumer at a time, since it is each consumer that has a horizon.
        shape = key.consumer if believed is None else None, *change.fields
        found.setdefault(shape, []).append((key, believed, change))
    return [_differing(these) for these in found.values()]


def _differing(changes: Sequence[tuple[Key, int | None, Change]]) -> Case:
    first = changes[0][2]
    if len(changes) == 1:
        return Case(first, (), [(*changes[0][:2], first.version)])
    rows = [(key, at, change.version, *change.fields.values()) for key, at, change in changes]
    return Case(first, tuple(first.fields), rows)
