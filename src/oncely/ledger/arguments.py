"""What callers ask for, checked, as commands; and the answers as callers get them."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from oncely._util.chance import CHANCE, Process
from oncely.core.commands import (
    Acquire,
    Command,
    Company,
    Extend,
    Granted,
    Handled,
    Held,
    Outcome,
    Refused,
    Release,
    WriteOutcome,
    Written,
)
from oncely.core.durations import Duration, lease_seconds
from oncely.core.errors import FencedError, MessageError, RefusedError
from oncely.core.ids import check_fingerprint
from oncely.core.message import Message, check_message
from oncely.core.policy import Finding, Policy
from oncely.core.record import (
    BIRTH_BITS,
    Claim,
    Key,
    Record,
    State,
    birth_of,
    check_keys,
)
from oncely.core.state_words import word_with_lease
from oncely.core.turn import Turn
from oncely.core.waiting import WaitingMessage

_START_BITS = 23
"""A record counts its writes from a random number in the lower half of the range; the upper half is
left for counting.
"""
_MOST_LEVELS = 30
"""MariaDB's JSON ends at 32 levels, and the text of an error adds one."""
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
"""NUL in JSON text, and not a backslash that is followed by these letters."""


Metadata = Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None
"""One for all records, or one for each."""


# ---- Claims ------------------------------------------------------------------------------------


def new_token() -> int:
    """A random token for one Acquire and its repetitions, so that no other Acquire has the same."""
    return CHANCE.getrandbits(BIRTH_BITS)


def acquire_for(turn: Turn, key: Key, policy: Policy, lease_s: float | None) -> Acquire:
    """The command that asks for a turn's message. Raises MessageError for what is not usable."""
    taken, drawn = turn.taken, CHANCE.getrandbits(BIRTH_BITS + _START_BITS)
    # One that was set aside and waits again is one that somebody wants to run, however old.
    sent_at = turn.sent_at if taken is None or not taken.reason else None
    return Acquire(
        key,
        policy,
        lease_s,
        drawn >> _START_BITS if turn.token is None else turn.token,
        None if turn.fingerprint is None else check_fingerprint(turn.fingerprint),
        _metadata(turn.metadata) if turn.metadata else None,
        None,
        None,
        drawn % (1 << _START_BITS),
        sent_at,
        taken is not None or turn.is_due,
        turn.company,
        turn.claims_ahead,
        Process.number,
    )


def acquire_again(turn: Turn, finding: Finding, doubt: Record) -> Acquire:
    """The command that asks once more, with what a probe has found out about the record."""
    assert turn.command is not None  # noqa: S101 - it was asked for before.
    token = new_token() if turn.token is None else turn.token
    return turn.command._replace(token=token, finding=finding, found_at=doubt.fence)


def to_claim(
    keys: Sequence[Key],
    lease: Duration | None,
    policy: Policy,
    fingerprints: Sequence[str | None] | None = None,
    metadata: Metadata = None,
    finding: Finding | None = None,
    in_doubt: Record | None = None,
    token: int | Sequence[int] | None = None,
    sent_at: Sequence[float | None] | None = None,
) -> Sequence[Acquire]:
    """One for each key. Raises MessageError and ConfigError for what is not usable, and ValueError
    where anything is not given once for each key.
    """
    lease_s = policy.lease_s if lease is None else lease_seconds(lease)
    check_keys(keys)
    count, drawn = len(keys), CHANCE.getrandbits(_START_BITS)
    if metadata is None or isinstance(metadata, Mapping):
        kept: Sequence[Any] = [_metadata(metadata)] * count
    else:
        kept = [*map(_metadata, metadata)]
    columns = (
        _each("token", _tokens(keys, new_token() if token is None else token), count),
        _each("fingerprint", fingerprints and [*map(check_fingerprint, fingerprints)], count),
        _each("metadata", kept, count),
        _each("sent_at", sent_at, count),
    )
    found_at = None if in_doubt is None else in_doubt.fence
    others = (False, Company.NONE, False, Process.number)
    return [
        Acquire(*(key, policy, lease_s, own, mark, values, finding, found_at, drawn, sent), *others)
        for key, own, mark, values, sent in zip(keys, *columns, strict=True)
    ]


def _each(name: str, values: Sequence[Any] | None, count: int) -> Sequence[Any]:
    """One value for each key; None for all where none are given."""
    if values is None:
        return [None] * count
    if len(values) != count:
        raise ValueError(f"{name}: {len(values)} for {count} keys; give one for each key")
    return values


