"""Sending: what handlers have sent leaves the ledger on a thread of its own, and holds up none."""

import logging
import threading
import time
from collections.abc import Iterable

from oncely.core.errors import OncelyError
from oncely.core.record import Key
from oncely.core.waiting import OUTBOX
from oncely.engine.mailbox import LedgerMailbox
from oncely.outbox import Relay

_log = logging.getLogger(__name__)

_AGAIN_S = 1.0
_LOOK_S = 30.0
"""How often it is looked for what others have left."""
_FIRST_LOOK_S = 2.0
_MOST = 100


class Sending:
    """Sends through `relay` what messages of `consumer` have left; where that fails, again a while
    later. Now and then also what others have left that died.

    What is not sent when it is closed stays in the ledger, for any relay.
    """

    def __init__(self, relay: Relay, mailbox: LedgerMailbox, consumer: str) -> None:
        self._mailbox = mailbox
        self._consumer = consumer
        self._look_at = time.monotonic() + _FIRST_LOOK_S
        self.sent = 0
        """How many messages were sent so far."""
        self._relay = relay
        self._unsent: dict[Key, None] = {}
        """Of which messages may still wait to be sent."""
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="oncely-sending", daemon=True)
        self._thread.start()

    @property
    def is_unsent(self) -> bool:
        """Whether anything is to be sent, or is being sent."""
        return bool(self._unsent)

    def send(self, keys: Iterable[Key]) -> None:
        """Have sent what these have left."""
        with self._changed:
            self._unsent |= dict.fromkeys(keys)
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Send nothing more that has not begun, and wait so long for what has."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def finish(self, timeout_s: float) -> None:
        """Wait until all is sent, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unsent, timeout_s)

    def _work(self) -> None:
        while (keys := self._next()) is not None:
            try:
                self.sent += self._relay.send_waiting(keys or self._left()).sent
            except OncelyError:
                # It is stored: any relay may send it as well.
                _log.warning("sending_failed", exc_info=True)
                self._rest()
                continue
            with self._changed:
                for key in keys:
                    self._unsent.pop(key, None)
                self._changed.notify_all()

    def _next(self) -> list[Key] | None:
        """Of which messages to send; none where it is time to look. None when it is closed."""
        with self._changed:
            wait_s = self._look_at - time.monotonic()
            self._changed.wait_for(lambda: self._is_closed or self._unsent, max(0.0, wait_s))
            return None if self._is_closed else [*self._unsent]

    def _left(self) -> list[Key]:
        """The messages of which something waits to be sent, whoever has left it."""
        self._look_at = time.monotonic() + _LOOK_S
        waiting = self._mailbox.listed(OUTBOX, _MOST)
        return sorted({each.parent for each in waiting if each.parent.consumer == self._consumer})

    def _rest(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, _AGAIN_S)
