# mypy: disable-error-code="no-untyped-call"
"""The adapter for dramatiq: actors and a worker on a real RabbitMQ."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.middleware import AsyncIO, Callbacks, GroupCallbacks, Pipelines, Retries
from dramatiq.rate_limits import backends as rate_limits
from dramatiq.results import Results
from dramatiq.results.backends import StubBackend
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from tests.conditions import wait_until
from tests.integration.adapting import (
    WRITE,
    found,
    waiting,
)
from tests.integration.callers import Place
from tests.logs import of_event
from tests.meddling import MeddlingStore, away
from tests.records import granted

from oncely import ops
from oncely.adapters.dramatiq import OnceMiddleware
from oncely.core import turn
from oncely.core.errors import ConfigError
from oncely.core.policy import Policy, at_most_once, effectively_once
from oncely.core.record import Key, State
from oncely.ledger.ledger import Ledger, open_ledger

_DEADLINE_MS = 60_000


@pytest.fixture
def broker(rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[RabbitmqBroker]:
    """A broker whose failed messages come again soon, and whose results are kept."""
    monkeypatch.setattr(turn, "AGAIN_S", 0.1)
    retries = Retries(min_backoff=20, max_backoff=50, max_retries=3)
    results = Results(backend=StubBackend())
    groups = GroupCallbacks(rate_limits.StubBackend())
    middleware = [results, Pipelines(), Callbacks(), groups, retries]
    with closing(RabbitmqBroker(url=rabbitmq_url, middleware=middleware)) as broker:
        yield broker


@pytest.fixture
def worker(broker: RabbitmqBroker) -> Iterator[dramatiq.Worker]:
    """A worker that is yet to start, and is stopped in the end."""
    # Of duplicates at the same time, not all are counted.
    worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=1)
    yield worker
    worker.stop()


class Actors:
    """Declares actors, and knows what they have run for."""

    def __init__(self, broker: RabbitmqBroker) -> None:
        self._broker = broker
        self.runs: list[Any] = []

    def declare(self, name: str, fails: int = 0, **options: Any) -> dramatiq.Actor[..., Any]:
        """An actor that fails the first times; its result is how often it ran."""

        def act(argument: Any) -> int:
            self.runs.append((name, argument))
            if len(self.runs) <= fails:
                raise ValueError("no such account")
            return len(self.runs)

        return dramatiq.actor(broker=self._broker, actor_name=name, **options)(act)

    def mail(self) -> dramatiq.Actor[..., Any]:
        """An actor that is left alone; what came before it is its last argument."""

        def mail(*arguments: Any) -> None:
            self.runs.append(("mail", arguments[-1]))

        return dramatiq.actor(broker=self._broker, once=False)(mail)


@pytest.fixture
def actors(broker: RabbitmqBroker) -> Actors:
    """None is declared yet."""
    return Actors(broker)


def result_of(broker: RabbitmqBroker, message: dramatiq.Message[Any]) -> Any:
    """The result of a message, as soon as there is one."""
    backend = broker.get_results_backend()
    return message.get_result(backend=backend, block=True, timeout=_DEADLINE_MS)


def left(url: str, queue: str = "default") -> tuple[int, int]:
    """How many messages are in the queue, and how many are dead letters."""
    return waiting(url, queue), waiting(url, f"{queue}.XQ")


def test_duplicates(
    broker: RabbitmqBroker,
    worker: dramatiq.Worker,
    actors: Actors,
    ledger: Ledger,
    rabbitmq_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A duplicate does not run, and nothing follows it again: neither a pipeline nor callbacks; and
    its group does not count it again. Its result is that of the first.
    """
    broker.add_middleware(OnceMiddleware(ledger))
    charge = actors.declare("charge", store_results=True)
    paid = actors.declare("paid", on_success="mail", store_results=True)

    mail = actors.mail()
    enqueue, sent = broker.enqueue, []

    def enqueued(message: Any, **options: Any) -> Any:
        sent.append(message)
        return enqueue(message, **options)

    monkeypatch.setattr(broker, "enqueue", enqueued)
    dramatiq.pipeline([charge.message("order"), mail.message()], broker=broker).run()
    paid.send("order")
    together = dramatiq.group([charge.message("a"), charge.message("b")], broker=broker)
    together.add_completion_callback(mail.message("all"))
    together.run()
    first = sent[:4]
    worker.start()
    wait_until(lambda: len(actors.runs) == 7)
    assert {run for run in actors.runs if run[0] == "mail"} == {
        ("mail", each) for each in (1, 2, "all")
    }
    for message in first:
        enqueue(message)
    keys = [Key(message.actor_name, message.message_id) for message in first]
    wait_until(lambda: all(found(ledger, *key).duplicates == 1 for key in keys))
    last = charge.send("last")
    wait_until(lambda: (r := ledger.find(Key("charge", last.message_id))) and r.is_handled)
    broker.join("default")
    assert (len(actors.runs), actors.runs[-1]) == (8, ("charge", "last"))
    assert {found(ledger, *key).state for key in keys} == {State.COMPLETED}
    assert [result_of(broker, message) for message in first] == [1, 2, 3, 4]
    # What is not acknowledged goes back.
    worker.stop()
    assert left(rabbitmq_url) == (0, 0)


