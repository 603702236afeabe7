"""Asking: what is asked of a ledger about messages, checked before anything is sent."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from oncely._util.chance import CHANCE
from oncely.core.commands import Ask
from oncely.core.durations import Duration, lease_seconds
from oncely.core.errors import MessageError
from oncely.core.ids import check_fingerprint
from oncely.core.policy import Finding, Policy
from oncely.core.record import Key, Record, birth_of, check_keys
from oncely.engine.alike_requests import AlikeAsks
from oncely.engine.request import Request, json_value, new_token

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
) -> Sequence[Request]:
    """One for each key. Raises MessageError and ConfigError for what is not usable, and ValueError
    where anything is not given once for each key.
    """
    lease_s = policy.lease_s if lease is None else lease_seconds(lease)
    # Outcomes are made of the keys when somebody looks at them: by then the caller's list may hold
    # others.
    keys = [*keys]
    check_keys(keys)
    # What is the same for all is told once: stores write equal values faster.
    same: dict[str, Any] = {"count_from": CHANCE.getrandbits(_START_BITS), "finding": finding}
    columns: dict[str, Sequence[Any]] = {}
    if in_doubt is not None:
        same["found_at"] = in_doubt.fence
    if fingerprints is not None:
        columns["fingerprint"] = [*map(check_fingerprint, fingerprints)]
    if metadata is not None and not isinstance(metadata, Mapping):
        columns["metadata"] = [_metadata(value) for value in metadata]
    else:
        same["metadata"] = _metadata(metadata)
    if sent_at is not None:
        columns["sent_at"] = [*sent_at]
    if taken is not None:
        columns["is_taken"] = taken
    tokens = _tokens(keys, new_token() if token is None else token)
    if isinstance(tokens, int):
        same["token"] = tokens
    else:
        columns["token"] = tokens
    for name, column in columns.items():
        if len(column) != len(keys):
            raise ValueError(f"{name}: {len(column)} for {len(keys)} keys; give one for each key")
    if not keys:
        return []
    firsts = {name: column[0] for name, column in columns.items()}
    first = Ask(keys[0], policy, lease_s, **same, **firsts)
    return [Request(keys[0], first)] if len(keys) == 1 else AlikeAsks(keys, first, columns)


def _tokens(keys: Sequence[Key], token: int | Sequence[int]) -> int | Sequence[int]:
    """The token of each key: as given, or one for all. A key that is given twice gets two tokens,
    so that only one of them is granted.
    """
    if not isinstance(token, int):
        return [*map(birth_of, token)]
    if len(set(keys)) == len(keys):
        return birth_of(token)
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
