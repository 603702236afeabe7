"""The horizon: what was sent before it may have been handled, and forgotten by the ledger."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from oncely.archive.lookup import Archive, NotCovered, Old, Refusal
from oncely.core.commands import TooOld
from oncely.core.policy import Policy
from oncely.lifecycle.turn import seconds_since_1970
from oncely.spark.sink.message_rows import Row


class Horizon:
    """Looks up in `archive`, where there is one, what the ledger answers with TooOld.

    To be asked for under `policy`, as sent at `sent_at`.
    """

    def __init__(self, policy: Policy, archive: Archive | None) -> None:
        self._own = policy
        self._archive = archive
        # With an archive, also what would run unasked is looked for.
        self.policy = policy if archive is None else replace(policy, on_too_old="dead_letter")
        self._passed: dict[str, float] = {}
        """The horizons for which messages may run, by their ids."""

    def sent_at(self, row: Row) -> float | None:
        """When the message was sent, in seconds since 1970; not before a horizon for which it
        may run. Should the ledger forget more meanwhile, that is too old again.
        """
        at = seconds_since_1970(row.time)
        return None if at is None else max(at, self._passed.get(row.id, at))

    def judge(self, rows: Sequence[tuple[Row, TooOld]]) -> list[str | Refusal | None]:
        """Why each is not to run, as a reason or as the rules say by its archived record; None
        where it may, and is to be asked for again.
        """
        if self._archive is None:
            return [_reason(said) for _, said in rows]
        asked = [
            Old(row.id, seconds_since_1970(row.time) or 0.0, row.fingerprint()) for row, _ in rows
        ]
        verdicts: list[str | Refusal | None] = []
        self._passed.clear()
        for (row, said), answer in zip(rows, self._archive.judge(asked, self._own), strict=True):
            if answer is None or (isinstance(answer, NotCovered) and self._own.on_too_old == "run"):
                self._passed[row.id] = said.horizon
                verdicts.append(None)
            elif isinstance(answer, NotCovered):
                verdicts.append(f"{_reason(said)}, and from before the archive")
            else:
                verdicts.append(answer)
        return verdicts


def _reason(said: TooOld) -> str:
    when = datetime.fromtimestamp(said.horizon, UTC).isoformat(" ", "seconds")
    return f"too old: sent before {when}, up to when the ledger has forgotten"
