"""Consumer: handlers in one transaction with their claims, a whole window of them where it goes."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, NullPool, event, text
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker
from tests.records import granted
from tests.unit.conftest import Queue, Sql, failing, nothing

from oncely.consumer import Consumer
from oncely.core import turn
from oncely.core.errors import ContentionError, FencedError, StoreUnavailable
from oncely.core.message import Message
from oncely.core.policy import Policy, effectively_once
from oncely.core.record import Key, Record, State
from oncely.core.verdicts import Ack, DeadLetter
from oncely.ledger.ledger import Ledger
from oncely.ledger.mailbox import Mailbox
from oncely.lifecycle import transacting
from oncely.lifecycle.handler_context import deferred_message
from oncely.middleware.chain import CallNext
from oncely.once import once

INSERT = text("INSERT INTO effects (name) VALUES (:name)")


def consumer_of(queue: Queue, sql: Sql, policy: Policy = Policy()) -> Consumer:
    """Of the queue, with the ledger's engine; its first window is not small."""
    consumer = Consumer(queue, "in").idempotent(sql.ledger, "billing", policy=policy)
    return consumer.transactional(sql.engine).backoff(0.01)


def write(message: Message, connection: Any) -> None:
    """A handler with an effect."""
    connection.execute(INSERT, {"name": message.id})


def in_one_window(queue: Queue, *ids: str) -> None:
    """Publish these so that a consumer, which takes one message at first, takes them together."""
    queue.put(*(f"first-{number}" for number in range(20)), *ids)


# ---- A window ----------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [lambda engine: engine, sessionmaker])
def test_together(queue: Queue, sql: Sql, made: Callable[[Engine], Any]) -> None:
    """Where all of a window succeed there is one transaction for all of them."""
    ids = [str(number) for number in range(200)]
    queue.put(*ids, *ids[:50])
    commits: list[int] = []
    event.listen(sql.engine, "commit", commits.append)
    report = consumer_of(queue, sql).transactional(made(sql.engine)).consume(write, drain=True)
    assert (report.received, report.handled, report.duplicates) == (250, 200, 50)
    assert sql.effects() == ids
    assert len(commits) < 100
    assert sql.ledger.counts() == {("billing", State.COMPLETED): 200}
    assert queue.verdicts == [Ack()] * 250


def test_one_by_one(queue: Queue, sql: Sql) -> None:
    """Where one of a window fails the others are handled all the same; it alone is retried."""
    ids = [str(number) for number in range(200)]
    queue.put(*ids)
    failures = {"50": 2, "120": 9}

    def handle(message: Message, connection: Connection) -> None:
        write(message, connection)
        if failures.get(message.id):
            failures[message.id] -= 1
            raise ValueError("not yet")

    report = consumer_of(queue, sql).tries(3).consume(handle, drain=True)
    assert sorted(sql.effects()) == sorted(set(ids) - {"120"})
    assert (report.handled, report.failed, report.dead_lettered) == (199, 1, 1)
    assert queue.put_aside() == {"120": "ValueError: not yet"}
    attempts = {each.key.message_id: each.attempts for each in sql.ledger.scan(limit=200)}
    assert {attempts[each] for each in failures} <= {2, 3}
    assert {attempts[each] for each in ids if each not in failures} == {1}


def test_a_window_of_all_kinds(queue: Queue, sql: Sql) -> None:
    """Duplicates, refused messages and those without an id are answered beside the others."""
    sql.ledger.complete(granted(sql.ledger.claim(Key("billing", "done"))))
    granted(sql.ledger.claim(Key("billing", "busy")))
    granted(sql.ledger.claim(Key("billing", "doubt"), "1ms"))
    in_one_window(queue, "done", "busy", "1", "", "doubt", "2")
    policy = Policy(on_missing_id="untracked", on_in_doubt="hold", on_busy="discard")
    report = consumer_of(queue, sql, policy).consume(write, drain=True)
    assert sorted(sql.effects())[:3] == ["", "1", "2"]
    assert (report.handled, report.duplicates, report.dead_lettered) == (23, 2, 1)
    assert "InDoubtError" in queue.put_aside()["doubt"]


