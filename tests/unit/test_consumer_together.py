"""Consumer: handlers that take all the messages of a window at once, in its transaction."""

from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import create_async_engine
from tests.unit.conftest import Queue, Sql
from tests.unit.test_consumer_transactional import INSERT

from oncely.consumer import Consumer
from oncely.core.errors import ConfigError
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.record import State
from oncely.core.verdicts import Ack


def consumer_of(queue: Queue, sql: Sql, policy: Policy = Policy()) -> Consumer:
    """Of the queue, with the ledger's engine."""
    consumer = Consumer(queue, "in").idempotent(sql.ledger, "billing", policy=policy)
    return consumer.transactional(sql.engine, together=True).backoff(0.01)


def write_all(messages: Sequence[Message], connection: Connection) -> None:
    """A handler with an effect for each."""
    connection.execute(INSERT, [{"name": message.id} for message in messages])


def test_all_new_ones_of_a_window(queue: Queue, sql: Sql) -> None:
    """Each message reaches the handler once, most of them together with others."""
    ids = [str(number) for number in range(300)]
    queue.put(*ids, *ids[:50])
    calls: list[int] = []

    def handle(messages: Sequence[Message], connection: Connection) -> None:
        calls.append(len(messages))
        write_all(messages, connection)

    report = consumer_of(queue, sql).consume(handle, drain=True)
    assert (report.received, report.handled, report.duplicates) == (350, 300, 50)
    assert sql.effects() == ids
    assert sum(calls) == 300
    assert max(calls) >= 20
    assert sql.ledger.counts() == {("billing", State.COMPLETED): 300}
    assert queue.verdicts == [Ack()] * 350


def test_one_that_fails_is_found(queue: Queue, sql: Sql) -> None:
    """What fails together is tried one by one: the others are handled, and it alone is not."""
    ids = [str(number) for number in range(100)]
    queue.put(*ids)

    def handle(messages: Sequence[Message], connection: Connection) -> None:
        write_all(messages, connection)
        if any(message.id == "70" for message in messages):
            raise ValueError("not that one")

    report = consumer_of(queue, sql).tries(2).consume(handle, drain=True)
    assert sorted(sql.effects()) == sorted(set(ids) - {"70"})
    assert (report.handled, report.dead_lettered) == (99, 1)
    assert queue.put_aside() == {"70": "ValueError: not that one"}


def test_what_a_handler_of_one_type_takes(queue: Queue, sql: Sql) -> None:
    """Each handler is given the messages of its type."""
    seen: dict[str, list[str]] = {"paid": [], "": []}
    consumer = consumer_of(queue, sql)

    @consumer.handler("paid")
    def paid(messages: Sequence[Message], connection: Connection) -> None:
        seen["paid"] += [message.id for message in messages]

    @consumer.handler
    def rest(messages: Sequence[Message], connection: Connection) -> None:
        seen[""] += [message.id for message in messages]

    for number in range(60):
        queue.publish("in", [Message(str(number), type="paid" if number % 3 else "other")])
    consumer.consume(drain=True)
    assert sorted(seen["paid"], key=int) == [str(number) for number in range(60) if number % 3]
    assert sorted(seen[""], key=int) == [str(number) for number in range(60) if not number % 3]


def test_sends_nothing(queue: Queue, sql: Sql) -> None:
    """No message is the one that is processed, alone as in a window: sending is refused."""
    queue.put("a", "b")

    def handle(messages: Sequence[Message], connection: Connection) -> None:
        messages[0].send("out", {})

    report = consumer_of(queue, sql).tries(1).consume(handle, drain=True)
    assert report.dead_lettered == 2
    assert "no message is being processed here" in queue.put_aside()["a"]


async def _async(messages: Any, connection: Any) -> None: ...


def _one(message: Any) -> None: ...


def _passing(message: Message, call_next: Any) -> Any:
    return call_next(message)


def test_what_cannot_go_together(queue: Queue, sql: Sql) -> None:
    """Each is refused in one line, before anything is received."""
    with pytest.raises(ConfigError, match=r"takes .*write `def _one\(messages, connection\):`"):
        consumer_of(queue, sql).consume(_one)
    with pytest.raises(ConfigError, match="leave out together=True"):
        consumer_of(queue, sql).middleware(_passing).consume(write_all)
    with pytest.raises(ConfigError, match=r'keeps no results; write Policy\(results="off"\)'):
        consumer_of(queue, sql, Policy(results="keep")).consume(write_all)
    engine = create_async_engine("sqlite+aiosqlite:///:memory:")
    consumer = Consumer(queue, "in").idempotent(sql.ledger, "billing")
    with pytest.raises(ConfigError, match="together is for handlers that are not async"):
        consumer.transactional(engine, together=True).consume(_async)
