"""A consumer of a queue, to be killed; its relay is in the same process, or in another."""

import os
from functools import partial
from typing import Any
from unittest.mock import patch

from tests.crash.effects import append, append_once, bodies, insert, line_of
from tests.crash.means import BY_STEPS, JOINED, Means

import oncely
from oncely._util.crash_points import reached
from oncely.consumer import loop
from oncely.core import turn
from oncely.core.message import Message, current
from oncely.outbox import Relay, RelayReport


class _Elsewhere:
    """In the place of a consumer's own relay: another process sends."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def send_waiting(self, _: object) -> RelayReport:
        return RelayReport()


# What one message has deferred is taken together, and apart from what others have, also where
# several wait by then on a slow machine.
_PAIRWISE = partial(Relay, batch=2)


class Consumer:
    """Handles each message as its mode wants it."""

    def __init__(self, means: Means) -> None:
        self._means = means

    def consume(self) -> None:
        """Until the queue is drained; a relay elsewhere sends what is deferred."""
        with patch.object(loop, "Relay", _Elsewhere):
            self._drain()

    def consume_together(self) -> None:
        """The same, all but the first in one window; the consumer sends by itself."""
        self._drain(window=100)
        self.relay()

    def relay(self) -> None:
        """Send what waits."""
        _PAIRWISE(self._means.ledger, self._means.queue).send_waiting()

    def consume_and_relay(self) -> None:
        """Both in one process."""
        with patch.object(loop, "Relay", _PAIRWISE):
            self._drain()
        # What was stored by one that died before it could send it.
        self.relay()

    def _drain(self, window: int = 1) -> None:
        means = self._means
        consumer = oncely.Consumer(means.queue, "in").window(window)
        consumer.idempotent(means.ledger, means.mode, policy=means.policy)
        handle: Any = self._handle
        if means.mode == JOINED:
            consumer.transactional(means.engine)
            handle = self._handle_joined
        # By the clock of the process, which nobody moves on.
        with patch.object(turn, "AGAIN_S", 0.01):
            consumer.consume(handle, drain=True)

    def _handle_joined(self, message: Message, connection: Any) -> None:
        self._handle(message, connection)

    def _handle(self, message: Message, connection: Any = None) -> None:
        # By steps, one run goes on with what another has begun.
        run = "any" if self._means.mode == BY_STEPS else str(os.getpid())
        reached(f"handling {message.id}")
        reached("in_handler")
        deferred = [message.send("out", body) for body in bodies(message.id, run)]
        line = line_of(current().claim, run, deferred)
        reached("in_handler")
        if connection is not None:
            insert(connection, line)
        elif self._means.mode == BY_STEPS:
            key = message.step_key("effect")
            message.step("effect", append_once, self._means.log, line, key)
        else:
            append(self._means.log, line)
        reached("in_handler")
