"""A worker that is killed when it has sent the first of three deferred messages."""

import os
import signal
import sys
from pathlib import Path

from oncely.core.message import Message
from oncely.ledger import open_ledger
from oncely.service import IdempotenceService, ProcessingStatus


def _main(url: str, consumer: str, message_id: str, diary: str) -> None:
    message = Message(message_id)
    service = IdempotenceService(open_ledger(url), consumer)
    assert service.processing_status(message) is ProcessingStatus.ASSIGNED
    for number in range(3):
        service.add_deferred_message(message, Message(f"deferred-{number}"), "archive")
    service.message_handled(message)
    first, *_ = service.get_deferred_messages(message)
    Path(diary).write_text(first.id)
    service.deferred_message_sent(message, first)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _main(*sys.argv[1:])
