"""The bridge: from a broker into a ledger's queue or into files, killed and cut off on the way."""

import json
import logging
import shutil
import threading
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url
from tests.integration.drivers import Psycopg

from oncely import (
    BridgeReport,
    ConfigError,
    Consumer,
    Message,
    StoreError,
    TransportError,
    bridge,
    open_ledger,
)

QUEUE = "orders"
UNUSABLE = {
    "too long id": Message("x" * 300),
    "id with NUL": Message("a\0b"),
    "id with a lone surrogate": Message("a\ud800b"),
    "type with NUL": Message("typed", type="a\0\ud800"),
    "key with NUL": Message("keyed", key="a\0"),
    None: Message(""),
}


@pytest.fixture(params=["sqlite", "postgresql", "mysql"])
def ledger_url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_ledger_url"))


class OwnSource:
    """A source as others write it: of its first batches an error is raised, and one is not
    acknowledged.
    """

    def __init__(self, *batches: Sequence[Message] | Exception) -> None:
        self.batches = [*batches]
        self.last: Sequence[Message] = ()
        self.acknowledged: list[Message] = []

    def receive(self, max_messages: int, wait_s: float) -> Sequence[Message]:
        batch = self.batches.pop(0) if self.batches else ()
        if isinstance(batch, Exception):
            raise batch
        self.last = batch
        return batch

    def acknowledge(self) -> None:
        if self.last[0].id == "lost":
            raise TransportError("the connection was lost")
        self.acknowledged += self.last

    def close(self) -> None:
        """There is nothing to close."""


def lines_of(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("[!.]*"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def handled(url: str) -> list[Message]:
    """The messages that a consumer of the ledger's queue handles."""
    found: list[Message] = []
    with closing(open_ledger(url)) as ledger:
        Consumer(url, QUEUE).idempotent(ledger, "shop").consume(found.append, drain=True)
    return found


def test_messages_stay_as_they_are(ledger_url: str, tmp_path: Path) -> None:
    """All fields are those that came, in a ledger and in files. A message without an id that can be
    used is a dead letter by default, which has that id in its headers; a file holds it as it is.
    """
    at = datetime(2025, 3, 1, 12, 30, 0, 123456, timezone(timedelta(hours=2)))
    never = datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14)))
    whole = Message("é", b"\xff\0", "order.made", {"a": "ü\u2028"}, "shop", at, "x/y", key="k")
    messages = [whole, Message("b", "é".encode(), time=never), *UNUSABLE.values()]
    with closing(open_ledger(ledger_url)) as ledger:
        assert bridge(OwnSource(messages), ledger, drain=True) == BridgeReport(len(messages))
        assert sorted(handled(ledger_url), key=lambda each: each.id) == [messages[1], whole]
        letters = [letter.message.headers for letter in ledger.dead("shop")]
    assert {h.get("oncely-reason"): h.get("oncely-id", "") for h in letters} == {
        reason: message.id for reason, message in UNUSABLE.items()
    }
    bridge(OwnSource(messages), files=tmp_path / "deep" / "out", drain=True)
    first, second, *others = lines_of(tmp_path / "deep" / "out")
    assert first == {
        "id": "é",
        "type": "order.made",
        "body_base64": "/wA=",
        "headers": {"a": "ü\u2028"},
        "source": "shop",
        "time": at.astimezone(UTC).isoformat(),
        "key": "k",
    }
    nothing: dict[str, Any] = {"type": None, "headers": {}, "source": None, "time": None}
    assert second == {"id": "b", "body": "é", "key": None, **nothing}
    assert [line["id"] or "" for line in others] == [each.id for each in UNUSABLE.values()]


def test_what_an_encoding_lacks(postgresql: str, psql: Psycopg) -> None:
    """A message with letters that the database lacks becomes a dead letter, with its id, its body
    and the database's words; no other one waits for it.
    """
    psql.execute("CREATE DATABASE bridged ENCODING LATIN1 LOCALE 'C' TEMPLATE template0")
    url = make_url(postgresql).set(database="bridged").render_as_string(hide_password=False)
    foreign = Message("☃", b"\xff", "счёт", {"ü": "☃"}, "☃", None, "☃/☃", key="☃")
    messages = [Message("a"), Message("é"), foreign, Message("b", key="☃"), Message("c")]
    try:
        with closing(open_ledger(url)) as ledger:
            ledger.migrate()
            source = OwnSource(messages)
            assert bridge(source, ledger, drain=True) == BridgeReport(5)
            assert len(source.acknowledged) == 5
            assert [message.id for message in handled(url)] == ["a", "é", "c"]
            letters = {each.message.headers["oncely-id"]: each.message for each in ledger.dead()}
        assert letters.keys() == {"☃", "b"}
        assert "LATIN1" in letters["b"].headers["oncely-reason"]
        letter = letters["☃"]
        assert (letter.body, letter.headers["ü"]) == (b"\xff", "☃")
        assert (letter.source, letter.key) == (r"\u2603", r"\u2603")
    finally:
        psql.execute("DROP DATABASE bridged WITH (FORCE)")


