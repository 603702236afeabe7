"""Records: looked for in the order of their ids, as far as that goes in a moment."""

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from oncely._util import clock
from oncely.core.errors import ConfigError, MessageError
from oncely.core.ids import check_id, check_text
from oncely.core.record import Key, Record
from oncely.ledger.ledger import Ledger
from oncely.ops.known import check_known
from oncely.ops.records import Selection, queries
from oncely.stores.store import Look

PATIENCE_S = 0.1
"""How long a search goes on looking, where nothing else is said."""

_AT_ONCE = 1_000
"""Records that are looked at between two looks at the clock."""


class Searched(NamedTuple):
    """What a search has found until it ended."""

    records: Sequence[Record]
    """Those that fit: one whose id is the text that was looked for, then by their ids."""
    looked_at: int
    """How many records were looked at."""
    end: str | None
    """After which id to go on; None: all records were looked at."""


def search(
    ledger: Ledger,
    selection: Selection,
    limit: int = 100,
    *,
    begins: str | None = None,
    after: str | None = None,
    within_s: float = PATIENCE_S,
) -> Searched:
    """The records that fit, in the order of their ids; with `begins`, only those whose ids begin
    so. `after` is the `end` of the search before.

    The search ends as soon as it has found `limit` records, or after `within_s` seconds, but not
    before it has looked at `limit` records: it takes as long in a large ledger as in a small one.
    It may give a few more than `limit`, since the records of one id stay together. A ledger in
    Redis has an order of its own. Raises ConfigError as `select` does, and for a text that no id
    can have.
    """
    for name, text in {"text": selection.text, "begins": begins, "after": after}.items():
        try:
            check_text(text or "", name)
        except MessageError as error:
            raise ConfigError(f"{error}; no id can have it") from error
    fits = queries(selection)
    # A dict has an order, and each key once.
    keys: dict[Key, None] = {}
    with suppress(MessageError):  # A part of an id may be what cannot be an id itself.
        message_id = check_id(begins or selection.text if after is None else None)
        now = ledger.now()
        for record in ledger.of_message(message_id):
            if any(query.holds(record, now) for query in fits):
                keys[record.key] = None
    until = clock.monotonic() + within_s
    looked_at, end = 0, after
    # Where nearly all fit, these are enough.
    size = limit
    while True:
        look = Look(fits, begins or "", end, max(1, limit - len(keys)), size)
        found, some, end = ledger.window(look)
        keys |= dict.fromkeys(found)
        looked_at, size = looked_at + some, _AT_ONCE
        if end is None or len(keys) >= limit or clock.monotonic() >= until:
            break
    if not keys and end is None and selection.consumer is not None:
        check_known(ledger, selection.consumer)
    records = ledger.find_many(keys)
    return Searched([records[key] for key in keys if key in records], looked_at, end)
