"""The adapter for pika, on a real RabbitMQ: a callback here, and in a process that is killed."""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pika.adapters.blocking_connection import BlockingChannel
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import create_async_engine
from tests.conditions import wait_until
from tests.integration.adapting import (
    WRITE,
    Effects,
    channel_to,
    declare,
    found,
    process,
    publish,
    waiting,
)
from tests.integration.callers import place_at
from tests.integration.pika_worker import callback_in, ledger_in
from tests.logs import of_event
from tests.meddling import MeddlingStore, away
from tests.records import granted

from oncely._util.crash_points import ENVIRONMENT
from oncely.adapters.pika import once_callback
from oncely.core import turn
from oncely.core.control import Unrecoverable
from oncely.core.errors import ConfigError, MismatchError
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.record import Key, State
from oncely.ledger.ledger import Ledger, open_ledger

QUICK = Policy(tries=3, backoff=["50ms"])


@pytest.fixture
def channel(rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[BlockingChannel]:
    """A channel on which the queue `work` is declared."""
    monkeypatch.setattr(turn, "AGAIN_S", 0.1)
    with channel_to(rabbitmq_url) as channel:
        declare(channel, "work", "dead")
        yield channel


class Handler:
    """Fails as often as it is told to, and keeps what it was given."""

    def __init__(self, fails: int = 0, error: Exception | None = None) -> None:
        self.fails = fails
        self.error = error or ValueError("no such account")
        self.given: list[Message] = []

    def __call__(self, message: Message) -> None:
        self.given.append(message)
        if len(self.given) <= self.fails:
            raise self.error


def consume(channel: BlockingChannel, callback: Any, until: Callable[[], object]) -> None:
    """Handle what comes, until it is so; and what is unacknowledged then goes back."""
    tag = channel.basic_consume("work", callback)
    serve(channel, until)
    channel.basic_cancel(tag)


def serve(channel: BlockingChannel, until: Callable[[], object]) -> None:
    """Let deliveries reach their callbacks until it is so."""

    def is_so() -> object:
        channel.connection.process_data_events(0)
        return until()

    wait_until(is_so)


def acknowledged(channel: BlockingChannel, url: str, dead: int = 0) -> bool:
    """Whether nothing is left in the queue, once its consumer's channel is gone."""
    channel.connection.close()
    return (waiting(url, "work"), waiting(url, "dead")) == (0, dead)


def test_duplicates(channel: BlockingChannel, rabbitmq_url: str, ledger: Ledger) -> None:
    """Of three deliveries of one message, one is handled, and all are acknowledged."""
    for message_id in ("a", "a", "b", "a"):
        publish(channel, "work", message_id, b'{"to": "x"}')
    handler = Handler()
    callback = once_callback(ledger, "billing", handler)
    key = Key("billing", "a")
    consume(channel, callback, lambda: (r := ledger.find(key)) and r.duplicates == 2)
    assert sorted((m.id, m.json()["to"]) for m in handler.given) == [("a", "x"), ("b", "x")]
    assert acknowledged(channel, rabbitmq_url)


@pytest.mark.parametrize("error", [ValueError("no such account"), MismatchError("its own")])
def test_failures_are_retried(
    channel: BlockingChannel, rabbitmq_url: str, ledger: Ledger, error: Exception
) -> None:
    """A message that fails, with whatever error, is handled again after the policy's delay, and
    then is done.
    """
    publish(channel, "work", "a")
    handler = Handler(fails=2, error=error)
    callback = once_callback(ledger, "billing", handler, policy=QUICK)
    consume(channel, callback, lambda: len(handler.given) == 3)
    record = found(ledger, "billing", "a")
    assert (record.state, record.attempts) == (State.COMPLETED, 3)
    assert acknowledged(channel, rabbitmq_url)


@pytest.mark.parametrize(
    ("error", "runs"), [(ValueError("no such account"), 3), (Unrecoverable("no such account"), 1)]
)
def test_failed_for_good(
    channel: BlockingChannel,
    rabbitmq_url: str,
    ledger: Ledger,
    error: Exception,
    runs: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """When its tries are spent, or no try can help, a message goes to the dead letters; each try
    is logged.
    """
    publish(channel, "work", "a")
    handler = Handler(fails=9, error=error)
    callback = once_callback(ledger, "billing", handler, policy=QUICK)
    consume(channel, callback, lambda: waiting(rabbitmq_url, "dead"))
    assert len(handler.given) == runs
    assert found(ledger, "billing", "a").exhausted
    assert acknowledged(channel, rabbitmq_url, dead=1)
    logged = [vars(each) for each in of_event(caplog, "handler_failed")]
    assert [each["attempt"] for each in logged] == [*range(1, runs + 1)]
    assert {(each["message_id"], each["consumer"]) for each in logged} == {("a", "billing")}
    assert [each["next_try_in_s"] is None for each in logged] == [False] * (runs - 1) + [True]


def test_refused(channel: BlockingChannel, rabbitmq_url: str, ledger: Ledger) -> None:
    """No id, or another body under a known one: rejected, and the handler does not run. So is a
    message of which `key` can tell no id, and the others are handled.
    """
    publish(channel, "work", None)
    publish(channel, "work", "a", b"1")
    publish(channel, "work", "a", b"2")
    handler = Handler()
    callback = once_callback(ledger, "billing", handler)
    consume(channel, callback, lambda: waiting(rabbitmq_url, "dead") == 2)
    publish(channel, "work", None, b"[]")
    publish(channel, "work", None, b'{"order": "b"}')
    key: Any = lambda _, body: str(json.loads(body)["order"])  # noqa: E731
    callback = once_callback(ledger, "billing", handler, key=key)
    consume(channel, callback, lambda: handler.given[1:] and waiting(rabbitmq_url, "dead") == 3)
    assert [(each.id, each.body[:1]) for each in handler.given] == [("a", b"1"), ("b", b"{")]
    assert acknowledged(channel, rabbitmq_url, dead=3)


def test_busy(channel: BlockingChannel, rabbitmq_url: str, ledger: Ledger) -> None:
    """While another worker has the message, its delivery is kept; then it is handled."""
    claim = granted(ledger.claim(Key("billing", "a"), "60s"))
    publish(channel, "work", "a")
    handler = Handler()
    deliveries: list[bool] = []
    callback = once_callback(ledger, "billing", handler)

    def counted(channel: Any, method: Any, *rest: Any) -> None:
        deliveries.append(method.redelivered)
        callback(channel, method, *rest)
        ledger.release(claim)

    consume(channel, counted, lambda: handler.given)
    # The broker has delivered it once: to wait is no redelivery.
    assert deliveries == [False]
    assert acknowledged(channel, rabbitmq_url)


def test_store_away(
    channel: BlockingChannel, rabbitmq_url: str, ledger: Ledger, meddling: MeddlingStore
) -> None:
    """While the store is away nothing is acknowledged, and no try is spent."""
    publish(channel, "work", "a")
    handler = Handler()
    meddling.meddle = away
    callback = once_callback(ledger, "billing", handler)

    def asked_twice() -> bool:
        return meddling.calls.count("insert") >= 2

    tag = channel.basic_consume("work", callback)
    serve(channel, asked_twice)
    assert not handler.given
    meddling.meddle = lambda: None
    serve(channel, lambda: handler.given)
    channel.basic_cancel(tag)
    assert found(ledger, "billing", "a").attempts == 1
    assert acknowledged(channel, rabbitmq_url)


def test_what_can_never_run(ledger: Ledger, tmp_path: Path) -> None:
    """An async handler, and a ledger without tables, are refused where they are handed over."""

    async def handle(message: Message) -> None: ...

    with pytest.raises(ConfigError, match="pika awaits nothing"):
        once_callback(ledger, "billing", handle)
    with (
        closing(open_ledger(f"sqlite:///{tmp_path}/new.db")) as new,
        pytest.raises(ConfigError, match="migrate"),
    ):
        once_callback(new, "billing", lambda _: None)


@pytest.mark.parametrize("point", ["before_completed", "after_completed"])
def test_killed_before_the_acknowledgement(
    channel: BlockingChannel, rabbitmq_url: str, tmp_path: Path, point: str
) -> None:
    """A worker dies after the effect, before or after that is recorded: the next one does not
    repeat it, and acknowledges.
    """
    ledger, effects = ledger_in(tmp_path), Effects(tmp_path)
    ledger.migrate()
    publish(channel, "work", "a")
    worker = ("tests.integration.pika_worker", rabbitmq_url, str(tmp_path))
    with process(*worker, environment={ENVIRONMENT: point}) as killed:
        assert killed.wait(60) == -signal.SIGKILL
    assert effects.count("a") == 1
    calls = []
    callback = callback_in(tmp_path, ledger)

    def counted(*delivery: Any) -> None:
        callback(*delivery)
        calls.append(delivery)

    def is_done() -> bool:
        return bool(calls) and found(ledger, "billing", "a").state is State.COMPLETED

    consume(channel, counted, is_done)
    assert effects.count("a") == 1
    assert acknowledged(channel, rabbitmq_url)
    ledger.close()


def test_transaction(channel: BlockingChannel, rabbitmq_url: str, postgresql_url: str) -> None:
    """Rows and records are stored together or not at all: a handler that fails after it has written
    leaves no row, and its try is recorded; a duplicate writes nothing.
    """
    runs: list[str] = []

    def write(message: Message, connection: Connection) -> None:
        runs.append(message.id)
        connection.execute(WRITE, {"name": f"{message.id} {len(runs)}"})
        if message.id == "poison" or runs.count(message.id) < 2:
            raise ValueError("no such account")

    with place_at("postgresql", postgresql_url) as bank:
        callback = once_callback(
            bank.ledger, "billing", write, policy=QUICK, transaction=bank.engine
        )
        publish(channel, "work", "a")
        consume(channel, callback, bank.rows)
        publish(channel, "work", "a")
        publish(channel, "work", "poison")
        consume(channel, callback, lambda: waiting(rabbitmq_url, "dead"))
        assert runs == ["a", "a", "poison", "poison", "poison"]
        assert bank.rows() == ["a 2"]
        assert found(bank.ledger, "billing", "a").duplicates == 1
        assert found(bank.ledger, "billing", "poison").exhausted
        source = create_async_engine("sqlite+aiosqlite://")
        with pytest.raises(ConfigError, match="hand over an Engine or a sessionmaker"):
            once_callback(bank.ledger, "billing", write, transaction=source)
    assert acknowledged(channel, rabbitmq_url, dead=1)