def test_what_no_ledger_holds(mysql_ledger_url: str) -> None:
    """A body for which the server has no room ends the bridge when all others are stored; nothing
    is acknowledged.
    """
    source = OwnSource([Message("a"), Message("b", b"x" * 13_000_000), Message("c")])
    with closing(open_ledger(mysql_ledger_url)) as ledger:
        with pytest.raises(StoreError, match="raise max_allowed_packet"):
            bridge(source, ledger, drain=True)
        assert not source.acknowledged
        assert [message.id for message in handled(mysql_ledger_url)] == ["a", "c"]


def test_what_is_away_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is told when that begins and when it is over, and nothing is acknowledged meanwhile. But
    what was never there is an error.
    """
    away, folder = TransportError("nobody is there"), tmp_path / "out"
    with pytest.raises(TransportError, match="nobody is there"):
        bridge(OwnSource(away), files=folder, drain=True)
    source = OwnSource([Message("a")], away, away, [Message("lost")], [Message("c")])
    told: list[str] = []

    def note(report: BridgeReport) -> None:
        told.append(report.error or "")
        if report.stored == 2 and report.error is None:
            shutil.rmtree(folder)
        elif report.stored == 2:
            assert [message.id for message in source.acknowledged] == ["a"]
            folder.mkdir()

    with caplog.at_level(logging.INFO, "oncely.bridge"):
        assert bridge(source, files=folder, drain=True, on_progress=note) == BridgeReport(3)
    assert [line["id"] for line in lines_of(folder)] == ["c"]
    assert [message.id for message in source.acknowledged] == ["a", "c"]
    stalled = ["bridge_stalled", "bridge_recovered"]
    events = [record.__dict__["event"] for record in caplog.records]
    assert events == ["bridge_stalled", "acknowledgements_lost", "bridge_recovered", *stalled]
    assert [*map(bool, told)] == [False, True, True, False, True, False]
    assert "cannot be written: No such file or directory" in told[4]


def test_stopped_with_a_batch_in_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be stored stays the broker's, and nothing of it is left in the folder."""
    source, stop, rename = OwnSource([Message("a")], [Message("b")]), threading.Event(), Path.rename

    def refuse(file: Path, name: Path) -> Path:
        if source.acknowledged:
            stop.set()
            raise OSError(ENOSPC, "No space left on device")
        return rename(file, name)

    monkeypatch.setattr(Path, "rename", refuse)
    assert bridge(source, files=tmp_path, stop=stop).stored == 1
    assert [message.id for message in source.acknowledged] == ["a"]
    assert len([*tmp_path.iterdir()]) == 1


def test_mistakes(tmp_path: Path, redis_url: str) -> None:
    """Each is told in one line, before anything is received."""
    source, ledger = OwnSource([Message("a")]), open_ledger("memory://")
    with closing(open_ledger(redis_url)) as in_redis:
        mistakes: dict[str, dict[str, Any]] = {
            "name one place": {},
            "a ledger, or files=FOLDER": {"ledger": ledger, "files": "x"},
            "write a shorter name": {"ledger": ledger, "queue": "q" * 300},
            "write open_ledger": {"ledger": "sqlite:///ledger.db"},
            "'s3://b/x' is not a folder": {"files": "s3://b/x"},
            "'/dev/null/x' cannot be made": {"files": "/dev/null/x"},
            "keeps no queues": {"ledger": in_redis},
        }
        for said, given in mistakes.items():
            with pytest.raises(ConfigError, match=said):
                bridge(source, **given)
    with closing(open_ledger(f"sqlite:///{tmp_path}/new.db")) as empty, pytest.raises(StoreError):
        bridge(source, empty)
    assert len(source.batches) == 1