def test_duplicate_by_key(
    broker: RabbitmqBroker, worker: dramatiq.Worker, actors: Actors, ledger: Ledger
) -> None:
    """Another message with the same key has the result, for a group of its own. What is to follow a
    message whose worker died before it was sent is sent.
    """
    broker.add_middleware(OnceMiddleware(ledger, key=lambda message: message.args[0]))
    charge = actors.declare("charge", store_results=True, on_success="mail")

    mail = actors.mail()
    ledger.handled(granted(ledger.claim(Key("charge", "b"))), result=7)
    worker.start()
    for _ in range(2):
        together = dramatiq.group([charge.message("a"), charge.message("b")], broker=broker)
        together.add_completion_callback(mail.message("all"))
        together.run()
        results = together.get_results(block=True, timeout=_DEADLINE_MS)
        assert [*results] == [1, 7]
    wait_until(lambda: len(actors.runs) == 5)
    mailed = [argument for name, argument in actors.runs if name == "mail"]
    assert sorted(map(str, mailed)) == ["1", "7", "all", "all"]


def test_ledger_that_was_not_migrated(
    broker: RabbitmqBroker, worker: dramatiq.Worker, tmp_path: Path
) -> None:
    """A worker does not start: a ConfigError, which ends a process with its line alone."""
    with closing(open_ledger(f"sqlite:///{tmp_path}/new.db")) as ledger:
        broker.add_middleware(OnceMiddleware(ledger))
        line = "the ledger's table processed_messages is missing.*type: oncely migrate"
        with pytest.raises(ConfigError, match=line) as raised:
            worker.start()
        assert isinstance(raised.value, SystemExit)
        assert raised.value.code == str(raised.value)


def test_failures(
    broker: RabbitmqBroker,
    worker: dramatiq.Worker,
    actors: Actors,
    ledger: Ledger,
    rabbitmq_url: str,
) -> None:
    """The retries of dramatiq are attempts on one record. When the tries of the actor's own policy
    are spent, it does not run, and the message goes to the dead letters before dramatiq's retries
    are spent.
    """
    broker.add_middleware(OnceMiddleware(ledger))
    message = actors.declare("charge", fails=2).send("order")
    worker.start()
    key = Key("charge", message.message_id)
    wait_until(lambda: (r := ledger.find(key)) and r.state is State.COMPLETED)
    assert found(ledger, *key).attempts == len(actors.runs) == 3
    message = actors.declare("refund", fails=99, once=Policy(tries=2)).send("order")
    wait_until(lambda: left(rabbitmq_url) == (0, 1))
    assert len(actors.runs) == 5
    assert found(ledger, "refund", message.message_id).exhausted
    [letter] = ledger.dead("refund")
    assert (letter.message.id, letter.reason) == (message.message_id, "ValueError: no such account")
    # Where nobody knows whether it had its effect, it does not run again.
    held = effectively_once(in_doubt_on=(ValueError,), backoff="10ms")
    probed = replace(held, on_in_doubt=lambda message: "happened")
    key = Key("asked", actors.declare("asked", fails=99, once=probed).send("order").message_id)
    wait_until(lambda: (r := ledger.find(key)) and r.state is State.COMPLETED)
    actors.declare("held", fails=99, once=held).send("order")
    wait_until(lambda: left(rabbitmq_url) == (0, 2))
    assert actors.runs[5:] == [("asked", "order"), ("held", "order")]


