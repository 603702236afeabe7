"""The adapter for Celery: tasks in a worker with processes, on a real RabbitMQ, and on Redis."""

import gc
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
from celery import Celery, Signature, chord
from celery.result import AsyncResult
from celery.signals import after_task_publish
from celery.utils.dispatch import Signal
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import create_async_engine
from tests.conditions import LIMIT_S, wait_until
from tests.integration.adapting import WRITE, Effects, found, process
from tests.integration.callers import Place, place_at
from tests.integration.celery_app import FOLDER, RESULTS, URL, application, client, ledger_in
from tests.records import granted

from oncely import ops
from oncely._util.crash_points import ENVIRONMENT
from oncely.adapters.celery import once_task
from oncely.core.errors import ConfigError, ExhaustedError
from oncely.core.record import Key, State
from oncely.ledger.ledger import Ledger

# Celery's backend for Redis leaves its connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in.*socket:pytest.PytestUnraisableExceptionWarning"
)


class Shop(NamedTuple):
    """The tasks, what they have done, and what the ledger knows of it."""

    app: Celery
    effects: Effects
    ledger: Ledger

    def send(self, task: str, message_id: str, *args: Any, **options: Any) -> AsyncResult:
        """Send a task under an id."""
        return self.app.send_task(task, [message_id, *args], task_id=message_id, **options)

    def kept(self, message_id: str) -> Any:
        """The result that is stored, whatever it was before."""
        return self.app.backend.get_task_meta(message_id, cache=False)["result"]

    def answer(self, task: str, message_id: str, *args: Any) -> Any:
        """The result of a task that is sent; its error is raised."""
        return self.send(task, message_id, *args).get(timeout=LIMIT_S)

    def mail(self, name: str) -> Signature:
        """What follows another task, and is none of ours: it has its effect each time."""
        return self.app.signature("mail", [name], immutable=True)

    def wait(self) -> None:
        """Wait until what has been sent until now is done, and what follows it."""
        for _ in range(2):
            self.app.send_task("bound", [str(uuid4())]).get(timeout=LIMIT_S)

    def deliver_again(self, *sent: Mapping[str, Any]) -> None:
        """Bring messages of tasks to the worker once more, as a broker does."""
        with self.app.producer_pool.acquire(block=True) as producer:
            for each in sent:
                producer.publish(each["body"], headers=each["headers"], routing_key="celery")


@pytest.fixture
def shop(
    rabbitmq_url: str, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Shop]:
    """Nobody works there yet."""
    monkeypatch.setenv(RESULTS, redis_url)
    app, ledger = client(rabbitmq_url), ledger_in(tmp_path)
    ledger.migrate()
    yield Shop(app, Effects(tmp_path), ledger)
    ledger.close()
    # Results that are collected later would look for a Redis that is gone.
    gc.collect()
    app.close()


