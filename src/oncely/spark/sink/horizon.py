"""The horizon: the ledger may have forgotten messages that were sent before it."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from oncely.archive.lookup import Archive, NotCovered, Old, Refusal
from oncely.core.commands import TooOld
from oncely.core.policy import Policy
from oncely.core.turn import seconds_since_1970
from oncely.spark.sink.message_rows import Row
from oncely.spark.sink.sink_options import SinkOptions


class Horizon:
    """Looks up messages for which the ledger answers TooOld in the archive, if there is one.

    Claim messages under its `policy`; one that may run, as if it was sent at that horizon.
    """

    def __init__(self, policy: Policy, options: SinkOptions) -> None:
        self._own = policy
        archive = None if options.archive is None else Archive(options.archive, options.consumer)
        self._archive = archive
        # With an archive, messages that would run without a question are looked up, too.
        self.policy = policy if archive is None else replace(policy, on_too_old="dead_letter")

    def judge(self, rows: Sequence[tuple[Row, TooOld]]) -> list[str | Refusal | None]:
        """Why each message may not run: a reason, or the refusal for its archived record. None if
        it may run, and must be claimed again.
        """
        if self._archive is None or not rows:
            return [_reason(said) for _, said in rows]
        asked = [
            Old(row.id, seconds_since_1970(row.time) or 0.0, row.fingerprint()) for row, _ in rows
        ]
        verdicts: list[str | Refusal | None] = []
        for (_, said), answer in zip(rows, self._archive.judge(asked, self._own), strict=True):
            if not isinstance(answer, NotCovered):
                verdicts.append(answer)
            elif self._own.on_too_old == "run":
                verdicts.append(None)
            else:
                verdicts.append(f"{_reason(said)}, and from before the archive")
        return verdicts


def _reason(said: TooOld) -> str:
    when = datetime.fromtimestamp(said.horizon, UTC).isoformat(" ", "seconds")
    return f"too old: sent before {when}, up to when the ledger has forgotten"
