"""A handler in transactions of a server is killed at each of its points, as users' tests do it."""

import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text

import oncely
from oncely._util.clock import undo_passing
from oncely.testing import TRANSACTION_POINTS, kill_at, redeliver, runs_once

ORDER = oncely.Message("order-17")


@pytest.fixture
def engine(postgresql_url: str) -> Iterator[Engine]:
    """With connections in its pool, which a fork leaves to its parent."""
    engine = create_engine(postgresql_url.replace("postgresql://", "postgresql+psycopg://"))
    os.register_at_fork(after_in_child=lambda: engine.dispose(close=False))
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE effects (id TEXT)"))
    yield engine
    engine.dispose()
    undo_passing()


@pytest.mark.parametrize("point", [*TRANSACTION_POINTS, None])
def test_killed_in_a_transaction(engine: Engine, point: str | None) -> None:
    """It has one effect in the end, and none that is not the test's own: the engine goes on."""
    with closing(oncely.open_ledger(engine)) as ledger:
        ledger.migrate()

        @oncely.once(ledger, consumer="billing", key=lambda order, *_: order.id, transaction=engine)
        def charge(order: oncely.Message, connection: Any) -> None:
            connection.execute(text("INSERT INTO effects VALUES (:id)"), {"id": order.id})

        if point is None:
            runs_once(charge, ORDER)
        else:
            kill_at(point, charge, ORDER)
            redeliver(charge, ORDER)
        with engine.begin() as connection:
            assert connection.execute(text("SELECT count(*) FROM effects")).scalar() == 1
