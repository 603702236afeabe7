"""What callers ask, checked and put as requests before anything is sent; and what they are told."""

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any, NamedTuple, cast

from oncely.core.commands import (
    Ask,
    Command,
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
from oncely.core.record import Claim, Key, Record, birth_of, check_keys
from oncely.core.waiting import WaitingMessage

_START_BITS = 23
"""The other half of what counts a record's writes is left to count them."""
_MOST_LEVELS = 30
"""MariaDB's JSON ends at 32, and an error's text is one."""
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
"""NUL in JSON text, and not a backslash that is followed by these letters."""


Metadata = Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None
"""Of all records, or of each."""


class Write(NamedTuple):
    """What is said with a claim, and what is kept with that, or nothing is."""

    command: Held
    kept: Sequence[WaitingMessage] = ()
    is_over: bool = False
    """Whether what waits to try the message again is to wait no more."""
    removed: Sequence[WaitingMessage] = ()
    """What is done with in a queue of the same database, if it is held still."""


class Request(NamedTuple):
    """A command for one key, and the record that it is believed to find."""

    key: Key
    command: Command
    believed: Record | None = None


def new_token() -> int:
    """What tells one asking, with all its repetitions, from every other."""
    return birth_of(random.getrandbits(64))


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
    *,
    taken: Sequence[bool] | None = None,
) -> list[Request]:
    """One for each key. Raises MessageError and ConfigError for what is not usable."""
    lease_s = policy.lease_s if lease is None else lease_seconds(lease)
    found_at = None if in_doubt is None else in_doubt.fence
    given = (
        repeat(None, len(keys)) if fingerprints is None else map(check_fingerprint, fingerprints)
    )
    kept = _each(metadata, len(keys))
    times = repeat(None, len(keys)) if sent_at is None else sent_at
    are_taken = [False] * len(keys) if taken is None else taken
    check_keys(keys)
    tokens = _tokens(keys, new_token() if token is None else token)
    start = random.getrandbits(_START_BITS)
    return [
        Request(
            key,
            Ask(
                key, policy, lease_s, own, fingerprint, each, finding, found_at, start, at, is_taken
            ),
        )
        for key, own, fingerprint, each, at, is_taken in zip(
            keys, tokens, given, kept, times, are_taken, strict=True
        )
    ]


def _tokens(keys: Sequence[Key], token: int | Sequence[int]) -> Iterable[int]:
    """Each one's own, or one token for all, as stores write what is alike the fastest; but of a key
    that stands twice only one is to be granted.
    """
    if not isinstance(token, int):
        return map(birth_of, token)
    if len(set(keys)) == len(keys):
        return repeat(birth_of(token), len(keys))
    asked: Counter[Key] = Counter()
    tokens = []
    for key in keys:
        # Two apart: the birth after a token is that of a claim that was released.
        tokens.append(birth_of(token + 2 * asked[key]))
        asked[key] += 1
    return tokens


def to_write(command: Held) -> Request:
    """Of the holder of a claim, who believes that the record is as the claim last saw it."""
    return Request(command.claim.key, command, command.claim.record)


def to_give_back(outcome: Outcome) -> Request | None:
    """What takes back a right that its asker did not live to see."""
    if isinstance(outcome, Granted | Handled):
        return to_write(Release(outcome.claim))
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
    """What is sent: the message itself or, of anything else, one with that as its body.
    Raises MessageError for what cannot be one.
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


def _each(metadata: Metadata, count: int) -> Iterable[Any]:
    if metadata is None or isinstance(metadata, Mapping):
        return repeat(_metadata(metadata) if metadata else None, count)
    return [_metadata(value) if value else None for value in metadata]


def _metadata(value: Mapping[str, Any]) -> Any:
    """As `json_value`, and such that every store can keep it: PostgreSQL's jsonb is strict."""
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


def raise_if_fenced(outcome: WriteOutcome) -> Record | None:
    """The record as it was written. Raises FencedError where it was not."""
    if isinstance(outcome, Written):
        return outcome.record
    newest = "gone" if outcome.record is None else f"at fence {outcome.record.fence}"
    raise FencedError(f"the claim is not the newest: its record is {newest}")


def raise_if_refused(key: Key, outcome: Outcome, refusal: str) -> Record | None:
    """The record as it was written. Raises RefusedError, which ends in `refusal`."""
    if isinstance(outcome, Refused):
        state = "not in the ledger" if outcome.record is None else outcome.record.state.word
        raise RefusedError(f"{key.message_id!r} ({key.consumer}) is {state}: {refusal}")
    return cast(Written, outcome).record


def renewed(claim: Claim, outcome: WriteOutcome) -> Claim:
    """The claim as it now stands. Raises FencedError where it was not written."""
    record = raise_if_fenced(outcome)
    return claim if record is None else claim._replace(record=record)
