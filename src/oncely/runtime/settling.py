"""Settling: deliveries are settled on a thread of its own, while others are claimed and handled."""

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from oncely.core.errors import TransportError
from oncely.transports.base import Delivery, Transport, Verdict

_log = logging.getLogger(__name__)

_MOST = 2
"""Batches that may be under way: more would only wait for each other."""


class Settling:
    """Settles deliveries of `transport`, batch after batch."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._thread = ThreadPoolExecutor(1, "oncely-settling")
        self._under_way: deque[Future[None]] = deque()

    def settle(self, verdicts: Sequence[tuple[Delivery, Verdict]]) -> None:
        """Settle these, after those before them."""
        while len(self._under_way) >= _MOST:
            self._under_way.popleft().result()
        self._under_way.append(self._thread.submit(self._settle, verdicts))

    def wait(self) -> None:
        """Return when all are settled, or could not be."""
        while self._under_way:
            self._under_way.popleft().result()

    def close(self) -> None:
        """Wait for all; nothing more is to be settled."""
        self._thread.shutdown()
        self.wait()

    def _settle(self, verdicts: Sequence[tuple[Delivery, Verdict]]) -> None:
        try:
            self._transport.settle(verdicts)
        except TransportError:
            # They come again, and are known.
            _log.warning("settling_failed", exc_info=True, extra={"count": len(verdicts)})
