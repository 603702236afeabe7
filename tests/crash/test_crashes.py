"""A process is killed at each named point, in each delivery mode: what is left must be right."""

import json
import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, NamedTuple

import psycopg
import pytest
from tests.crash import writes
from tests.crash.checker import Left, faults, left_in
from tests.crash.means import BY_STEPS, JOINED, LATER_S, POLICIES
from tests.crash.program import Order
from tests.turns import in_turn

from oncely.core.message import Message
from oncely.core.record import State
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.transports.open_transport import open_transport

MESSAGES = 2
"""In each round."""
KILLS = int(os.environ.get("ONCELY_TEST_CRASHES", "1"))
"""At each named point, where all its cases are tried; each at least once."""
STORES = ("sqlite", "postgresql")


class Cast(NamedTuple):
    """Who works in a round, one after another."""

    before: Sequence[str]
    killed: str
    after: Sequence[str]


PROGRAMS: Mapping[str, Cast] = {
    "together": Cast([], "both", ["both"]),
    "consumer": Cast([], "consume", ["relay", "both"]),
    "relay": Cast(["consume"], "relay", ["both"]),
    "bus": Cast([], "bus", ["bus"]),
    "window": Cast([], "together", ["both"]),
}
POINTS: Mapping[str, int] = {
    "after_claim": 1,
    "in_handler": 3,
    "before_completed": 1,
    "after_completed": 1,
    "before_commit": 1,
    "after_commit": 1,
    "between_sends": 1,
    "after_publish": 1,
    "before_acknowledge": 1,
}
"""How often each is passed, at least, for one message."""
IN_TRANSACTIONS = ("before_commit", "after_commit")
"""Points that are passed in work transactions alone."""
IN_SENDING = ("between_sends", "after_publish")
"""Points that who sends passes; a relay passes no others, and a consumer without one not these."""
_DEADLINE_S = 60
_TAKE_LETTERS = "DELETE FROM waiting_messages WHERE set_aside RETURNING own_id, reason"


class Program:
    """The parent of all that is killed."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def is_killed(self, order: Order) -> bool:
        """Whether a child under this order is killed; it ends otherwise when its work is done."""
        stdin, stdout = _pipes(self._process)
        stdin.write(json.dumps(order._asdict()) + "\n")
        stdin.flush()
        answer = json.loads(stdout.readline())
        assert answer is not None, f"{order}: the child has raised; its traceback is on stderr"
        return bool(answer)


def _pipes(process: "subprocess.Popen[str]") -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    """The program, which ends when nobody has orders for it any more."""
    command = [sys.executable, "-m", "tests.crash.program"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Program(process)
        _pipes(process)[0].close()
        assert process.wait(_DEADLINE_S) == 0


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where there is one: what is killed is a process, and not the machine."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    with TemporaryDirectory(dir=memory) as name:
        yield Path(name)


@pytest.fixture
def ledger_url(request: pytest.FixtureRequest, folder: Path) -> str:
    """The URL of a migrated ledger, beside a table for effects without any constraint."""
    if request.param == "sqlite":
        url = f"sqlite:///{folder / 'ledger.db'}"
    else:
        url = str(request.getfixturevalue("postgresql_url"))
    with closing(open_ledger(url)) as ledger:
        ledger.migrate()
    _execute(url, "CREATE TABLE effects (line TEXT)")
    return url


def _execute(url: str, statement: str) -> list[tuple[Any, ...]]:
    """The rows of a statement, by the database's own driver."""
    connection: Any
    if url.startswith("sqlite"):
        connection = sqlite3.connect(url.removeprefix("sqlite:///"))
    else:
        connection = psycopg.connect(url)
    with closing(connection):
        cursor = connection.execute(statement)
        rows = cursor.fetchall() if cursor.description else []
        connection.commit()
        return list(rows)


class Rounds:
    """Publishes messages, kills who handles them, and looks what is left when they are done."""

    def __init__(self, program: Program, url: str, folder: Path) -> None:
        self.is_killed = program.is_killed
        self._url = url
        self._folder = folder
        self._numbers = count(1)

    def run(self, kind: str, mode: str, point: str, nth: int, messages: int = MESSAGES) -> bool:
        """Whether it was killed there. Raises AssertionError for what is wrong afterwards."""
        order, published = self.begin(mode, messages)
        before, killed, after = PROGRAMS[kind]
        for work in before:
            self.is_killed(order._replace(work=work))
        is_killed = self.is_killed(order._replace(work=killed, point=point, nth=nth))
        for work in after:
            self.is_killed(order._replace(work=work, later_s=LATER_S))
        found = faults(mode, published, self.left(order))
        assert not found, f"{kind}, {mode}, killed at {point} the time {nth}: {found}"
        return is_killed

    def begin(self, mode: str, messages: int) -> tuple[Order, Sequence[str]]:
        """An order for a new round, and the ids of what is published in it."""
        number = next(self._numbers)
        published = [f"{number}-{n}" for n in range(messages)]
        queue = self._folder / f"queue{number}.db"
        with closing(open_transport(f"sqlite:///{queue}")) as transport:
            transport.publish("in", [Message(message_id, b"{}") for message_id in published])
            transport.subscribe("out", [])
        log = self._folder / f"effects{number}.jsonl"
        return Order("both", mode, self._url, str(queue), str(log)), published

    def left(self, order: Order) -> Left:
        """What is left of a round; its files are removed."""
        rows = _execute(self._url, "DELETE FROM effects RETURNING line")
        log = Path(order.log)
        outside = log.read_text().splitlines() if log.exists() else []
        letters = _execute(self._url, _TAKE_LETTERS)
        left = left_in(Path(order.queue), [line for [line] in rows] + outside, letters)
        for file in (log, *self._folder.glob(f"{Path(order.queue).name}*")):
            file.unlink(missing_ok=True)
        return left


