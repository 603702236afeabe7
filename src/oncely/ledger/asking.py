"""Asking: what is asked of a ledger about messages, checked before anything is sent."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any, TypeVar

from oncely._util.chance import CHANCE
from oncely.core.commands import Ask, Command, Company
from oncely.core.durations import Duration, lease_seconds
from oncely.core.errors import MessageError
from oncely.core.ids import check_fingerprint
from oncely.core.policy import Finding, Policy
from oncely.core.record import BIRTH_BITS, Key, Record, birth_of, check_key, check_keys
from oncely.core.turn import Turn
from oncely.ledger.writes import json_value

T = TypeVar("T")
_ASK = partial(tuple.__new__, Ask)
"""Makes an Ask of its fields, in half the time."""

_NOT_TAKEN = _NOT_AHEAD = False
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


def new_token() -> int:
    """A random token for one Ask and its repetitions, so that no other Ask has the same."""
    return CHANCE.getrandbits(BIRTH_BITS)


def to_ask(
    key: Key,
    lease: Duration | None,
    policy: Policy,
    fingerprint: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    finding: Finding | None = None,
    in_doubt: Record | None = None,
    token: int | None = None,
    sent_at: float | None = None,
) -> Ask:
    """The command of one call. Raises MessageError and ConfigError for what is not usable."""
    return Ask(
        check_key(key),
        policy,
        policy.lease_s if lease is None else lease_seconds(lease),
        new_token() if token is None else birth_of(token),
        check_fingerprint(fingerprint),
        _metadata(metadata),
        finding,
        None if in_doubt is None else in_doubt.fence,
        CHANCE.getrandbits(_START_BITS),
        sent_at,
    )


def ask_for(turn: Turn, key: Key, policy: Policy, lease_s: float | None) -> Ask:
    """The command that asks for a turn's message. Raises MessageError for what is not usable."""
    taken, drawn = turn.taken, CHANCE.getrandbits(BIRTH_BITS + _START_BITS)
    # One that was set aside and waits again is one that somebody wants to run, however old.
    sent_at = turn.sent_at if taken is None or not taken.reason else None
    return Ask(
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
        taken is not None,
        turn.company,
        turn.claims_ahead,
    )


def ask_again(turn: Turn, finding: Finding, doubt: Record) -> Ask:
    """The command that asks once more, with what a probe has found out about the record."""
    assert turn.command is not None  # noqa: S101 - it was asked for before.
    token = new_token() if turn.token is None else turn.token
    return turn.command._replace(token=token, finding=finding, found_at=doubt.fence)


def to_claim(
    keys: Sequence[Key],
    lease: Duration | None,
    policy: Policy,
    fingerprints: Sequence[str | None] | None,
    metadata: Metadata,
    finding: Finding | None,
    in_doubt: Record | None,
    token: int | Sequence[int] | None = None,
    sent_at: Sequence[float | None] | None = None,
) -> Sequence[Command]:
    """One for each key. Raises MessageError and ConfigError for what is not usable, and ValueError
    where anything is not given once for each key.
    """
    lease_s = policy.lease_s if lease is None else lease_seconds(lease)
    check_keys(keys)
    count = len(keys)
    if metadata is None or isinstance(metadata, Mapping):
        kept: Iterable[Any] = repeat(_metadata(metadata), count)
    else:
        kept = _each("metadata", [*map(_metadata, metadata)], count)
    columns = (
        keys,
        repeat(policy, count),
        repeat(lease_s, count),
        _each("token", _tokens(keys, new_token() if token is None else token), count),
        _each("fingerprint", fingerprints and [*map(check_fingerprint, fingerprints)], count),
        kept,
        repeat(finding, count),
        repeat(None if in_doubt is None else in_doubt.fence, count),
        repeat(CHANCE.getrandbits(_START_BITS), count),
        _each("sent_at", sent_at, count),
        repeat(_NOT_TAKEN, count),
        repeat(Company.NONE, count),
        repeat(_NOT_AHEAD, count),
    )
    return [*map(_ASK, zip(*columns, strict=False))]


def _each(name: str, values: Sequence[T] | None, count: int) -> Iterable[T | None]:
    """One value for each key; None for all where none are given."""
    if values is None:
        return repeat(None, count)
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
