"""What users test their handlers with: kills at points, redeliveries, deliveries at one moment."""

import asyncio
import os
import re
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import OperationalError

import oncely
from oncely._util import clock as process_clock
from oncely.testing import (
    POINTS,
    TRANSACTION_POINTS,
    crashes,
    kill_at,
    pass_time,
    points,
    reached,
    redeliver,
    runs_once,
)

ORDER = oncely.Message("order-17")
SOURCES = Path(oncely.__file__).parent
DOCS = Path(__file__).parents[2] / "docs"

CAME_TO = "it came to after_claim, before_completed, after_completed"

Handler = Callable[..., Any]


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Where `ledger` is."""
    return f"sqlite:///{tmp_path / 'ledger.db'}"


@pytest.fixture
def ledger(url: str) -> Iterator[oncely.Ledger]:
    """A ledger that processes share."""
    with closing(oncely.open_ledger(url)) as ledger:
        ledger.migrate()
        yield ledger


@pytest.fixture
def under_once(ledger: oncely.Ledger) -> Callable[[Handler], Handler]:
    """Decorates a handler of messages."""
    return oncely.once(ledger, consumer="billing", key=lambda message: message.id)


@pytest.fixture
def engine(url: str, ledger: oncely.Ledger) -> Iterator[Engine]:
    """Of the ledger's database, with a table for effects."""
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE effects (id TEXT)"))
    yield engine
    engine.dispose()


def _effects(engine: Engine) -> int:
    with engine.begin() as connection:
        return int(connection.execute(text("SELECT count(*) FROM effects")).scalar_one())


def _joined(ledger: oncely.Ledger, engine: Engine) -> Handler:
    @oncely.once(ledger, consumer="billing", key=lambda message, *_: message.id, transaction=engine)
    def charge(message: oncely.Message, connection: Any) -> None:
        connection.execute(text("INSERT INTO effects VALUES (:id)"), {"id": message.id})

    return charge


def _ignore(message: oncely.Message) -> None:
    """A handler that does nothing."""


# ---- kill_at and redeliver ---------------------------------------------------------------------


@pytest.mark.parametrize("point", TRANSACTION_POINTS)
def test_transaction(ledger: oncely.Ledger, engine: Engine, point: str) -> None:
    """A handler in a transaction is killed at each of its points, and has one effect in the end."""
    charge = _joined(ledger, engine)
    kill_at(point, charge, ORDER)
    redeliver(charge, ORDER)
    assert _effects(engine) == 1


@pytest.mark.parametrize("point", POINTS)
def test_lease(under_once: Callable[[Handler], Handler], tmp_path: Path, point: str) -> None:
    """A handler under a lease has its effect again where it was killed between that and its record,
    and nowhere else: the lease is over for `redeliver`, which returns what the handler does.
    """
    log = tmp_path / "log"

    @under_once
    def charge(_: oncely.Message) -> str:
        with log.open("a") as file:
            file.write("x")
        return "charged"

    kill_at(point, charge, ORDER)
    with pytest.raises(oncely.BusyError) if point != "after_completed" else closing(log.open()):
        charge(ORDER)
    assert redeliver(charge, ORDER) == (None if point == "after_completed" else "charged")
    assert log.read_text() == ("xx" if point == "before_completed" else "x")


def test_async_handler(under_once: Callable[[Handler], Handler], tmp_path: Path) -> None:
    """An async handler is killed, redelivered and run, each in a loop of its own."""

    @under_once
    async def charge(message: oncely.Message) -> str:
        await asyncio.sleep(0)
        (tmp_path / message.id).touch()
        return "charged"

    kill_at("before_completed", charge, ORDER)
    assert (tmp_path / "order-17").exists()
    assert redeliver(charge, ORDER) == "charged"
    runs_once(charge, oncely.Message("order-18"))


def test_inside_a_loop(under_once: Callable[[Handler], Handler]) -> None:
    """From an async test an async handler can be killed; what has to be written to run it
    otherwise is told, and no coroutine is left unawaited.
    """

    @under_once
    async def charge(_: oncely.Message) -> None: ...

    async def test() -> None:
        kill_at("before_completed", charge, ORDER)
        for use in (redeliver, runs_once):
            with pytest.raises(oncely.ConfigError, match=r"write `def test_...`, not `async def`"):
                use(charge, ORDER)
        pass_time("1d")
        await charge(ORDER)

    asyncio.run(test())


