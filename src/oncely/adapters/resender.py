"""Resender: dead letters of a framework go to its own broker again when people retry them."""

import threading
from collections.abc import Callable, Collection
from contextlib import suppress

from oncely._util import clock
from oncely.core.errors import StoreError, describe
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.waiting import WaitingMessage, retries_of
from oncely.ledger.ledger import Ledger
from oncely.stores.store import PutBack

_LOOK_S = 2.0
_HOLD = "1m"
_AT_ONCE = 20
_RETRIES = Policy(tries=10)
"""What a broker does not take is sent again later, and in the end is a dead letter again."""


class Resender:
    """A thread of a worker that sends the messages of these consumers that people have retried, at
    least once and under the same ids: of one that is sent twice, the second is a duplicate.

    `send` gives a message to the framework's own broker, and raises where that does not take it.
    """

    def __init__(
        self,
        ledger: Ledger,
        framework: str,
        consumers: Collection[str],
        send: Callable[[Message], object],
    ) -> None:
        self._ledger, self._framework, self._send = ledger, framework, send
        self._queues = {retries_of(consumer) for consumer in consumers}
        self._closed = threading.Event()
        if ledger.can_defer:
            ledger.recorder.works_as(framework, *(consumers if len(consumers) == 1 else ()))
            threading.Thread(target=self._work, name="oncely-resender", daemon=True).start()

    def close(self) -> None:
        """Send nothing more."""
        self._closed.set()

    def _work(self) -> None:
        # Whoever retries a dead letter is told that there is somebody to send it.
        self._ledger.recorder.tell()
        mailbox = self._ledger.mailbox
        while not clock.wait(self._closed, _LOOK_S):
            # A store that is away is logged by whoever asks it for a claim.
            with suppress(StoreError):
                for queue in self._queues & mailbox.backlogs().keys():
                    for row in mailbox.take(_AT_ONCE, _HOLD, queue=queue):
                        if row.destination == self._framework:
                            self._send_one(row)
                        else:
                            mailbox.put_back([PutBack(row, None, 0.0, is_try=False)])

    def _send_one(self, row: WaitingMessage) -> None:
        try:
            self._send(row.message)
        except Exception as error:  # noqa: BLE001 - a broker's client may raise anything.
            # `oncely waiting` has the error.
            tries = row.attempts + 1
            retry_s = None if _RETRIES.is_spent(tries) else _RETRIES.delay_s(tries)
            self._ledger.mailbox.put_back([PutBack(row, describe(error), retry_s)])
        else:
            # If it has failed again meanwhile, its letter stays.
            self._ledger.mailbox.keep((), removed=[row])
