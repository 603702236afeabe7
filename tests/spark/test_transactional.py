"""Mode `transactional`: claims, what handlers write and send, and completions, in one commit."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.exc import SQLAlchemyError
from tests.conditions import LIMIT_S
from tests.conformance.conftest import url_of
from tests.records import granted, record_of
from tests.spark.tasks import at_once, batches_of, book, is_killed_at, key_of, run_task, task_of
from tests.turns import in_turn

from oncely import Message, Record, Retry, State, open_ledger
from oncely._util.crash_points import arm, disarm
from oncely.core.errors import ConfigError, ContentionError
from oncely.spark.modes.open_task import open_task
from oncely.spark.sink.channel import Stopped, TaskChannel
from oncely.spark.sink.counts import Counts
from oncely.spark.sink.quarantine import Quarantine
from oncely.spark.sink.sink_options import read_options
from oncely.stores.open_store import open_sessions

INSERT = text("INSERT INTO effects (name) VALUES (:name)")


class Place:
    """A ledger in a database, with a table of effects in it."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.ledger = open_ledger(url)
        self.ledger.migrate()
        self.begins = open_sessions(url)
        self.engine: Engine = self.begins.kw["bind"]
        with self.engine.begin() as connection:
            connection.execute(text("CREATE TABLE effects (name VARCHAR(255))"))

    def close(self) -> None:
        self.ledger.close()
        self.engine.dispose()

    def run(self, handler: Callable[..., Any], *ids: str, **options: Any) -> Counts:
        return run_task(self.ledger, handler, self.folder, ids, 1_000, self.begins, **options)

    def effects(self) -> Counter[str]:
        with self.engine.connect() as connection:
            return Counter(connection.execute(text("SELECT name FROM effects")).scalars())

    def record(self, id_: str) -> Record:
        return record_of(self.ledger, key_of(id_))

    def waiting(self) -> Counter[str]:
        """How many messages wait to be sent, by the message whose handler sent them."""
        taken = self.ledger.mailbox.take(10_000, "1ms")
        return Counter(message.parent.message_id for message in taken)


_SERVERS = in_turn("server of transactional tasks", ["postgresql", "mysql"])


@pytest.fixture(params=["sqlite", *_SERVERS])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with closing(Place(url_of(request.param, request, tmp_path), tmp_path)) as place:
        yield place


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with closing(Place(f"sqlite:///{tmp_path / 'ledger.db'}", tmp_path)) as place:
        yield place


@pytest.fixture
def commits() -> Iterator[list[None]]:
    """One for each commit of handlers."""
    seen: list[None] = []
    arm("after_commit", lambda: seen.append(None))
    yield seen
    disarm()


# ---- Chunks ------------------------------------------------------------------------------------


def test_a_chunk_is_one_transaction(place: Place, commits: list[None]) -> None:
    """Effects, what is sent, and records are stored together; copies are duplicates."""
    ids = [f"m{number}" for number in range(250)]
    counts = place.run(book, *ids, *ids[:20], chunk="100")
    assert (counts.handled, counts.duplicates_input) == (250, 20)
    assert place.effects() == dict.fromkeys(ids, 1)
    assert place.waiting() == dict.fromkeys(ids, 1)
    assert place.ledger.counts() == {("tests", State.HANDLED): 250}
    assert len(commits) <= 5
    again = place.run(book, *ids)
    assert (again.handled, again.duplicates_ledger) == (0, 250)
    assert place.effects().total() == 250


def test_one_that_fails_is_alone(place: Place) -> None:
    """The others of its chunk are stored, and it is tried as the policy says."""
    tried: list[str] = []

    def handle(message: Message, session: Any) -> None:
        book(message, session)
        if message.id == "b":
            tried.append(message.id)
            raise ValueError("never")
        if message.id == "c" and message.claim is not None and message.claim.attempts == 1:
            raise Retry(delay="10ms")

    counts = place.run(handle, "a", "b", "c", "d", drains=True, tries="3", backoff="10ms")
    assert (counts.handled, counts.failed) == (3, 1)
    assert place.effects() == {"a": 1, "c": 1, "d": 1}
    assert place.waiting() == {"a": 1, "c": 1, "d": 1}
    record = place.record("b")
    assert (record.state, record.exhausted, record.attempts) == (State.FAILED, True, 3)
    assert record.error == "ValueError: never"
    assert [place.record(id_).attempts for id_ in "acd"] == [1, 2, 1]
    tried.clear()
    assert place.run(handle, "b").failed == 1
    assert not tried