def test_own_point(under_once: Callable[[Handler], Handler]) -> None:
    """A point of the handler's own is one to be killed at, the nth time as well."""

    @under_once
    def charge(_: oncely.Message) -> None:
        for _number in range(3):
            reached("charged")

    kill_at("charged:3", charge, ORDER)
    with pytest.raises(AssertionError, match=r"did you mean 'charged'"):
        kill_at("charge", charge, oncely.Message("another"))


def _exit(_: oncely.Message) -> None:
    sys.exit(3)


def _exit_at_once(_: oncely.Message) -> None:
    os._exit(3)


def _ended(_: oncely.Message) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _killed_by_others(_: oncely.Message) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail(_: oncely.Message) -> None:
    raise ValueError("no such order")


@pytest.mark.parametrize(
    ("point", "handler", "told"),
    [
        ("afterclaim", _ignore, "_ignore ended without coming there; did you mean 'after_claim'?"),
        (
            "before_commit",
            _ignore,
            f"_ignore ended without coming there; {CAME_TO}",
        ),
        (
            "after_claim:2",
            _ignore,
            f"_ignore ended without coming there 2 times; {CAME_TO}",
        ),
        (
            "before_completed",
            _fail,
            "_fail raised ValueError: no such order before it came there",
        ),
        ("before_completed", _exit, "_exit raised SystemExit: 3 before it came there"),
        (
            "before_completed",
            _exit_at_once,
            "_exit_at_once ended its process with exit code 3 before it came there",
        ),
        ("before_completed", _ended, "_ended was ended by SIGTERM, and not at the point"),
        (
            "before_completed",
            _killed_by_others,
            "_killed_by_others was ended by SIGKILL, and not at the point",
        ),
    ],
)
def test_not_killed(
    under_once: Callable[[Handler], Handler], point: str, handler: Handler, told: str
) -> None:
    """What was not killed at the point fails, with what it did instead in one line."""
    with pytest.raises(AssertionError) as raised:
        kill_at(point, under_once(handler), ORDER)
    assert str(raised.value) == f"kill_at({point!r}): {told}"


def test_not_granted(under_once: Callable[[Handler], Handler]) -> None:
    """So does a message that was handled before, and a handler that asks nobody."""
    charge = under_once(_ignore)
    charge(ORDER)
    with pytest.raises(AssertionError, match=r"did not grant the message; give each test an id"):
        kill_at("before_completed", charge, ORDER)
    with pytest.raises(AssertionError, match=r"coming there: it asked no ledger; decorate it"):
        kill_at("after_claim", _ignore, ORDER)


def test_calls_that_cannot_be_meant() -> None:
    """What is not a handler, or not a point, is told with what to write instead."""
    wrong: Any = _ignore(ORDER)  # type: ignore[func-returns-value]
    with pytest.raises(
        oncely.ConfigError, match=r"^kill_at: None is not .* kill_at\('after_claim'"
    ):
        kill_at("after_claim", wrong, ORDER)
    with pytest.raises(oncely.ConfigError, match=r"^redeliver: None .* redeliver\(charge, message"):
        redeliver(wrong, ORDER)
    with pytest.raises(oncely.ConfigError, match=r"^runs_once: None .* runs_once\(charge, message"):
        runs_once(wrong, ORDER)
    with pytest.raises(oncely.ConfigError, match=r"kill_at: 'after_claim:0' names no point; write"):
        kill_at("after_claim:0", _fail, ORDER)
    swapped: Any = _ignore
    with pytest.raises(oncely.ConfigError, match=r"^kill_at: <function _ignore .* names no point"):
        kill_at(swapped, _ignore, ORDER)


def test_memory_is_refused() -> None:
    """A ledger in memory is gone with the process, which is told."""
    ledger = oncely.open_ledger("memory://")
    charge = oncely.once(ledger, consumer="billing", key=lambda message: message.id)(_ignore)
    with pytest.raises(AssertionError, match=r'is in memory, .* "sqlite:///ledger.db"'):
        kill_at("before_completed", charge, ORDER)


