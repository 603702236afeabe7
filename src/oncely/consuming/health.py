"""Health: whether a loop moves, and whether it reaches what it needs."""

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from oncely.core.errors import PublishRefused, TransportError, describe
from oncely.transports.transport import Clock, Transport

STUCK_S = 60.0
"""A loop that has not come around for so long is stuck. Whatever it waits for takes less."""


class Health(NamedTuple):
    """How one process is."""

    still_s: float
    """For how long its loop has not come around."""
    unready: str | None
    """Why it is not ready to work; None where it is."""

    @property
    def is_live(self) -> bool:
        """Whether the loop moves."""
        return self.still_s < STUCK_S


class Pulse:
    """Feels whether a loop moves, and whether its broker can be reached.

    The loop is that of the thread which makes it; `on_first` is called when it begins to move.
    """

    def __init__(
        self, on_first: Callable[[], object] = lambda: None, *, clock: Clock = time.monotonic
    ) -> None:
        self._on_first: Callable[[], object] | None = on_first
        self._clock = clock
        self._beat_at = clock()
        self._thread = threading.get_ident()
        self._unready: str | None = "the broker has not been reached yet"

    def beat(self) -> None:
        """The loop has come around; calls of other threads do not count."""
        if threading.get_ident() == self._thread:
            self._beat_at = self._clock()
            on_first, self._on_first = self._on_first, None
            if on_first is not None:
                on_first()

    def reached(self) -> None:
        """What the loop needs can be reached."""
        self._unready = None

    def missed(self, error: str) -> None:
        """What the loop needs cannot be reached."""
        self._unready = error

    def health(self) -> Health:
        """How the loop is."""
        return Health(self._clock() - self._beat_at, self._unready)

    def felt(self, transport: Transport) -> Transport:
        """The same transport; whether its broker can be reached is noted at every call."""
        return _FeltTransport(transport, self)


class _FeltTransport:
    """Passes everything on to a transport."""

    def __init__(self, transport: Transport, pulse: Pulse) -> None:
        self._transport = transport
        self._pulse = pulse

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._transport, name)
        return self._noted(found) if callable(found) and name != "close" else found

    def _noted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **named: Any) -> Any:
            try:
                answer = call(*args, **named)
            except PublishRefused:
                self._pulse.reached()
                raise
            except TransportError as error:
                self._pulse.missed(f"the broker cannot be reached: {describe(error, 200)}")
                raise
            self._pulse.reached()
            return answer

        return noted
