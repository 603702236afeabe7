"""Relays in processes of their own: each begins when it is told to, and ends when it is told to."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from tests.conditions import LIMIT_S
from tests.records import granted

from oncely.core.message import Message
from oncely.core.record import Key
from oncely.core.waiting import WaitingMessage, queue_named
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.outbox import Relay
from oncely.transports.open_transport import open_transport

ROOT = Path(__file__).parents[2]
CONSUMER = "shop"
DESTINATION = "out"


class RelayProcess:
    """A process that relays. What it says on stderr is the test's."""

    def __init__(self, ledger: str, transport: str, environment: Mapping[str, str] = {}) -> None:
        self.program = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.relaying", ledger, transport],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def await_ready(self) -> None:
        """Return when it is up and waits for the word."""
        assert self.program.stdout is not None
        assert self.program.stdout.readline() == "ready\n"

    def begin(self, **settings: Any) -> None:
        """Let it relay from now on."""
        assert self.program.stdin is not None
        print(json.dumps(settings), file=self.program.stdin, flush=True)

    def is_alive(self) -> bool:
        """Whether it has not ended, by itself or otherwise."""
        return self.program.poll() is None

    def end(self) -> int:
        """Let it end; return how many messages it has sent."""
        out, _ = self.program.communicate(timeout=LIMIT_S)
        assert self.program.returncode == 0
        return int(out)

    def await_crash(self) -> int:
        """Return the signal that has ended it."""
        return -self.program.wait(LIMIT_S)

    def close(self) -> None:
        """Nothing is left of it."""
        self.program.kill()
        self.program.communicate()


@contextmanager
def relays(
    number: int, ledger: str, transport: str, **environment: str
) -> Iterator[Sequence[RelayProcess]]:
    """Processes that are up and wait for the word."""
    with ExitStack() as stack:
        started = [RelayProcess(ledger, transport, environment) for _ in range(number)]
        for process in started:
            stack.callback(process.close)
        for process in started:
            process.await_ready()
        yield started


def defer(ledger: Ledger, messages: int, lanes: int, consumer: str = CONSUMER) -> None:
    """Store so many deferred messages, each with a parent of its own, for one lane after another.

    The key says which lane it is, the body the message's place in it.
    """
    batch = 500
    for start in range(0, messages, batch):
        numbers = range(start, min(start + batch, messages))
        keys = [Key(consumer, str(number)) for number in numbers]
        claims = [granted(outcome) for outcome in ledger.claim_many(keys)]
        deferred = [
            [_deferred(key, lane=number % lanes, place=number // lanes)]
            for key, number in zip(keys, numbers, strict=True)
        ]
        ledger.handled_many(claims, deferred=deferred)


def _deferred(parent: Key, lane: int, place: int) -> WaitingMessage:
    message = Message("/".join(parent), str(place).encode(), key=str(lane))
    return WaitingMessage(message.id, DESTINATION, message, parent)


def arrived(transport: str) -> list[Message]:
    """All that is in the queue, in the order of publishing. It is looked at where it is: of an
    ordering key a receiver is given one message at a time.
    """
    with closing(open_ledger(transport)) as queue:
        listed = queue.mailbox.listed(queue_named(DESTINATION), 100_000)
        return [each.message for each in listed]


def _main(ledger: str, transport: str) -> None:
    stop = threading.Event()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    settings = json.loads(sys.stdin.readline())

    def await_the_end() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=await_the_end, daemon=True).start()
    with closing(open_ledger(ledger)) as records, closing(open_transport(transport)) as queues:
        report = Relay(records, queues, **settings).run(stop)
    sys.stdout.write(f"{report.sent}\n")


if __name__ == "__main__":
    _main(*sys.argv[1:])
