"""An attempt at handling a message: work of which is known who raised what."""

from oncely.handling.verdicts import after_refusal
from oncely.handling.work import Work
from oncely.transports.base import DeadLetter, Delay


class Attempt(Work):
    """Work that tells a failure of its block from what the ledger did not grant."""

    _raised: BaseException | None = None

    async def _leave(self, error: BaseException | None) -> None:
        self._raised = error
        await super()._leave(error)

    @property
    def has_result(self) -> bool:
        """Whether `result` is what the block came to, now or at a former time."""
        return self.is_new or self._handling.keeps_result

    def verdict(self, error: Exception) -> Delay | DeadLetter | None:
        """What follows `error`, with which it began or ended; None where the message has failed."""
        if error is self._raised:
            return None
        return after_refusal(error, is_begun=self._begun_as is not None)