def test_threads(under_once: Callable[[Handler], Handler]) -> None:
    """Threads are no hindrance, neither of the test nor of the handler, and none is warned of."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()

    @under_once
    def charge(_: oncely.Message) -> None:
        threading.Thread(target=time.sleep, args=(3_600,)).start()

    kill_at("before_completed", charge, ORDER)
    with pytest.raises(AssertionError, match=r"without coming there"):
        kill_at("before_commit", charge, oncely.Message("another"))
    over.set()
    thread.join()


def test_what_hangs_is_ended(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A lock that another thread held at the fork stays locked: that ends, and shows where."""
    monkeypatch.setattr(crashes, "_DEADLINE_S", 0.3)
    lock = threading.Lock()
    lock.acquire()

    def stuck(_: oncely.Message) -> None:
        lock.acquire()

    with pytest.raises(AssertionError, match=r"stuck took .* and did not come there; see its stde"):
        kill_at("after_claim", stuck, ORDER)
    assert "in stuck" in capfd.readouterr().err


# ---- runs_once ---------------------------------------------------------------------------------


def test_runs_once(
    ledger: oncely.Ledger, engine: Engine, under_once: Callable[[Handler], Handler]
) -> None:
    """Handlers that are safe pass: under a lease, in a transaction, and with further arguments."""
    runs_once(under_once(_ignore), ORDER)
    runs_once(_joined(ledger, engine), oncely.Message("order-18"))
    assert _effects(engine) == 1

    @oncely.once(ledger, consumer="mails", key=lambda order, **_: order["id"])
    def send(order: dict[str, Any], *, template: str) -> None:
        assert template == "short"

    runs_once(send, {"id": 7}, template="short")


def test_lost_transactions_are_no_runs(ledger: oncely.Ledger, engine: Engine) -> None:
    """A transaction that only lost at its commit, and was done again, is one run."""
    left = [1]

    @event.listens_for(engine, "commit")
    def lose(_: Any) -> None:
        if left:
            left.pop()
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY
            raise OperationalError("COMMIT", {}, error)

    runs_once(_joined(ledger, engine), ORDER)
    assert not left
    assert _effects(engine) == 1


def test_key_of_the_object(ledger: oncely.Ledger) -> None:
    """A key that differs between equal messages is found: each delivery has an object of its own,
    as from a broker.
    """
    seen = []

    def key(message: oncely.Message) -> int:
        seen.append(message)  # No other is to have its place in memory.
        return id(message)

    charge = oncely.once(ledger, consumer="billing", key=key)(_ignore)
    with pytest.raises(AssertionError, match=r"ran 5 times in 5 .*'order-17': see what `key`"):
        runs_once(charge, ORDER)


@pytest.mark.parametrize("handler", [_fail, _exit])
def test_handler_raises(under_once: Callable[[Handler], Handler], handler: Handler) -> None:
    """An error of the handler is told, and what came of each delivery; its own traceback, too."""
    with pytest.raises(AssertionError, match=r"raised .*, in 5 deliveries \(4 at the") as raised:
        runs_once(under_once(handler), ORDER)
    assert isinstance(raised.value.__cause__, ValueError | SystemExit)


def test_no_run(under_once: Callable[[Handler], Handler]) -> None:
    """A message that the ledger had before proves nothing, nor a handler that asks no ledger."""
    charge = under_once(_ignore)
    charge(ORDER)
    with pytest.raises(AssertionError, match=r"did not run in 5 .* had 'order-17' before"):
        runs_once(charge, ORDER)
    with pytest.raises(AssertionError, match=r"_ignore ran in each of 5 .* it asked no ledger; de"):
        runs_once(_ignore, ORDER)


# ---- Time and names ----------------------------------------------------------------------------


@pytest.fixture
def _real_time() -> Iterator[None]:
    yield
    process_clock.undo_passing()


@pytest.mark.usefixtures("_real_time")
def test_time_passes_for_queues(tmp_path: Path) -> None:
    """What a dead process had taken from a queue is delivered again after time has passed."""
    url = f"sqlite:///{tmp_path / 'queue.db'}"
    with closing(oncely.open_transport(url)) as dead, closing(oncely.open_transport(url)) as queue:
        dead.publish("orders", [ORDER])
        assert len(dead.receive("orders", 1, 0)) == 1
        assert queue.receive("orders", 1, 0) == []
        pass_time("1h")
        assert len(queue.receive("orders", 1, 5)) == 1


def test_points_are_those_of_the_source() -> None:
    """Each name is reached somewhere in the source, and stands in the docs with what it leaves."""
    source = "".join(file.read_text() for file in SOURCES.rglob("*.py"))
    page = (DOCS / "explanation" / "crash-points.md").read_text()
    for name in points.KNOWN:
        assert f'reached("{name}")' in source
        assert re.search(rf"^\| `{name}` \|", page, re.MULTILINE), name