def test_refused_while_the_store_is_away(
    queue: Queue, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message of a window that is stored, which cannot be set aside now, is delivered again."""
    monkeypatch.setattr(turn, "AGAIN_S", 0.01)
    queue.put("other")
    consumer_of(queue, sql).consume(write, drain=True)
    keep = failing(1, StoreUnavailable("gone"), Mailbox.keep)
    monkeypatch.setattr(Mailbox, "keep", keep)
    in_one_window(queue, "1", "2")
    queue.publish("in", [Message("other", b"[]")])
    queue.put("3", "4")
    report = consumer_of(queue, sql).consume(write, drain=True)
    assert (report.handled, report.dead_lettered, len(sql.effects())) == (24, 1, 25)
    [letter] = sql.ledger.dead()
    assert letter.message.body == b"[]"


def test_sends_and_steps(queue: Queue, sql: Sql) -> None:
    """Sends, steps and results are stored with the work; what is sent leaves after the commit."""
    in_one_window(queue, "1", "2")
    queue.make("post")

    def handle(message: Message, connection: Connection) -> dict[str, str]:
        assert message.step("debit", lambda: 7) == 7
        message.send("post", f"for {message.id}")
        assert message.claim is not None
        assert message.claim.key == Key("billing", message.id)
        write(message, connection)
        return {"id": message.id}

    report = consumer_of(queue, sql, Policy(results="keep")).consume(handle, drain=True)
    record = sql.record("2")
    assert record.result == {"id": "2"}
    sent = {delivery.message.body for delivery in queue.receive("post", 100, 0)}
    assert (len(sent), report.deferred_sent) == (22, 22)
    assert sql.ledger.mailbox.backlog().waiting == 0
    assert sql.ledger.counts() == {("billing", State.COMPLETED): 22}


def test_sent_by_the_next(queue: Queue, sql: Sql) -> None:
    """What a consumer left unsent, its duplicate's consumer sends."""
    with sql.engine.begin() as connection, sql.ledger.transaction(connection) as inbox:
        claim = granted(inbox.claim(Key("billing", "1")))
        inbox.handled(claim, deferred=[deferred_message(claim.key, 0, "post", b"{}")])
    queue.make("post")
    queue.put("1")
    report = consumer_of(queue, sql).consume(write, drain=True)
    assert (report.duplicates, report.deferred_sent, sql.effects()) == (1, 1, [])
    assert sql.ledger.counts() == {("billing", State.COMPLETED): 1}


# ---- One ---------------------------------------------------------------------------------------


def test_committed_early(queue: Queue, sql: Sql) -> None:
    """A handler that commits by itself leaves its message in doubt, as often as there are tries:
    the first time it was in company, where that costs no try.
    """
    queue.put("1")
    runs: list[int] = []

    def handle(message: Message, connection: Connection) -> None:
        runs.append(1)
        connection.commit()

    consumer = consumer_of(queue, sql, Policy(lease="100ms"))
    report = consumer.tries(2).consume(handle, drain=True)
    assert (len(runs), report.handled, report.dead_lettered) == (3, 0, 1)
    record = sql.record("1")
    assert (record.state, record.attempts, record.exhausted) == (State.FAILED, 2, True)


@pytest.mark.parametrize("policy", [Policy(), effectively_once()])
def test_a_retry_committed_early(queue: Queue, sql: Sql, policy: Policy) -> None:
    """Its claim is older than the transaction: it is in doubt all the same, and the policy decides
    whether it runs again.
    """
    queue.put("1")
    runs: list[int] = []

    def handle(message: Message, connection: Connection) -> None:
        runs.append(1)
        if len(runs) == 1:
            raise ValueError("not yet")
        write(message, connection)
        connection.commit()

    consumer = consumer_of(queue, sql, replace(policy, lease="100ms", tries=3))
    report = consumer.consume(handle, drain=True)
    assert report.dead_lettered == 1
    assert len(sql.effects()) == (1 if policy.on_in_doubt == "hold" else 3)


def test_called_again_after_a_rollback(queue: Queue, sql: Sql) -> None:
    """A middleware that lets a message run again after its failure is recorded is told so."""
    queue.put("1")
    raised: list[type[BaseException]] = []

    def again(message: Message, call_next: CallNext) -> None:
        for _ in range(2):
            try:
                call_next(message)
            except (ValueError, FencedError) as error:
                raised.append(type(error))
        consumer.stop()

    consumer = Consumer(queue, "in").middleware(again).idempotent(sql.ledger, "billing")
    consumer.transactional(sql.engine).backoff(60).consume(failing(2, ValueError("no"), nothing))
    assert raised == [ValueError, FencedError]
    assert [record.attempts for record in sql.ledger.scan()] == [1]


@pytest.mark.parametrize("ends", [["COMMIT"], ["ROLLBACK", "BEGIN", "COMMIT", "BEGIN"]])
def test_window_ended_early(queue: Queue, sql: Sql, ends: list[str]) -> None:
    """Where a handler of a window ends the transaction nothing runs again under `hold`."""
    in_one_window(queue, "1", "2", "3")
    runs: list[str] = []

    def handle(message: Message, connection: Connection) -> None:
        runs.append(message.id)
        write(message, connection)
        for end in ends if message.id == "2" else []:
            connection.exec_driver_sql(end)

    policy = Policy(lease="100ms", on_in_doubt="hold")
    report = consumer_of(queue, sql, policy).consume(handle, drain=True)
    assert sorted(runs) == sorted(set(runs))
    assert sorted(sql.effects()) == sorted(set(sql.effects()))
    assert "2" in queue.put_aside()
    assert report.handled + report.dead_lettered == 23
    for message_id in set(runs) - {*queue.put_aside()}:
        assert sql.record(message_id).state is State.COMPLETED
        assert message_id in sql.effects()


def test_refused_at_the_commit(queue: Queue, sql: Sql) -> None:
    """What the database refuses at the commit is tried as often as the broker has delivered it."""
    child = "parent INTEGER REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED"
    with sql.engine.begin() as connection:
        connection.execute(text("CREATE TABLE parents (id INTEGER PRIMARY KEY)"))
        connection.execute(text(f"CREATE TABLE children ({child})"))
    event.listen(sql.engine, "checkout", lambda link, *_: link.execute("PRAGMA foreign_keys=ON"))
    queue.put("1")

    def handle(message: Message, connection: Connection) -> None:
        connection.execute(text("INSERT INTO children VALUES (7)"))

    told: list[Exception] = []
    consumer = consumer_of(queue, sql).tries(3).failed(lambda error, _: told.append(error))
    report = consumer.consume(handle, drain=True)
    assert (report.retried, report.failed, len(told)) == (2, 1, 1)
    assert "FOREIGN KEY" in queue.put_aside()["1"]


def losing(engine: Engine, *, connects: bool) -> Any:
    """Begins transactions of `engine`: the first is committed, and its reply is lost."""
    begun = count(1)

    @contextmanager
    def begin() -> Iterator[Connection]:
        number = next(begun)
        if number == 2 and not connects:
            raise ContentionError("no connection")
        with engine.begin() as connection:
            yield connection
        if number == 1:
            raise ContentionError("no reply")

    return SimpleNamespace(begin=begin)


@pytest.mark.parametrize("connects", [True, False])
@pytest.mark.parametrize("use", ["once", "consumer"])
def test_reply_to_the_commit_is_lost(
    queue: Queue, sql: Sql, monkeypatch: pytest.MonkeyPatch, use: str, connects: bool
) -> None:
    """Where the store is still away when the record is looked for first, the next try finds that it
    is stored.
    """
    monkeypatch.setattr(Ledger, "find", failing(1, StoreUnavailable("still away"), Ledger.find))
    source = losing(sql.engine, connects=connects)
    if use == "once":

        @once(sql.ledger, consumer="billing", key=lambda message: message.id, transaction=source)
        def handle(message: Message, connection: Connection) -> str:
            write(message, connection)
            return "done"

        assert handle(Message("1")) == "done"
    else:
        queue.put("1")
        consumer = Consumer(queue, "in").idempotent(sql.ledger, "billing").transactional(source)
        assert consumer.consume(write, drain=True).handled == 1
    assert sql.effects() == ["1"]


def test_the_database_is_away(queue: Queue, sql: Sql) -> None:
    """Where no transaction can be begun, no try is spent, however often the message comes."""
    queue.put("1")
    left = iter([OSError("nobody is there")] * 3)

    class Away:
        def begin(self) -> Any:
            for error in left:
                raise error
            return sql.engine.begin()

    consumer = Consumer(queue, "in").idempotent(sql.ledger, "billing").tries(1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(turn, "AGAIN_S", 0.01)
        report = consumer.transactional(Away()).consume(write, drain=True)
    assert (report.received, report.handled, report.failed) == (1, 1, 0)
    assert len(queue.verdicts) == 4


def test_another_database_is_locked(
    queue: Queue, sql: Sql, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A handler that always finds another database locked has failed, and spends its tries."""
    monkeypatch.setattr(transacting, "_TRIES", 3)
    monkeypatch.setattr(turn, "AGAIN_S", 0.01)
    runs: list[str] = []

    def handle(message: Message, _: Any) -> None:
        runs.append(message.id)
        if len(runs) > 20:
            pytest.exit("it runs for ever")
        with closing(sqlite3.connect(tmp_path / "other.db", timeout=0)) as other:
            other.execute("BEGIN IMMEDIATE")

    queue.put("1")
    consumer = Consumer(queue, "in").idempotent(sql.ledger, "billing").tries(2).backoff(0.01)
    with closing(sqlite3.connect(tmp_path / "other.db")) as owner:
        owner.execute("BEGIN IMMEDIATE")
        report = consumer.transactional(sql.engine).consume(handle, drain=True)
    assert (report.retried, report.failed, len(runs)) == (1, 1, 6)
    record = sql.record("1")
    assert isinstance(record, Record)
    assert (record.exhausted, record.attempts) == (True, 2)
    assert "database is locked" in queue.put_aside()["1"]
    assert Ack() not in queue.verdicts


# ---- Sources -----------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [lambda engine: engine, async_sessionmaker])
def test_async(queue: Queue, sql: Sql, made: Callable[[AsyncEngine], Any]) -> None:
    """Async handlers have an async engine or session, each message its own transaction."""
    url = str(sql.engine.url).replace("sqlite:", "sqlite+aiosqlite:")
    engine = create_async_engine(url, poolclass=NullPool)
    queue.make("post")
    queue.put("1", "2", "1")
    failures = ["2"]

    async def handle(message: Message, connection: Any) -> None:
        await connection.execute(INSERT, {"name": message.id})
        message.send("post", message.id)
        if message.id in failures:
            failures.remove(message.id)
            raise ValueError("not yet")

    consumer = Consumer(queue, "in").idempotent(sql.ledger, "billing").backoff(0.01)
    report = consumer.transactional(made(engine)).consume(handle, drain=True)
    assert sorted(sql.effects()) == ["1", "2"]
    assert (report.handled, report.retried, report.duplicates) == (2, 1, 1)
    assert report.deferred_sent == 2
    assert DeadLetter not in map(type, queue.verdicts)
