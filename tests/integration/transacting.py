"""A worker in a process of its own, that handles messages and defers others until it is stopped.

Each message that it was told is handled it writes to its output, a line each.
"""

import sys
from itertools import count
from threading import Event, Thread

from tests.records import deferred, granted

from oncely.core.errors import StoreUnavailable
from oncely.core.record import Key
from oncely.ledger.ledger import Ledger, open_ledger

WAITING = 3
"""What each message defers."""


def handle(ledger: Ledger, key: Key) -> None:
    """Claim a message, keep a step, and handle it with what it defers."""
    claim = granted(ledger.claim(key))
    ledger.keep_step(claim, "step", key.message_id)
    messages = [deferred(str(n), parent=key, position=n) for n in range(WAITING)]
    ledger.handled(claim, None, messages)


def _main(url: str, name: str) -> None:
    stop = Event()

    def await_the_end() -> None:
        sys.stdin.read()
        stop.set()

    Thread(target=await_the_end, daemon=True).start()
    ledger = open_ledger(url)
    for number in count():
        if stop.is_set():
            return
        try:
            handle(ledger, Key(name, str(number)))
        except StoreUnavailable:
            continue
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main(*sys.argv[1:])