def _tokens(keys: Sequence[Key], token: int | Sequence[int]) -> Sequence[int]:
    """The token of each key: as given, or one for all. A key that is given twice gets two tokens,
    so that only one of them is granted.
    """
    if not isinstance(token, int):
        return [*map(birth_of, token)]
    if len(set(keys)) == len(keys):
        return [birth_of(token)] * len(keys)
    asked: Counter[Key] = Counter()
    tokens = []
    for key in keys:
        # Two apart: the birth after a token is that of a claim that was released.
        tokens.append(birth_of(token + 2 * asked[key]))
        asked[key] += 1
    return tokens


def _metadata(value: Mapping[str, Any] | None) -> Any:
    """As `json_value`, of values that every store can keep: PostgreSQL's jsonb is strict."""
    if not value:
        return None
    kept = json_value(value)
    if _depth(kept) > _MOST_LEVELS:
        raise MessageError(f"metadata is more than {_MOST_LEVELS} levels deep")
    text = json.dumps(kept, ensure_ascii=False)
    if _NUL.search(text):
        raise MessageError("metadata with NUL")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MessageError("metadata with a lone surrogate") from error
    return kept


def _depth(value: Any) -> int:
    match value:
        case dict():
            return 1 + max(map(_depth, value.values()), default=0)
        case list():
            return 1 + max(map(_depth, value), default=0)
        case _:
            return 0


# ---- Writes, and answers -----------------------------------------------------------------------


class Write(NamedTuple):
    """A command of a claim's holder, and the messages that are kept or removed in its commit."""

    command: Held
    kept: Sequence[WaitingMessage] = ()
    is_over: bool = False
    """Whether the waiting retry of the message is removed."""
    removed: Sequence[WaitingMessage] = ()
    """Messages to remove from queues of the same database, as far as they are still held."""

    @property
    def has_rows(self) -> bool:
        """Whether anything is kept or removed."""
        return bool(self.kept or self.is_over or self.removed)


def to_extend(claims: Sequence[Claim], lease: Duration) -> Sequence[Command]:
    """The commands that renew these leases. Raises ConfigError for what is not one."""
    lease_s = lease_seconds(lease)
    return [Extend(claim, lease_s) for claim in claims]


def to_give_back(outcome: Outcome) -> Command | None:
    """The command that gives back a claim whose asker has gone; None where there is no claim."""
    if isinstance(outcome, Granted | Handled):
        return Release(outcome.claim)
    return None


def json_value(value: Any) -> Any:
    """`value` as it will be read back. Raises MessageError where it is not JSON."""
    if value is None:
        return None
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise MessageError(f"this cannot be kept as JSON: {error}") from error


def sent_message(content: Any, message_id: str, key: str | None = None) -> Message:
    """The message to send: `content` itself where it is a Message, else one with it as the body.
    Raises MessageError where that is unusable.
    """
    if isinstance(content, Message):
        return check_message(content if key is None else replace(content, key=key))
    return check_message(Message(message_id, _body(content), key=key))


def _body(content: Any) -> bytes:
    if isinstance(content, bytes):
        return content
    text = content if isinstance(content, str) else json.dumps(json_value(content))
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise MessageError("body with a lone surrogate") from error


def raise_if_fenced(outcome: WriteOutcome) -> Written:
    """The outcome of a write that was stored. Raises FencedError where it was not."""
    if isinstance(outcome, Written):
        return outcome
    newest = "gone" if outcome.record is None else f"at fence {outcome.record.fence}"
    raise FencedError(f"the claim is not the newest: its record is {newest}")


def raise_if_refused(key: Key, outcome: Outcome, refusal: str) -> Record | None:
    """The record as it was written. Raises RefusedError, whose text ends with `refusal`."""
    if isinstance(outcome, Refused):
        record = outcome.record
        state = "not in the ledger" if record is None else word_with_lease(record)
        raise RefusedError(f"{key.message_id!r} ({key.consumer}) is {state}: {refusal}")
    return cast(Written, outcome).record


def renewed(claim: Claim, outcome: WriteOutcome, state: State | None = None) -> Claim:
    """The claim as it is now; `state` is what a write makes of its record, if it changes that.
    Raises FencedError where nothing was written.
    """
    written = raise_if_fenced(outcome)
    if written.version is None:
        return claim
    if written.record is not None:
        # It was there before. Of a record that is handled by now, nothing else may be believed: a
        # heartbeat that asks once more would give it a lease.
        state = written.record.state
    return claim._replace(version=written.version, state=state or claim.state)
