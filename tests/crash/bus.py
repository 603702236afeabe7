"""A message bus over the idempotence service, to be killed: it makes the six calls itself."""

import json
import os
from typing import Any

from tests.crash.effects import append, bodies, insert, line_of
from tests.crash.means import JOINED, Means

from oncely._util.crash_points import reached
from oncely.core.message import Message
from oncely.core.record import Key
from oncely.core.verdicts import Ack, Acknowledgement, Reject
from oncely.service import IdempotenceService, ProcessingStatus


class Bus:
    """Handles each message as its mode wants it, and sends what it deferred by itself."""

    def __init__(self, means: Means) -> None:
        self._means = means
        self._service = self._service_over(means.ledger)

    def drain(self) -> None:
        """Until the queue is drained."""
        queue = self._means.queue
        while not queue.is_drained("in"):
            for delivery in queue.receive("in", 1, 1.0):
                verdict = self._process(delivery.message)
                reached("before_acknowledge")
                # What is busy comes again by itself, later.
                if verdict is not None:
                    queue.acknowledge([(delivery, verdict)])

    def _process(self, message: Message) -> Acknowledgement | None:
        joined = self._means.mode == JOINED
        reason = self._handle_joined(message) if joined else self._handle(message)
        match reason:
            case None:
                self._send_deferred(message)
                self._service.processing_completed(message)
                return Ack()
            case "completed":
                return Ack()
            case "busy":
                return None
            case _:
                return Reject(reason.replace("_", " "))

    def _handle(self, message: Message) -> str | None:
        """Why nothing is to be done, if so."""
        service = self._service
        status = service.processing_status(message)
        if status is ProcessingStatus.ASSIGNED:
            append(self._means.log, self._run(service, self._means.ledger, message))
            reached("in_handler")
            reached("before_completed")
            service.message_handled(message)
            reached("after_completed")
        return service.reason(message)

    def _handle_joined(self, message: Message) -> str | None:
        """The same in one transaction."""
        with (
            self._means.engine.begin() as connection,
            self._means.ledger.transaction(connection) as inbox,
        ):
            service = self._service_over(inbox)
            status = service.processing_status(message)
            if status is ProcessingStatus.ASSIGNED:
                insert(connection, self._run(service, inbox, message))
                reached("in_handler")
                reached("before_completed")
                service.message_handled(message)
                reached("after_completed")
                reached("before_commit")
        reached("after_commit")
        return service.reason(message)

    def _run(self, service: IdempotenceService, calls: Any, message: Message) -> str:
        """Send; the effect that is to follow."""
        run = str(os.getpid())
        record = calls.find(Key(self._means.mode, message.id))
        reached("in_handler")
        ids = []
        for body in bodies(message.id, run):
            deferred = Message(f"{message.id}-{body['position']}", json.dumps(body).encode())
            service.add_deferred_message(message, deferred, "out")
            ids.append(deferred.id)
        reached("in_handler")
        return line_of(record, run, ids)

    def _send_deferred(self, message: Message) -> None:
        for number, deferred in enumerate(self._service.get_deferred_messages(message)):
            if number:
                reached("between_sends")
            self._means.queue.publish(deferred.destination, [deferred.message])
            reached("after_publish")
            self._service.deferred_message_sent(message, deferred)

    def _service_over(self, calls: Any) -> IdempotenceService:
        return IdempotenceService(calls, self._means.mode, policy=self._means.policy)
