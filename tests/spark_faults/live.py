"""A live worker: consumes a queue, from when somebody else has begun on its messages."""

import os
import sys
import time
from pathlib import Path

from tests.spark_faults.handlers import LOG_VARIABLE, append

from oncely.consumer import Consumer
from oncely.core.policy import at_least_once
from oncely.ledger import open_ledger

_DEADLINE_S = 300.0


def main(queue_url: str, ledger_url: str, consumer: str, lease: str) -> None:
    """Until the queue is drained."""
    deadline = time.monotonic() + _DEADLINE_S
    while not Path(os.environ[LOG_VARIABLE] + consumer).exists():
        assert time.monotonic() < deadline, "nobody begins"
        time.sleep(0.01)
    ledger = open_ledger(ledger_url)
    policy = at_least_once(lease=lease)
    Consumer(queue_url, consumer).idempotent(ledger, consumer, policy=policy).consume(
        append, drain=True
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
