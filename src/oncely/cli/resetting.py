"""The records of dead letters: what has failed is reset, and what is left as it is is told."""

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from oncely import ops
from oncely.cli.changes import login_name
from oncely.cli.ledger_arguments import opened
from oncely.cli.progress import Progress
from oncely.core.errors import ConfigError, MessageError
from oncely.core.record import Key
from oncely.core.rules import Standing, standing
from oncely.core.shown import shown
from oncely.ledger import Ledger
from oncely.transports.transport import DeadLettered

_FAILED = (Standing.FAILED, Standing.EXHAUSTED)
_LEFT: Mapping[Standing, str] = {
    Standing.ABSENT: "no record; its next delivery is treated as new",
    Standing.HELD: "being processed",
    Standing.IN_DOUBT: "in doubt, and may have had its effect; look first, then: oncely reset ID",
    Standing.HANDLED: "handled, and has messages to be sent",
    Standing.COMPLETED: "completed; its delivery is a duplicate",
}


class Resets(NamedTuple):
    """What became of the records of dead letters."""

    done: int
    left: Mapping[Standing, int]
    """How many are as they were, by where they stand."""

    def as_dict(self) -> dict[str, Any]:
        """The resets as JSON has them."""
        left = {stands.name.lower(): count for stands, count in self.left.items()}
        return {"reset": self.done, "not_reset": left}

    def tell_left(self) -> None:
        """Say on stderr what was left as it is, and why."""
        for stands, count in self.left.items():
            print(f"not reset: {count:,} ({_LEFT[stands]})", file=sys.stderr)


def reset_failed(parsed: argparse.Namespace, letters: Sequence[DeadLettered]) -> Resets:
    """Reset the records of these in the ledger, those alone that have failed.

    Raises ConfigError, before anything is changed, where it is not known whose records they are.
    """
    if not letters:
        return Resets(0, {})
    ids = list(dict.fromkeys(letter.message.id for letter in letters))
    stood: Counter[Standing] = Counter()
    with opened(parsed) as ledger, Progress() as progress:
        consumer = _consumer(parsed.consumer, ledger)
        for turn, id_ in enumerate(ids, start=1):
            stood[_reset(parsed, ledger, Key(consumer, id_))] += 1
            progress.show(f"looked at {turn:,} records of {len(ids):,}")
    done = sum(stood.pop(stands, 0) for stands in _FAILED)
    return Resets(done, stood)


def _consumer(named: str | None, ledger: Ledger) -> str:
    """Whose records they are. Where there are several, another may know messages of these ids."""
    if named is not None:
        return named
    names = ops.consumers(ledger)
    if len(names) != 1:
        raise ConfigError(
            shown(
                f"retry: {ops.told(names)}; "
                "name whose to reset with --consumer, or let all be with --ledger ''"
            )
        )
    return names[0]


def _reset(parsed: argparse.Namespace, ledger: Ledger, key: Key) -> Standing:
    """Where the record stood; one that has failed is reset."""
    try:
        record = ledger.find(key)
    except MessageError:
        return Standing.ABSENT  # An id that no record can have.
    stands = standing(record, ledger.now())
    if record is None or stands not in _FAILED:
        return stands
    why = parsed.why or f"its dead letter went back into {parsed.queue}"
    changed = ops.reset(ledger, [record], by=parsed.by or login_name(), why=why)
    # Refused is what another has taken since it was found.
    return Standing.HELD if changed.refused else stands
