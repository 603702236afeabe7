"""The bridge: from a broker into a ledger's queue or into files, killed and cut off on the way."""

import json
import logging
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest

from oncely import (
    BridgeReport,
    ConfigError,
    Consumer,
    Ledger,
    Message,
    StoreError,
    StoreUnavailable,
    TransportError,
    bridge,
    open_ledger,
    open_transport,
)
from oncely.core.waiting import queue_named
from oncely.ledger.mailbox import LedgerMailbox
from oncely.sources import open_source
from oncely.testing.crashes import killed_at

QUEUE = "orders"
POINTS = ("bridge_received", "bridge_stored", "bridge_acknowledged")


@pytest.fixture(params=["sqlite", "postgresql", "mysql"])
def sql_url(request: pytest.FixtureRequest) -> str:
    """A ledger in each kind of database."""
    return str(request.getfixturevalue(f"{request.param}_ledger_url"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that is not there yet, and neither is the one that it is in."""
    return tmp_path / "out" / "messages"


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """All lines, as a program reads them that knows nothing of hidden files."""
    return [
        json.loads(line)
        for file in sorted(folder.glob("[!.]*"))
        for line in file.read_text().splitlines()
    ]


def drained(url: str, ledger: Ledger | None = None, **settings: Any) -> BridgeReport:
    with closing(open_source(url, QUEUE)) as source:
        return bridge(source, ledger, drain=True, **settings)


def publish(url: str, *messages: Message) -> None:
    with closing(open_transport(url)) as transport:
        transport.publish(QUEUE, messages)


def is_drained(url: str) -> bool:
    with closing(open_transport(url)) as transport:
        return transport.is_drained(QUEUE)


def handled(ledger_url: str) -> list[Message]:
    """The messages that a consumer of the ledger's queue handles."""
    found: list[Message] = []
    with closing(open_ledger(ledger_url)) as ledger:
        Consumer(ledger_url, QUEUE).idempotent(ledger, "shop").consume(found.append, drain=True)
    return found


class OwnSource:
    """A source as others write it, which cannot tell whether it is empty. Its first batches are
    those that are given, of which an error is raised.
    """

    def __init__(self, *batches: Sequence[Message] | Exception) -> None:
        self.batches = [*batches]
        self.acknowledged: list[Message] = []

    def receive(self, max_messages: int, wait_s: float) -> Sequence[Message]:
        self.last = self.batches.pop(0) if self.batches else ()
        if isinstance(self.last, Exception):
            raise self.last
        return self.last

    def acknowledge(self) -> None:
        assert not isinstance(self.last, Exception)
        if any(message.id == "lost" for message in self.last):
            raise TransportError("the connection was lost")
        self.acknowledged += self.last

    def close(self) -> None:
        """There is nothing to close."""


# ---- What is moved -------------------------------------------------------------------------------


def test_messages_arrive_as_they_were_published(
    rabbitmq_url: str, sql_url: str, folder: Path
) -> None:
    """Every field is the same for the consumer of the ledger's queue, and in the files."""
    at = datetime(2025, 3, 1, 12, 30, 0, 123456, timezone(timedelta(hours=2)))
    whole = Message("é", b"\xff\0", "order.made", {"a": "ü\u2028"}, "shop", at, "x/y", key="k")
    with closing(open_ledger(sql_url)) as ledger:
        publish(rabbitmq_url, whole, Message("b", b'{"n": 1}'))
        assert drained(rabbitmq_url, ledger) == BridgeReport(received=2, stored=2)
    assert sorted(handled(sql_url), key=lambda message: message.id) == [
        Message("b", b'{"n": 1}'),
        whole,
    ]
    publish(rabbitmq_url, whole, Message("b", "é".encode()), Message(""))
    drained(rabbitmq_url, files=folder)
    nothing: dict[str, Any] = {
        "type": None,
        "headers": {},
        "source": None,
        "time": None,
        "key": None,
    }
    assert lines_of(folder) == [
        {
            "id": "é",
            "type": "order.made",
            "body_base64": "/wA=",
            "headers": {"a": "ü\u2028"},
            "source": "shop",
            "time": at.astimezone(UTC).isoformat(),
            "key": "k",
        },
        {"id": "b", "body": "é", **nothing},
        {"id": None, "body": "", **nothing},
    ]
    assert is_drained(rabbitmq_url)


UNUSABLE = [
    Message("x" * 300),
    Message("a\0b"),
    Message("a\ud800b"),
    Message("typed", type="a\0\ud800"),
    Message("keyed", key="a\0"),
    Message(""),
]


def test_an_unusable_message_is_for_the_consumer(sql_url: str, folder: Path) -> None:
    """Nothing is lost, and nothing stops the others: by default such a message is a dead letter,
    which has the id in its headers. A file holds each as it was.
    """
    never = datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14)))
    usable = Message("good", time=never)
    with closing(open_ledger(sql_url)) as ledger:
        bridge(OwnSource([*UNUSABLE, usable]), ledger, drain=True)
        assert handled(sql_url) == [usable]
        letters = [letter.message for letter in ledger.dead("shop")]
        assert [m.headers.get("oncely-id", "") for m in letters] == [m.id for m in UNUSABLE]
        assert {m.headers.get("oncely-reason") for m in letters} == {
            *("too long id", "id with NUL", "id with a lone surrogate", "type with NUL"),
            *("key with NUL", None),
        }
    bridge(OwnSource([*UNUSABLE, usable]), files=folder, drain=True)
    assert [line["id"] or "" for line in lines_of(folder)] == [m.id for m in [*UNUSABLE, usable]]
    assert lines_of(folder)[-1]["time"] is None


