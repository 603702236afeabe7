"""Deferred: what handlers have sent, on its way out before their deliveries are acknowledged."""

import logging
import time
from collections.abc import Iterable

from oncely.core.errors import OncelyError
from oncely.core.record import Key
from oncely.outbox import Relay

_log = logging.getLogger(__name__)

_AGAIN_S = 1.0


class Deferred:
    """Sends through `relay`; where that fails, again a while later."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._unsent: dict[Key, None] = {}
        """Of which messages may still wait to be sent."""
        self._again_at = 0.0

    @property
    def is_unsent(self) -> bool:
        """Whether anything is to be sent again."""
        return bool(self._unsent)

    def send(self, keys: Iterable[Key]) -> int:
        """Send what these have deferred; how many messages were sent."""
        self._unsent |= dict.fromkeys(keys)
        return self._send()

    def send_again(self) -> int:
        """Send what could not be sent, if it is time; how many were."""
        is_due = self._unsent and time.monotonic() >= self._again_at
        return self._send() if is_due else 0

    def _send(self) -> int:
        if not self._unsent:
            return 0
        try:
            sent = self._relay.send_waiting([*self._unsent]).sent
        except OncelyError:
            # It is stored: any relay may send it as well.
            _log.warning("sending_failed", exc_info=True)
            self._again_at = time.monotonic() + _AGAIN_S
            return 0
        self._unsent.clear()
        return sent