@pytest.fixture
def rounds(program: Program, ledger_url: str, folder: Path) -> Iterator[Rounds]:
    """Rounds over one ledger, in which nothing is unsettled in the end."""
    yield Rounds(program, ledger_url, folder)
    with closing(open_ledger(ledger_url)) as ledger:
        assert ledger.mailbox.backlog().waiting == 0
        assert _unsettled(ledger) == []


def _unsettled(ledger: Ledger) -> list[tuple[str, State]]:
    """All but what is completed, what has failed, and what is in doubt and not to be repeated."""
    settled = {State.COMPLETED, State.FAILED}
    return [
        (mode, state)
        for mode, state in ledger.counts()
        if state not in settled and (mode, state) != ("at_most_once", State.PROCESSING)
    ]


def _modes(kind: str) -> Sequence[str]:
    """The idempotence service has no steps."""
    return [mode for mode in POLICIES if (kind, mode) != ("bus", BY_STEPS)]


def _cases(point: str) -> Sequence[tuple[str, str, str, str, int]]:
    """All stores, programs, modes and times in which a point is passed, in any order: the days go
    through them.
    """
    nths = range(1, POINTS[point] * MESSAGES + 1)
    cases = [
        (store, point, kind, mode, nth)
        for store in STORES
        for kind in PROGRAMS
        for mode in _modes(kind)
        if _passes(kind, mode, point)
        for nth in nths
    ]
    random.Random(point).shuffle(cases)
    return cases


def _passes(kind: str, mode: str, point: str) -> bool:
    if kind == "window" or (point in IN_TRANSACTIONS and mode != JOINED):
        return False
    return kind not in ("consumer", "relay") or (kind == "relay") == (point in IN_SENDING)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("ledger_url", "point", "kind", "mode", "nth"),
    [case for point in POINTS for case in in_turn(point, _cases(point))],
    indirect=["ledger_url"],
)
def test_killed_at_each_point(rounds: Rounds, point: str, kind: str, mode: str, nth: int) -> None:
    """Whatever is killed where: at most, at least or exactly one effect, as the mode promises;
    what was deferred is sent after its effect, all of it in its order, each under one id.
    """
    for _ in range(-(-KILLS // len(_cases(point)))):
        assert rounds.run(kind, mode, point, nth), "it never came there"


def _walks(kind: str) -> Sequence[tuple[str, str, str]]:
    """Stores and modes in which a program is killed before each write. To PostgreSQL the others
    say nothing that these do not; it is one of these that goes there alone.
    """
    stores = {"together": ["postgresql"], "relay": STORES}.get(kind, ["sqlite"])
    return [(store, kind, mode) for store in stores for mode in _modes(kind)]


@pytest.mark.parametrize(
    ("ledger_url", "kind", "mode"),
    [
        walk
        for kind in PROGRAMS
        if kind != "window"
        for walk in in_turn(f"each write of {kind}", _walks(kind))
    ],
    indirect=["ledger_url"],
)
def test_killed_before_each_write(rounds: Rounds, kind: str, mode: str) -> None:
    """The same holds before every single write on a message's way, named or not."""
    writes_seen = 0
    while rounds.run(kind, mode, writes.POINT, writes_seen + 1, messages=1):
        writes_seen += 1
    assert writes_seen > 5


IN_WINDOWS = [
    ("at_least_once", ("after_claim", "before_completed", "after_completed", "before_acknowledge")),
    ("at_most_once", ("after_claim", "in_handler", "before_completed")),
    (JOINED, ("in_handler", "after_completed", "before_commit", "after_commit", "between_sends")),
]


@pytest.mark.parametrize(
    ("ledger_url", "mode", "point"),
    [
        ("sqlite", mode, point)
        for mode, points in IN_WINDOWS
        for point in in_turn(f"a window {mode}", points)
    ],
    indirect=["ledger_url"],
)
def test_killed_in_a_window(rounds: Rounds, mode: str, point: str) -> None:
    """The same holds for messages that are claimed, completed and committed together."""
    nth = 1
    # The first message comes alone, which shows how many may come together.
    while rounds.run("window", mode, point, nth, messages=4):
        nth += 1
    assert nth > 2


@pytest.mark.parametrize("ledger_url", in_turn("poison", STORES), indirect=True)
def test_poison(rounds: Rounds) -> None:
    """A message that kills whoever handles it is set aside after its tries, and one death more: the
    first was in company. The others go on.
    """
    order, (poison, other) = rounds.begin("at_least_once", 2)
    deadly = order._replace(tries=3, point=f"handling {poison}", nth=1)
    deaths = 0
    while deaths < 9 and rounds.is_killed(deadly._replace(later_s=LATER_S)):
        deaths += 1
    left = rounds.left(order)
    assert deaths == 4
    assert "its worker died 3 times" in left.dead[poison]
    assert faults(order.mode, [other], left) == []
