"""The horizon: what is older than the ledger remembers may have been handled, and forgotten."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from oncely.archive.lookup import Archive, Old, Refusal, TooOld
from oncely.core.policy import Policy
from oncely.core.record import Key
from oncely.core.rules import is_too_old
from oncely.handling.around import seconds_since_1970
from oncely.ledger import Ledger
from oncely.spark.sink.rows import Row


def forgotten(
    ledger: Ledger, consumer: str, policy: Policy, rows: Sequence[Row], archive: Archive | None
) -> dict[int, str | Refusal]:
    """The places of those rows that are not to be asked for, and why: the ledger may have known
    their messages. What it still knows is answered from there, however old it is; what the
    archive knows, by its record there.
    """
    # With an archive, also what would run unasked is looked for.
    strict = policy if archive is None else replace(policy, on_too_old="dead_letter")
    # The store's clock decides; it is asked where this machine's says so.
    times = {place: seconds_since_1970(row.time) for place, row in enumerate(rows)}
    sent_at = _too_old(strict, times, time.time())
    if not sent_at:
        return {}
    old = _too_old(strict, sent_at, ledger.now())
    known = ledger.find_many({Key(consumer, rows[place].id) for place in old})
    places = sorted(place for place in old if Key(consumer, rows[place].id) not in known)
    reason = f"too old: older than the retention of {policy.retention}, and not in the ledger"
    if archive is None:
        return dict.fromkeys(places, reason)
    asked = [Old(rows[place].id, sent_at[place], rows[place].fingerprint()) for place in places]
    answers = archive.judge(asked, policy) if asked else []
    refused: dict[int, str | Refusal] = {}
    for place, answer in zip(places, answers, strict=True):
        if isinstance(answer, TooOld):
            if policy.on_too_old != "run":
                refused[place] = f"{reason}, and from before the archive"
        elif answer is not None:
            refused[place] = answer
    return refused


def _too_old(policy: Policy, times: Mapping[int, float | None], now: float) -> dict[int, float]:
    """Those of `times` that are, by their places."""
    return {
        place: at for place, at in times.items() if at is not None and is_too_old(policy, at, now)
    }