def test_results_and_steps(place: Place) -> None:
    """A result is kept with the record; a step's, only with its transaction."""
    ran: list[str] = []

    def handle(message: Message, session: Any) -> dict[str, Any]:
        message.step("count", lambda: ran.append(message.id))
        book(message, session)
        if len(ran) < 3:
            raise ValueError("not yet")
        return {"key": message.idempotency_key}

    assert place.run(handle, "a", drains=True, results="keep", backoff="10ms").handled == 1
    assert ran == ["a"] * 3, "what the transaction undid was not done"
    assert place.record("a").result["key"]
    assert place.effects() == {"a": 1}


# ---- Whose fault it is -------------------------------------------------------------------------


def test_what_the_database_refuses_is_the_messages(place: Place) -> None:
    """An error of its statements is the failure of one message."""

    def handle(message: Message, session: Any) -> None:
        book(message, session)
        if message.id == "b":
            session.execute(text("SELECT nothing FROM nowhere"))

    counts = place.run(handle, "a", "b", "c", tries="1")
    assert (counts.handled, counts.failed) == (2, 1)
    assert place.effects() == {"a": 1, "c": 1}


def test_a_database_that_is_away_is_no_try(here: Place) -> None:
    """Whatever it says, and though it is back at once: no handler has run."""
    tries = iter([OSError("too many connections")])

    def be_away(_: Connection) -> None:
        for error in tries:
            raise error

    event.listen(here.engine, "begin", be_away)
    with pytest.raises(OSError, match="too many connections"):
        here.run(book, "1")
    assert here.ledger.find(key_of("1")) is None
    assert here.run(book, "1", tries="1").handled == 1


def test_a_swallowed_error(postgresql_url: str, tmp_path: Path) -> None:
    """PostgreSQL stores nothing after an error; that is told of the message that met it."""

    def handle(message: Message, session: Any) -> None:
        book(message, session)
        if message.id == "b":
            with suppress(SQLAlchemyError):
                session.execute(text("SELECT nothing FROM nowhere"))

    with closing(Place(postgresql_url, tmp_path)) as place:
        counts = place.run(handle, "a", "b", "c", tries="1")
        assert (counts.handled, counts.failed) == (2, 1)
        assert place.effects() == {"a": 1, "c": 1}
        assert place.record("b").error


def test_a_lost_race_is_no_try(place: Place) -> None:
    """A transaction that only lost against another is begun again, and no attempt is counted."""
    lost: list[str] = []

    def lose_first() -> None:
        if len(lost) < 3:
            lost.append("lost")
            raise ContentionError("others were faster")

    arm("before_commit", lose_first)
    try:
        counts = place.run(book, "a", tries="1")
    finally:
        disarm()
    assert (counts.handled, len(lost)) == (1, 3)
    assert place.record("a").attempts == 1
    assert place.effects() == {"a": 1}


# ---- Others ------------------------------------------------------------------------------------


def test_two_tasks_over_the_same_messages(place: Place) -> None:
    """Each message has one effect, and each delivery one count; neither task waits for ever."""
    ids = [f"m{number}" for number in range(300)]
    tasks = [
        task_of(place.ledger, book, place.folder / name, None, place.begins, chunk="50", since="0")
        for name in ("one", "other")
    ]
    at_once(tasks, batches_of(ids, 50), batches_of(ids[::-1], 50))
    total = sum((task.counts for task in tasks), Counts())
    assert (total.received, total.handled, total.duplicates_input) == (600, 300, 300)
    assert place.effects() == dict.fromkeys(ids, 1)


def test_nothing_is_locked_while_it_waits(place: Place) -> None:
    """What another worker holds is waited for outside of any transaction."""
    claim = granted(place.ledger.claim(key_of("b"), "30s"))
    done: list[Counts] = []
    waits = threading.Thread(target=lambda: done.append(place.run(book, "a", "b", "c", since="0")))
    waits.start()
    while place.effects() != {"a": 1, "c": 1}:
        assert waits.is_alive()
    # The other's own writes go through, and so do anybody's.
    with place.engine.begin() as connection:
        connection.execute(INSERT, {"name": "b"})
    place.ledger.complete(claim)
    waits.join(LIMIT_S)
    assert [(counts.handled, counts.duplicates_input) for counts in done] == [(2, 1)]
    assert place.effects() == {"a": 1, "b": 1, "c": 1}


