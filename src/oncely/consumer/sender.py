"""Sender: deferred messages are sent on a thread of its own, so that no message waits for it."""

import threading
from collections.abc import Iterable

from oncely._util.clock import monotonic
from oncely._util.event_log import EventLog
from oncely._util.outage import Outage
from oncely.core.errors import OncelyError
from oncely.core.record import Key
from oncely.core.turn import Turn
from oncely.core.waiting import OUTBOX
from oncely.ledger.mailbox import LedgerMailbox
from oncely.lifecycle.retry_queue import RetryQueue
from oncely.outbox import Relay

_log = EventLog(__name__)

_AGAIN_S = 1.0
_LOOK_S = 30.0
"""How often to look for deferred messages that other workers have left."""
_FIRST_LOOK_S = 2.0
_MOST = 100


class Sender:
    """Sends through `relay` the deferred messages of a consumer, which keeps retries in `queue`;
    after a failure it tries again a while later. Now and then it also sends what workers that died
    have left.

    What is not sent before `close` stays in the ledger, for any relay.
    """

    def __init__(self, relay: Relay, mailbox: LedgerMailbox, queue: RetryQueue) -> None:
        self._mailbox = mailbox
        self._queue = queue
        self._look_at = monotonic() + _FIRST_LOOK_S
        self.sent = 0
        """How many messages were sent so far."""
        self._relay = relay
        self._unsent: dict[Key, None] = {}
        """The messages whose deferred messages may still wait."""
        self._changed = threading.Condition()
        self._is_closed = False
        self._outage = Outage(
            _log,
            "sending_failed",
            "deferred messages of '%(consumer)s' cannot be sent: %(reason)s; they stay stored, "
            "and are sent later",
            "sending_recovered",
            "deferred messages of '%(consumer)s' can be sent again after %(away_s)s s",
            consumer=queue.consumer,
        )
        self._thread = threading.Thread(target=self._work, name="oncely-sending", daemon=True)
        self._thread.start()

    @property
    def is_unsent(self) -> bool:
        """Whether messages wait to be sent, or are being sent."""
        return bool(self._unsent)

    def send_of(self, turns: Iterable[Turn]) -> None:
        """Have sent what these turns, which have ended, have left to be sent."""
        keys = [key for turn in turns if (key := self._queue.sent_by(turn)) is not None]
        if not keys:
            return
        with self._changed:
            self._unsent |= dict.fromkeys(keys)
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Begin to send nothing more, and wait at most so long for what has begun."""
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
            except OncelyError as error:
                # The deferred messages are stored: any relay may send them, too.
                self._outage.met(error)
                self._rest()
                continue
            self._outage.over()
            with self._changed:
                for key in keys:
                    self._unsent.pop(key, None)
                self._changed.notify_all()

    def _next(self) -> list[Key] | None:
        """The messages whose deferred messages to send; empty: it is time to look; None: closed."""
        with self._changed:
            wait_s = self._look_at - monotonic()
            self._changed.wait_for(lambda: self._is_closed or self._unsent, max(0.0, wait_s))
            return None if self._is_closed else [*self._unsent]

    def _left(self) -> list[Key]:
        """The messages with deferred messages that wait, of any worker."""
        self._look_at = monotonic() + _LOOK_S
        waiting = self._mailbox.listed(OUTBOX, _MOST)
        return sorted(
            {each.parent for each in waiting if each.parent.consumer == self._queue.consumer}
        )

    def _rest(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, _AGAIN_S)