# ---- Killed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", POINTS)
def test_killed_on_the_way_into_a_ledger(
    rabbitmq_url: str, sqlite_ledger_url: str, point: str
) -> None:
    """Nothing is lost, and the consumer handles each message once: copies have its id."""
    ids = [f"m{n}" for n in range(200)]
    publish(rabbitmq_url, *map(Message, ids))

    def work() -> None:
        with closing(open_ledger(sqlite_ledger_url)) as ledger:
            drained(rabbitmq_url, ledger, batch=50)

    assert killed_at(point, work)
    work()
    assert sorted(message.id for message in handled(sqlite_ledger_url)) == sorted(ids)
    assert is_drained(rabbitmq_url)


@pytest.mark.parametrize("point", [*POINTS, "bridge_written"])
def test_killed_on_the_way_into_files(rabbitmq_url: str, folder: Path, point: str) -> None:
    """Every message is in a file. What was not whole is hidden, and what was stored and not
    acknowledged is there twice.
    """
    ids = [f"m{n}" for n in range(200)]
    publish(rabbitmq_url, *map(Message, ids))
    assert killed_at(point, lambda: drained(rabbitmq_url, files=folder, batch=50))
    first = [line["id"] for line in lines_of(folder)]
    assert bool(first) is (point in ("bridge_stored", "bridge_acknowledged"))
    assert len([*folder.glob(".*")]) == (point == "bridge_written")
    drained(rabbitmq_url, files=folder, batch=50)
    assert Counter(line["id"] for line in lines_of(folder)) == Counter(ids) + Counter(
        first if point == "bridge_stored" else []
    )
    assert is_drained(rabbitmq_url)


# ---- Cut off -------------------------------------------------------------------------------------


