"""What is killed: programs that drain a queue, one fork after another from a warm parent.

It reads one order for each line, as JSON, forks a child that does as the order says, and answers
each with whether that was killed; null where it has raised.
"""

import json
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Engine, create_engine
from tests.crash import writes
from tests.crash.bus import Bus
from tests.crash.consumer import Consumer
from tests.crash.means import LEASE, POLICIES, Clock, Means, Queue
from tests.kills import killed_at

import oncely.stores.sql.joining  # noqa: F401 - before the forks, which are to be quick.
from oncely.ledger.ledger import Ledger
from oncely.stores.names import TableName
from oncely.stores.sql import SqlStore
from oncely.stores.sql.engines import server_engine, sqlite_engine

WORK: Mapping[str, Callable[[Means], None]] = {
    "consume": lambda means: Consumer(means).consume(),
    "together": lambda means: Consumer(means).consume_together(),
    "relay": lambda means: Consumer(means).relay(),
    "both": lambda means: Consumer(means).consume_and_relay(),
    "bus": lambda means: Bus(means).drain(),
}
_DEADLINE_S = 60
"""For one child, which takes a small part of a second."""


class Order(NamedTuple):
    """What a child is to do."""

    work: str
    mode: str
    ledger: str
    queue: str
    log: str
    tries: int = 5
    point: str = "nowhere"
    """Where it is killed, if anywhere."""
    nth: int = 1
    later_s: float = 0.0
    """How long after the one before it begins."""


class Stores(NamedTuple):
    """What the parent makes ready; its children connect by themselves."""

    clock: Clock
    ledger: Ledger
    engine: Engine
    """The ledger's."""
    own: Engine
    """For the handlers' own transactions."""


@cache
def _stores(url: str) -> Stores:
    clock = Clock()
    if url.startswith("sqlite"):
        engine = sqlite_engine(Path(url.removeprefix("sqlite:///")))
    else:
        engine = server_engine(url)
    own = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    for each in (engine, own):
        # To connect the first time takes the longest.
        each.connect().close()
        each.dispose()
    return Stores(clock, Ledger(SqlStore(engine, TableName(), clock)), engine, own)


def _do(order: Order, stores: Stores) -> None:
    # Who goes round and round is ended, and has failed.
    signal.alarm(_DEADLINE_S)
    stores.clock.pass_by(order.later_s)
    if order.point == writes.POINT:
        writes.watch(stores.engine, stores.own)
    means = Means(
        mode=order.mode,
        policy=POLICIES[order.mode](lease=LEASE, backoff="1ms", tries=order.tries),
        ledger=stores.ledger,
        engine=stores.own,
        queue=Queue(Path(order.queue), stores.clock),
        log=Path(order.log),
    )
    WORK[order.work](means)


def _is_killed(order: Order, stores: Stores) -> bool | None:
    try:
        return killed_at(order.point, lambda: _do(order, stores), order.nth)
    except AssertionError:
        traceback.print_exc()
        return None


def main() -> None:
    """Carry out orders until there are no more."""
    for line in sys.stdin:
        order = Order(**json.loads(line))
        # Made here, and not in each child: forks are quick then.
        stores = _stores(order.ledger)
        sys.stdout.write(f"{json.dumps(_is_killed(order, stores))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