@contextmanager
def worker(
    url: str, folder: Path, point: str = "", stderr: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A worker with a process for the tasks: with two, Celery may store the outcome of a try after
    that of the next.
    """
    words = ("celery", "--app=tests.integration.celery_app", "worker", "--concurrency=1")
    quiet = ("--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel=CRITICAL")
    places = {URL: url, FOLDER: str(folder), **({ENVIRONMENT: point} if point else {})}
    with process(*words, *quiet, environment=places, stderr=stderr) as started:
        yield started


def test_tasks(shop: Shop, rabbitmq_url: str, tmp_path: Path) -> None:
    """What tasks come to, in one worker."""
    with worker(rabbitmq_url, tmp_path):
        _duplicates(shop)
        _failures(shop)
        _unanswered(shop)
        _dead_letters(shop)
        _busy(shop)
        _replaced(shop)
        _keys(shop)
        _followed(shop)
        _followed_by_key(shop)


def _duplicates(shop: Shop) -> None:
    """A duplicate has the result of the first; without results kept, it leaves the state alone."""
    assert shop.answer("charge", "a") == {"receipt": 1}
    # As where a worker dies before Celery has stored what the task came to.
    shop.ledger.complete(granted(shop.ledger.claim(Key("note", "b"))))
    shop.send("charge", "a")
    note = shop.send("note", "b")
    # One process comes to this one last, and has done with the others then.
    assert shop.answer("charge", "last") == {"receipt": 1}
    assert (shop.kept("a"), note.state) == ({"receipt": 1}, "PENDING")
    assert (shop.effects.count("a"), shop.effects.count("b")) == (1, 0)
    assert found(shop.ledger, "note", "b").duplicates == 1


def _failures(shop: Shop) -> None:
    """Celery's retries are attempts; what Celery gives up may be sent again while tries are left,
    and what has none left fails and does not run.
    """
    assert shop.answer("struggle", "c", 2) == 3
    assert found(shop.ledger, "struggle", "c").attempts == 3
    with pytest.raises(ValueError, match="no such account"):
        shop.answer("struggle", "d", 9)
    record = found(shop.ledger, "struggle", "d")
    # The first and Celery's three retries.
    assert (record.state, record.attempts, record.exhausted) == (State.FAILED, 4, False)
    with pytest.raises(ExhaustedError, match="no such account"):
        shop.answer("give_up", "e")
    assert shop.effects.count("e") == 2


def _unanswered(shop: Shop) -> None:
    """Nobody knows whether it has had its effect: the probe is asked when it is due again."""
    assert shop.answer("lose", "lost") is None
    assert shop.effects.count("lost") == 1


def _dead_letters(shop: Shop) -> None:
    """What Celery gives up is a dead letter; when it is retried, the worker sends it again. What
    succeeds after all is none any more.
    """
    with pytest.raises(ValueError, match="no such account"):
        shop.answer("struggle", "given up", 4)
    key = Key("struggle", "given up")
    [letter] = wait_until(lambda: shop.ledger.mailbox.dead_of(key))
    assert (letter.reason, letter.attempts) == ("ValueError: no such account", 4)
    assert "in struggle" in (letter.error or "")
    [row] = shop.ledger.mailbox.of(key)
    assert (row.destination, row.is_set_aside) == ("celery", True)
    changed = ops.retry_letters(shop.ledger, [letter.id], by="ann")
    assert changed.next_steps == {letter.id: _SENT_AGAIN}
    wait_until(lambda: found(shop.ledger, *key).state is State.COMPLETED)
    assert shop.effects.count("given up") == 5
    wait_until(lambda: not shop.ledger.mailbox.of(key))
    # Once more, by its sender: the letter is there until it succeeds.
    with pytest.raises(ValueError, match="no such account"):
        shop.answer("struggle", "sent twice", 4)
    key = Key("struggle", "sent twice")
    wait_until(lambda: shop.ledger.mailbox.dead_of(key))
    shop.send(*key, 4)
    wait_until(lambda: found(shop.ledger, *key).state is State.COMPLETED)
    wait_until(lambda: not shop.ledger.mailbox.of(key))


_SENT_AGAIN = "due now: a worker of Celery sends it to its broker again"


def _busy(shop: Shop) -> None:
    """While another has the task it comes again, and that is none of Celery's retries."""
    claim = granted(shop.ledger.claim(Key("struggle", "f"), "60s"))
    result = shop.send("struggle", "f", 3)
    wait_until(lambda: result.state == "RETRY")
    assert shop.effects.count("f") == 0
    shop.ledger.release(claim)
    # It fails three times, and Celery retries three times.
    assert result.get(timeout=LIMIT_S) == 4


def _replaced(shop: Shop) -> None:
    """A task that puts another in its place is done, and the other has its id."""
    assert shop.answer("replaced", "g") == {"receipt": 1}
    assert found(shop.ledger, "replaced", "g").state is State.COMPLETED
    assert found(shop.ledger, "charge", "g").state is State.COMPLETED


def _followed(shop: Shop) -> None:
    """What follows a task follows it once, when its message is delivered again, too: a callback,
    the rest of a chain, a chord.
    """
    sent: list[Mapping[str, Any]] = []

    def note(body: Any, headers: Any, **_: Any) -> None:
        sent.append({"body": body, "headers": headers})

    def charge(name: str) -> Signature:
        return shop.app.signature("charge", [name], task_id=name)

    with connected(after_task_publish, note):
        charge("i").apply_async(link=shop.mail("linked"))
        (charge("j") | shop.mail("chained")).apply_async()
        chord([charge("k"), charge("l")], app=shop.app)(shop.mail("counted"))
    effects = ["linked", "chained", "counted"]
    wait_until(lambda: all(map(shop.effects.count, effects)))
    shop.deliver_again(*sent)
    wait_until(lambda: all(found(shop.ledger, "charge", each).duplicates for each in "ijkl"))
    shop.wait()
    assert [*map(shop.effects.count, effects)] == [1, 1, 1]
    assert {found(shop.ledger, "charge", each).state for each in "ijkl"} == {State.COMPLETED}


def _followed_by_key(shop: Shop) -> None:
    """Another task with the same key has the result, for a chord of its own; what else follows it
    has followed the first.
    """
    numbered = shop.app.signature("numbered", [18])
    for _ in range(2):
        assert numbered.apply_async(link=shop.mail("by key")).get(timeout=LIMIT_S) == 1
        (numbered | shop.mail("chained by key")).apply_async()
    shop.wait()
    # Without results that nobody can count: the chain was not that of the first.
    assert [shop.effects.count(each) for each in ("by key", "chained by key")] == [1, 0]
    for _ in range(2):
        together = chord([numbered, shop.app.signature("numbered", [19])], app=shop.app)
        together(shop.mail("of a chord"))
    wait_until(lambda: shop.effects.count("of a chord") == 2)


@contextmanager
def connected(signal: Signal, receiver: Callable[..., Any]) -> Iterator[None]:
    """Celery calls it meanwhile."""
    signal.connect(receiver)
    try:
        yield
    finally:
        signal.disconnect(receiver)


def _keys(shop: Shop) -> None:
    """A key is made of what the task's function is called with: the task itself, if it is bound."""
    results = [shop.app.send_task("bound", ["h"]).get(timeout=LIMIT_S) for _ in range(2)]
    assert results == ["bound 1", "bound 1"]
    assert found(shop.ledger, "bound", "bound h").state is State.COMPLETED
    results = [shop.app.send_task("numbered", [17]).get(timeout=LIMIT_S) for _ in range(2)]
    assert results == [1, 1]
    assert found(shop.ledger, "numbered", "17").state is State.COMPLETED


@pytest.mark.in_turn("processes are killed")
def test_deaths(shop: Shop, rabbitmq_url: str, tmp_path: Path) -> None:
    """The process of a task is killed after the effect, before that is recorded or after, and then
    the whole worker: each time the task is delivered again, and the effect is not repeated.
    """
    with worker(rabbitmq_url, tmp_path, "after_completed"):
        # What follows it was not sent before.
        followed = shop.send("charge", "a", link=shop.mail("after death"))
        assert followed.get(timeout=LIMIT_S) == {"receipt": 1}
        # Its lease runs out, and the probe finds the effect.
        assert shop.answer("die", "b") is None
        hanging = shop.send("hang", "c")
        wait_until(lambda: shop.effects.count("c"))
    with worker(rabbitmq_url, tmp_path):
        assert hanging.get(timeout=LIMIT_S) is None
        shop.wait()
    effects = [shop.effects.count(name) for name in ("a", "b", "c", "after death")]
    assert effects == [1, 1, 1, 1]
    assert found(shop.ledger, "die", "b").state is State.COMPLETED


@pytest.mark.in_turn("processes are killed")
def test_in_doubt(shop: Shop, rabbitmq_url: str, tmp_path: Path) -> None:
    """A task whose process is killed, and may not run twice, is in doubt, and then a dead letter:
    once it is settled as not happened, the next worker sends it again.
    """
    key = Key("die_once", "a")
    with worker(rabbitmq_url, tmp_path):
        shop.send(*key)
        wait_until(lambda: shop.ledger.mailbox.dead_of(key))
    changed = ops.not_happened(shop.ledger, [found(shop.ledger, *key)], by="ann")
    assert "of Celery" in changed.next_steps[key]
    assert found(shop.ledger, *key).waits_for_sender
    with worker(rabbitmq_url, tmp_path):
        wait_until(lambda: found(shop.ledger, *key).state is State.COMPLETED)
    assert shop.effects.count("a") == 2


@pytest.mark.in_turn("other brokers of frameworks")
@pytest.mark.parametrize("broker", ["redis", "sqs"])
def test_visibility_timeout(
    broker: str, redis_url: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """A worker that is killed after the effect, on Redis or SQS: after the visibility timeout its
    task is delivered again, also while it runs, and the effect is not repeated.
    """
    request.getfixturevalue("monkeypatch").setenv(RESULTS, redis_url)
    url = redis_url
    if broker == "sqs":
        host = request.getfixturevalue("sqs_url").partition("endpoint=http://")[2]
        url = f"sqs://1:1@{host}/{uuid4().hex}"
    with closing(ledger_in(tmp_path)) as ledger, client(url) as app:
        ledger.migrate()
        shop = Shop(app, Effects(tmp_path), ledger)
        with worker(url, tmp_path):
            hanging = shop.send("hang", "a")
            wait_until(lambda: shop.effects.count("a"))
        with worker(url, tmp_path):
            assert hanging.get(timeout=LIMIT_S) is None
            shop.wait()
        assert shop.effects.count("a") == 1
        assert found(ledger, "hang", "a").state is State.COMPLETED


def test_ledger_that_was_not_migrated(shop: Shop, rabbitmq_url: str, tmp_path: Path) -> None:
    """A worker ends at its start, with one line that says what to type."""
    (tmp_path / "ledger.db").unlink()
    with worker(rabbitmq_url, tmp_path, stderr=subprocess.PIPE) as started:
        told = started.communicate(timeout=LIMIT_S)[1].decode().splitlines()
        assert started.returncode == 1
    [line] = [each for each in told if "oncely migrate" in each]
    assert "the ledger's table processed_messages is missing" in line
    assert not any("Traceback" in each for each in told)


def test_stopped_worker(shop: Shop, rabbitmq_url: str, tmp_path: Path) -> None:
    """All processes of a worker that was stopped have stopped: none is alive, or gone."""
    with worker(rabbitmq_url, tmp_path) as started:
        shop.answer("charge", "a")
        started.terminate()
        assert started.wait(LIMIT_S) == 0
    found = [each for each in ops.workers(shop.ledger) if each.worker.kind == "celery"]
    assert [each.state for each in found] == ["stopped"] * 2


def test_called_by_other_code(shop: Shop, rabbitmq_url: str, tmp_path: Path) -> None:
    """A task that is called as a function runs each time, and leaves no record. What follows one
    that is applied without a worker follows it once.
    """
    app = application(rabbitmq_url, tmp_path)
    charge = app.tasks["charge"]
    assert [charge("a"), charge("a")] == [{"receipt": 1}, {"receipt": 2}]
    assert not list(shop.ledger.scan())
    app.conf.task_always_eager = True
    mail = app.signature("mail", ["here"], immutable=True)
    applied = [charge.apply(["b"], task_id="b", link=mail).get() for _ in range(2)]
    assert (applied, shop.effects.count("here")) == ([{"receipt": 1}] * 2, 1)


def test_called_by_itself(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """A task that calls itself as a function runs each time, under the one claim. That a duplicate
    does not run is logged, with its id.
    """
    caplog.set_level("INFO", "oncely")
    runs = []

    def count_down(number: int) -> int:
        runs.append(number)
        return count_down_task(number - 1) + 1 if number else 0

    options = {"name": "count_down", "base": once_task(shop.ledger), "shared": False}
    count_down_task = shop.app.task(**options)(count_down)
    results = [count_down_task.apply([2], task_id="a").get() for _ in range(2)]
    assert (results, runs) == ([2, 2], [2, 1, 0])
    told = "message 'a' of 'count_down' is a duplicate: it does not run again"
    assert caplog.messages.count(told) == 1


def on_sqlite(folder: Path) -> AbstractContextManager[Place]:
    """A place in the file that workers have their ledger in."""
    return place_at("sqlite", f"sqlite:///{folder}/ledger.db")


def test_transactions(shop: Shop, rabbitmq_url: str, tmp_path: Path) -> None:
    """Rows and records are stored together or not at all, in one worker: of what fails after it has
    written nothing is left but its tries, and a duplicate has the result and writes nothing.
    """
    with (
        on_sqlite(tmp_path) as bank,
        worker(rabbitmq_url, tmp_path),
    ):
        assert shop.answer("write", "a") == "a 0"
        assert shop.answer("write", "a") == "a 0"
        # The row of its first try is gone.
        assert shop.answer("write", "b", 1) == "b 1"
        with pytest.raises(ValueError, match="no such account"):
            shop.answer("write", "c", 9)
        named = shop.app.send_task("write", kwargs={"name": "d"}, task_id="d")
        assert named.get(timeout=LIMIT_S) == "d 0"
        assert shop.answer("hand_on", "e") == "e 0"
        assert bank.rows() == ["a 0", "b 1", "d 0", "e 0", "e handed on"]
    records = {name: found(shop.ledger, "write", name) for name in "abcde"}
    assert [record.attempts for record in records.values()] == [1, 2, 2, 1, 1]
    assert {n for n, record in records.items() if record.state is State.FAILED} == {"c"}
    assert records["a"].duplicates == 1
    assert found(shop.ledger, "hand_on", "e").state is State.COMPLETED


@pytest.mark.in_turn("processes are killed")
@pytest.mark.parametrize("point", ["before_commit", "after_commit"])
def test_killed_at_the_commit(shop: Shop, rabbitmq_url: str, tmp_path: Path, point: str) -> None:
    """A worker whose process is killed before or after the commit: the row is stored once."""
    with on_sqlite(tmp_path) as bank:
        with worker(rabbitmq_url, tmp_path, point):
            result = shop.send("write", "a")
            wait_until(lambda: shop.effects.count("a"))
            wait_until(lambda: point == "before_commit" or bank.rows())
        with worker(rabbitmq_url, tmp_path):
            assert result.get(timeout=LIMIT_S) == "a 0"
        assert bank.rows() == ["a 0"]
    assert (shop.effects.count("a") == 1) is (point == "after_commit")
    assert found(shop.ledger, "write", "a").state is State.COMPLETED


def test_transaction_before_a_worker(shop: Shop, tmp_path: Path) -> None:
    """A task is sent, and applied here, without the session; what takes none is refused, and what
    returns a result that cannot be kept.
    """

    def bare(self: Any) -> None: ...

    def numbers(self: Any, session: Any) -> set[int] | None: ...

    async def awaited(self: Any, session: Any) -> None: ...

    with on_sqlite(tmp_path) as bank:
        base = once_task(bank.ledger, transaction=bank.engine)

        def write(name: str, connection: Connection) -> str:
            connection.execute(WRITE, {"name": name})
            return name

        task = shop.app.task(name="write_here", base=base, shared=False)(write)
        assert [task.apply(["a"], task_id="a").get() for _ in range(2)] == ["a", "a"]
        assert task.apply(kwargs={"name": "b"}).get() == "b"
        assert bank.rows() == ["a", "b"]
        task.apply_async(["a"])
        for wrong in (["a", "connection"], []):
            with pytest.raises(TypeError):
                task.apply_async(wrong)
        options = {"base": base, "bind": True, "shared": False, "lazy": False}
        with pytest.raises(ConfigError, match="takes no session; add a last parameter"):
            shop.app.task(name="bare", **options)(bare)
        with pytest.raises(ConfigError, match="cannot be kept as JSON: set has no"):
            shop.app.task(name="numbers", **options)(numbers)
        with pytest.raises(ConfigError, match="is async, and Celery awaits nothing"):
            shop.app.task(name="awaited", **options)(awaited)
    with pytest.raises(ConfigError, match="hand over an Engine or a sessionmaker"):
        once_task(shop.ledger, transaction=create_async_engine("sqlite+aiosqlite://"))