def test_a_broker_that_is_away(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One that was never reached is an error at once. Later the bridge tries again: it is told
    when that begins and when it is over, and what could not be acknowledged comes twice.
    """
    away = TransportError("nobody is there")
    with pytest.raises(TransportError, match="nobody is there"):
        bridge(OwnSource(away), files=folder, drain=True)
    source = OwnSource([Message("a")], away, away, [Message("lost")], [Message("c")])
    told: list[str | None] = []
    with caplog.at_level(logging.INFO, "oncely.bridge"):
        report = bridge(
            source, files=folder, drain=True, on_progress=lambda r: told.append(r.error)
        )
    assert report == BridgeReport(received=3, stored=3)
    assert [line["id"] for line in lines_of(folder)] == ["a", "lost", "c"]
    assert [message.id for message in source.acknowledged] == ["a", "c"]
    events = [record.__dict__["event"] for record in caplog.records]
    assert events == ["bridge_stalled", "acknowledgements_lost", "bridge_recovered"]
    assert told == [None, *["TransportError: nobody is there"] * 2, None, None]


def test_a_place_that_is_away(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be written is not acknowledged, and is written when that can be done."""
    source = OwnSource([Message("a")], [Message("b")])

    def change(report: BridgeReport) -> None:
        if report.received == 1 and report.error is None:
            shutil.rmtree(folder)
        elif report.error is not None:
            assert "cannot be written: No such file or directory" in report.error
            assert [message.id for message in source.acknowledged] == ["a"]
            folder.mkdir()

    report = bridge(source, files=folder, drain=True, on_progress=change)
    assert report == BridgeReport(received=2, stored=2)
    assert [line["id"] for line in lines_of(folder)] == ["b"]
    assert [message.id for message in source.acknowledged] == ["a", "b"]
    assert [r.__dict__["event"] for r in caplog.records] == ["bridge_stalled", "bridge_recovered"]


def test_a_lost_reply(sql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit of which nobody knows is repeated, and puts nothing in twice."""
    keep, replies = LedgerMailbox.keep, [StoreUnavailable("the reply is lost")]

    def keep_and_lose(*arguments: Any) -> None:
        keep(*arguments)
        if replies:
            raise replies.pop()

    monkeypatch.setattr(LedgerMailbox, "keep", keep_and_lose)
    source = OwnSource([Message("a"), Message("b")])
    with closing(open_ledger(sql_url)) as ledger:
        assert bridge(source, ledger, QUEUE, drain=True).stored == 2
        assert ledger.mailbox.backlog(queue_named(QUEUE)).waiting == 2
    assert not replies


def test_stopped_with_a_batch_in_hand(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be stored stays the broker's."""
    source, stop = OwnSource([Message("a")]), threading.Event()

    def refuse(*_: object) -> None:
        stop.set()
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "rename", refuse)
    report = bridge(source, files=folder, stop=stop)
    assert (report.received, report.stored, source.acknowledged) == (1, 0, [])
    assert [*folder.iterdir()] == []


def test_what_never_can_be_stored_ends_the_bridge(tmp_path: Path) -> None:
    """A ledger without tables is reported before any message is taken."""
    source = OwnSource([Message("a")])
    with closing(open_ledger(f"sqlite:///{tmp_path}/ledger.db")) as ledger:
        with pytest.raises(StoreError):
            bridge(source, ledger, drain=True)
        assert len(source.batches) == 1


def mistakes() -> Sequence[tuple[Callable[[], object], str]]:
    ledger = open_ledger("memory://")
    return [
        (lambda: bridge(OwnSource()), "name one place"),
        (lambda: bridge(OwnSource(), ledger, files="x"), "name one place"),
        (lambda: bridge(OwnSource(), ledger, "q" * 300), "write a shorter name"),
        (lambda: bridge(OwnSource(), ledger, batch=0), "batch: 0 is not a whole number"),
        (lambda: bridge(OwnSource(), "x"), "write open_ledger"),  # type: ignore[arg-type]
        (lambda: bridge(OwnSource(), files="s3://b/x"), "files: 's3://b/x' is not a folder"),
        (lambda: bridge(OwnSource(), files="/dev/null/x"), "files: '/dev/null/x' cannot be made"),
    ]


@pytest.mark.parametrize("number", range(7))
def test_mistakes(number: int) -> None:
    """Each is told in one line, before anything is received."""
    call, said = mistakes()[number]
    with pytest.raises(ConfigError, match=said):
        call()


def test_a_ledger_without_queues(redis_url: str) -> None:
    """Redis keeps no messages."""
    with closing(open_ledger(redis_url)) as ledger, pytest.raises(ConfigError, match="no queues"):
        bridge(OwnSource(), ledger)
