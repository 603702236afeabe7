"""An attempt at handling a message: work of which is known who raised what."""

from oncely.core.errors import OncelyError
from oncely.core.rules import after_refusal
from oncely.core.verdicts import Verdict
from oncely.lifecycle.work import Work


class Attempt(Work):
    """Work that tells a failure of its block from what the ledger did not grant."""

    @property
    def has_result(self) -> bool:
        """Whether `result` is what the block came to, now or at a former time."""
        return self.is_new or self._handling.keeps_result

    def verdict(self, error: Exception) -> Verdict | None:
        """What follows `error`, with which it began or ended; None where the message has failed."""
        if error is self.turn.error or not isinstance(error, OncelyError):
            return None
        return after_refusal(error).verdict
