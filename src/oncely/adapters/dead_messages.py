"""Messages of a framework that failed permanently: dead letters in the ledger, which a worker of
the framework sends to its broker again when people retry them.
"""

import threading
from collections.abc import Callable, Collection
from traceback import format_exception
from typing import NamedTuple

from oncely._util import clock
from oncely._util.event_log import EventLog
from oncely._util.outage import Outage
from oncely.core.errors import OncelyError, describe, mask_passwords
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.record import Key
from oncely.core.waiting import WaitingMessage, retries_of, retry_name
from oncely.ledger.ledger import Ledger
from oncely.stores.store import PutBack

_log = EventLog(__name__)

_LOOK_S = 2.0
_HOLD = "1m"
_AT_ONCE = 20
_TRIES = Policy(tries=10)
"""How often a broker may refuse a message before it is a dead letter again, and when it is asked
next.
"""


class DeadMessage(NamedTuple):
    """A message that its framework has given up."""

    framework: str
    key: Key
    error: BaseException
    attempts: int
    reason: str | None
    """Why it failed, where the error only says that it was refused because of that."""


def keep_dead(ledger: Ledger, dead: DeadMessage, make: Callable[[], Message]) -> None:
    """Keep a message, which `make` gives, as a dead letter. A letter that is there stays as it is:
    a later delivery may be refused because of it.

    Nothing is raised, as the framework has the failure: what cannot be kept is logged.
    """
    if not ledger.can_defer:
        return
    key, queue = dead.key, retries_of(dead.key.consumer)
    try:
        row = WaitingMessage(
            *(key.message_id, dead.framework, make(), key),
            attempts=dead.attempts,
            error=mask_passwords("".join(format_exception(dead.error))),
            queue=queue,
            reason=mask_passwords(dead.reason or describe(dead.error)),
            is_set_aside=True,
            name=retry_name(queue),
        )
        ledger.mailbox.keep([row])
    except Exception as unkept:  # noqa: BLE001 - of the framework's serializer, or of the store.
        _log.warning(
            "message '%(message_id)s' of '%(consumer)s' has failed, and cannot be kept as a dead "
            "letter: %(reason)s",
            extra={"event": "dead_letter_not_kept", **key._asdict(), "reason": describe(unkept)},
        )


def drop_dead(ledger: Ledger, key: Key) -> None:
    """A message has succeeded: what an earlier attempt has left is no dead letter any more."""
    if letters := ledger.mailbox.dead_of(key):
        ledger.mailbox.discard_dead([letter.id for letter in letters])


class Resender:
    """A thread of a worker that sends dead letters of these consumers which people have retried, at
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
        self._outage = Outage(
            _log,
            "resending_failed",
            "retried dead letters cannot be sent to the broker: %(reason)s; trying again",
            "resending_recovered",
            "retried dead letters can be sent again after %(away_s)s s",
        )
        if not ledger.can_defer:
            return
        ledger.recorder.works_as(framework, *(consumers if len(consumers) == 1 else ()))
        threading.Thread(target=self._work, name="oncely-resending", daemon=True).start()

    def close(self) -> None:
        """Send nothing more."""
        self._closed.set()

    def _work(self) -> None:
        # Whoever retries a dead letter is told that there is somebody to send it.
        self._ledger.recorder.tell()
        while not clock.wait(self._closed, _LOOK_S):
            try:
                self._send_due()
            except OncelyError as error:
                self._outage.met(error)
            else:
                self._outage.over()

    def _send_due(self) -> None:
        mailbox = self._ledger.mailbox
        for queue in self._queues & mailbox.backlogs().keys():
            for row in mailbox.take(_AT_ONCE, _HOLD, queue=queue):
                if row.destination == self._framework:
                    self._send_one(row)

    def _send_one(self, row: WaitingMessage) -> None:
        mailbox = self._ledger.mailbox
        try:
            self._send(row.message)
        except Exception as error:  # noqa: BLE001 - a broker's client may raise anything.
            tries = row.attempts + 1
            retry_s = None if _TRIES.is_spent(tries) else _TRIES.delay_s(tries)
            mailbox.put_back([PutBack(row, describe(error), retry_s)])
            self._outage.met(error)
        else:
            # Its letter, if it has failed again meanwhile, stays.
            mailbox.keep((), removed=[row])