def test_a_task_that_is_stopped(here: Place) -> None:
    """What it was at is undone: nothing is left claimed, and the next run can start at once."""
    channel = TaskChannel(None, "")

    def handle(message: Message, session: Any) -> None:
        book(message, session)
        if message.id == "b":
            channel.stopping.set()

    task = task_of(here.ledger, handle, here.folder, channel, here.begins)
    with pytest.raises(Stopped):
        task.run(batches_of("abc"))
    assert here.ledger.counts() == {}
    assert here.effects() == {}
    assert here.run(book, "a", "b", "c").handled == 3


# ---- Crashes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "nth", "stored"),
    [("in_handler", 3, 0), ("in_handler", 8, 5), ("before_commit", 1, 0), ("after_commit", 1, 5)],
)
def test_a_crash_doubles_nothing(place: Place, point: str, nth: int, stored: int) -> None:
    """A chunk is stored whole or not at all; the next run does the rest at once."""
    ids = [f"m{number}" for number in range(10)]

    def work() -> None:
        begins = open_sessions(place.url)
        run_task(open_ledger(place.url), book, place.folder, ids, 5, begins)

    assert is_killed_at(point, nth, work)
    assert place.effects().total() == stored
    assert place.waiting().total() == stored
    counts = place.run(book, *ids)
    assert (counts.handled, counts.duplicates_ledger) == (10 - stored, stored)
    assert place.effects() == dict.fromkeys(ids, 1)
    assert {place.record(id_).attempts for id_ in ids} == {1}


# ---- Settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "handler", "wrong"),
    [
        ("transactional", "append", r"append takes .*; write `def append\(message, session\):`"),
        ("leased", "book", r"book takes .*; write `def book\(message\):`"),
    ],
)
def test_handlers_that_cannot_be_meant(here: Place, mode: str, handler: str, wrong: str) -> None:
    """A handler of another mode is refused before anything is claimed."""
    read = read_options(
        {"consumer": "tests", "ledger": here.url, "mode": mode}
        | {"handler": f"tests.spark.tasks:{handler}"}
    )
    with pytest.raises(ConfigError, match=wrong):
        open_task(read, Quarantine(str(here.folder), "0").add, TaskChannel(None, ""))


# ---- On Spark ----------------------------------------------------------------------------------


def test_on_spark(frame: Callable[..., Any], write: Callable[..., Counts], here: Place) -> None:
    """Copies in several tasks, one of which is killed: one effect each, and one message sent."""
    ids = [f"m{number}" for number in range(300)]
    rows = [(id_, '{"breaks": true}' if id_ == "m7" else "{}") for id_ in [*ids, *ids[:50]]]
    options = {"mode": "transactional", "ledger": here.url, "since": "0", "backoff": "0s"}
    counts = write(frame(*rows, partitions=3), "book_and_be_killed", **options)
    assert (counts.received, counts.handled + counts.duplicates_input) == (350, 350)
    assert here.effects() == dict.fromkeys(ids, 1)
    assert here.waiting() == dict.fromkeys(ids, 1)


# ---- Handlers that end their transaction ---------------------------------------------------------


def _commits(session: Any, id_: str) -> None:
    session.execute(INSERT, {"name": id_})
    session.execute(text("COMMIT"))


def _rolls_back_and_stores(session: Any, id_: str) -> None:
    session.execute(text("ROLLBACK"))
    session.execute(INSERT, {"name": id_})
    session.execute(text("COMMIT"))


@pytest.mark.parametrize("ends", [_commits, _rolls_back_and_stores])
@pytest.mark.parametrize("ids", [["a"], ["a", "b", "c"]], ids=["alone", "in a chunk"])
def test_transaction_ended_inside(
    place: Place, ends: Callable[[Any, str], None], ids: list[str]
) -> None:
    """What a handler has stored by itself is in doubt, with all of its chunk."""
    runs: Counter[str] = Counter()

    def handle(message: Message, session: Any) -> None:
        runs[message.id] += 1
        if message.id == ids[-1]:
            ends(session, message.id)
        else:
            session.execute(INSERT, {"name": message.id})

    counts = place.run(handle, *ids, lease="300ms", on_in_doubt="hold")
    assert (counts.handled, counts.in_doubt) == (0, len(ids))
    assert {place.record(id_).state for id_ in ids} == {State.PROCESSING}
    assert set(runs.values()) == {1}
    assert place.effects()[ids[-1]] == 1
    later = place.run(handle, "later", lease="300ms")
    assert (later.handled, place.effects()["later"]) == (1, 1)