def test_dead_letter(
    broker: RabbitmqBroker, worker: dramatiq.Worker, actors: Actors, ledger: Ledger
) -> None:
    """What dramatiq has given up is a dead letter of the ledger; when it is retried, a worker sends
    it again, also after a broker that did not take it.
    """
    broker.add_middleware(OnceMiddleware(ledger))
    key = Key("charge", actors.declare("charge", fails=4).send("order").message_id)
    worker.start()
    [letter] = wait_until(lambda: ledger.mailbox.dead_of(key))
    body = letter.message.body
    assert (letter.message.type, letter.attempts) == ("charge", 4)
    ops.retry_letters(ledger, [letter.id], message=replace(letter.message, body=b"{}"), by="ann")
    wait_until(lambda: any(each.error for each in ledger.waiting("charge")))
    ledger.discard(key)
    [letter] = ledger.dead("charge")
    ops.retry_letters(ledger, [letter.id], message=replace(letter.message, body=body), by="ann")
    wait_until(lambda: found(ledger, *key).state is State.COMPLETED)
    assert len(actors.runs) == 5
    wait_until(lambda: not ledger.mailbox.of(key))


def test_busy_and_away(
    broker: RabbitmqBroker,
    worker: dramatiq.Worker,
    actors: Actors,
    meddling: MeddlingStore,
    ledger: Ledger,
    rival: Ledger,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """While another worker has the message it comes again, and that is none of the retries. While
    the store is away nothing is lost, no try is spent, and that is logged once.
    """
    caplog.set_level("INFO", "oncely")
    broker.add_middleware(OnceMiddleware(ledger))
    charge = actors.declare("charge", max_retries=0, store_results=True)
    message = charge.message("order")
    claim = granted(rival.claim(Key("charge", message.message_id), "60s"))
    broker.enqueue(message)
    worker.start()
    wait_until(lambda: meddling.calls.count("load") >= 2)
    assert not actors.runs
    rival.release(claim)
    # None is not taken for its result meanwhile.
    assert result_of(broker, message) == 1
    meddling.meddle = away
    asked = meddling.calls.count("insert")
    message = charge.send("order")
    wait_until(lambda: meddling.calls.count("insert") >= asked + 2)
    assert len(actors.runs) == 1
    meddling.meddle = lambda: None
    key = Key("charge", message.message_id)
    wait_until(lambda: (r := ledger.find(key)) and r.state is State.COMPLETED)
    assert found(ledger, *key).attempts == 1
    wait_until(lambda: of_event(caplog, "store_available"))
    [logged] = of_event(caplog, "store_unavailable")
    assert logged.getMessage() == "the store cannot be reached: the store is away; trying again"


def test_which_actors(
    broker: RabbitmqBroker, worker: dramatiq.Worker, actors: Actors, ledger: Ledger
) -> None:
    """An actor that is declared before the middleware is added is wrapped too; one that is left
    alone handles each message, and one may have a policy of its own.
    """
    early = actors.declare("early")
    broker.add_middleware(OnceMiddleware(ledger, key=lambda message: str(message.args[0])))
    alone = actors.declare("alone", once=False)
    once = actors.declare("once", fails=1, once=at_most_once(), max_retries=1)
    worker.start()
    once.send("a")
    wait_until(lambda: (r := ledger.find(Key("once", "a"))) and r.state is State.FAILED)
    for actor in (early, early, alone, alone, once):
        actor.send("a")
    wait_until(lambda: (r := ledger.find(Key("early", "a"))) and r.duplicates == 1)
    wait_until(lambda: len(actors.runs) == 4)
    worker.stop()
    assert sorted(actors.runs) == [("alone", "a"), ("alone", "a"), ("early", "a"), ("once", "a")]


def test_called_by_another_actor(
    broker: RabbitmqBroker, worker: dramatiq.Worker, actors: Actors, ledger: Ledger
) -> None:
    """An actor that is called as a function, in another or by other code, runs each time."""
    broker.add_middleware(OnceMiddleware(ledger))
    inner = actors.declare("inner")

    @dramatiq.actor(broker=broker)
    def outer() -> None:
        inner("a")
        inner("a")

    message = outer.send()
    worker.start()
    key = Key("outer", message.message_id)
    wait_until(lambda: (r := ledger.find(key)) and r.state is State.COMPLETED)
    inner("a")
    assert len(actors.runs) == 3
    assert [record.key.consumer for record in ledger.scan()] == ["outer"]


def test_transaction(
    broker: RabbitmqBroker, worker: dramatiq.Worker, bank: Place, rabbitmq_url: str
) -> None:
    """Rows and records are stored together or not at all: an actor that fails after it has written
    leaves no row, and its try is recorded; a duplicate writes nothing.
    """
    sessions = sessionmaker(bank.engine)
    broker.add_middleware(OnceMiddleware(bank.ledger, transaction=sessions, policy=Policy(tries=2)))
    runs = []

    @dramatiq.actor(broker=broker, store_results=True)
    def write(name: str, note: str = "", session: Session | None = None) -> str:
        assert session is not None
        runs.append(name)
        row = f"{name}{note} {len(runs)}"
        session.execute(WRITE, {"name": row})
        if name == "poison" or runs.count(name) < 2:
            raise ValueError("no such account")
        return row

    worker.start()
    order = write.send("order", note="!")
    assert result_of(broker, order) == "order! 2"
    broker.enqueue(order)
    key = Key("write", order.message_id)
    wait_until(lambda: found(bank.ledger, *key).duplicates == 1)
    poison = write.send(name="poison")
    wait_until(lambda: left(rabbitmq_url) == (0, 1))
    assert runs == ["order", "order", "poison", "poison"]
    assert bank.rows() == ["order! 2"]
    assert found(bank.ledger, *key).attempts == 2
    record = found(bank.ledger, "write", poison.message_id)
    assert (record.attempts, record.exhausted) == (2, True)


def test_transaction_busy(
    broker: RabbitmqBroker,
    worker: dramatiq.Worker,
    bank: Place,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A message that is busy comes again, and that is none of the retries; a commit that fails is
    a failure, and leaves nothing.
    """
    with bank.engine.begin() as connection:
        unique = "UNIQUE (message) DEFERRABLE INITIALLY DEFERRED"
        connection.execute(text(f"ALTER TABLE effects ADD {unique}"))
    broker.add_middleware(OnceMiddleware(bank.ledger))

    @dramatiq.actor(broker=broker, max_retries=0, once_transaction=bank.engine)
    def write(name: str, connection: Connection | None = None) -> None:
        assert connection is not None
        connection.execute(WRITE, {"name": name})

    message = write.message("a")
    claim = granted(bank.ledger.claim(Key("write", message.message_id), "60s"))
    broker.enqueue(message)
    enqueue, sent = broker.enqueue, []

    def enqueued(message: Any, *, delay: int | None = None) -> Any:
        sent.append(delay)
        return enqueue(message, delay=delay)

    monkeypatch.setattr(broker, "enqueue", enqueued)
    worker.start()
    wait_until(lambda: len(sent) >= 2)
    assert bank.rows() == []
    bank.ledger.release(claim)
    wait_until(bank.rows)
    second = write.send("a")
    key = Key("write", second.message_id)
    wait_until(lambda: (r := bank.ledger.find(key)) and r.state is State.FAILED)
    assert bank.rows() == ["a"]


def test_transaction_that_cannot_be(broker: RabbitmqBroker, bank: Place) -> None:
    """Actors that cannot be given a session are refused where they are declared, as are those whose
    results cannot be kept.
    """
    dramatiq.actor(broker=broker, actor_name="early")(lambda: None)
    with pytest.raises(ConfigError, match="hand over an Engine or a sessionmaker"):
        OnceMiddleware(bank.ledger, transaction=create_async_engine("sqlite+aiosqlite://"))
    broker.add_middleware(AsyncIO())
    with pytest.raises(ConfigError, match="takes no session; add a last parameter"):
        broker.add_middleware(OnceMiddleware(bank.ledger, transaction=bank.engine))

    async def awaited(session: Any) -> None: ...

    def bare() -> None: ...

    def numbers(session: Any) -> set[int] | None: ...

    with pytest.raises(ConfigError, match="cannot be kept as JSON: set has no"):
        dramatiq.actor(broker=broker)(numbers)
    with pytest.raises(ConfigError, match="takes no session; add a last parameter"):
        dramatiq.actor(broker=broker)(bare)
    with pytest.raises(ConfigError, match="is async, and runs on a loop of dramatiq's"):
        dramatiq.actor(broker=broker)(awaited)
    dramatiq.actor(broker=broker, once_transaction=False, actor_name="bare2")(bare)
