"""The entry of a change is there before the change: nothing is changed without a trace."""

import inspect
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.conditions import wait_until
from tests.conformance.conftest import url_of
from tests.integration.test_auditing import aside, failed, in_doubt
from tests.records import granted, record_of
from tests.turns import in_turn

from oncely import ops
from oncely.archive.writing import archive
from oncely.core.activity import AuditEntry
from oncely.core.errors import ConfigError, MessageError, StoreUnavailable
from oncely.core.message import Message
from oncely.core.record import Key, Record, State
from oncely.core.waiting import WaitingMessage
from oncely.ledger.ledger import open_ledger
from oncely.stores.sql import SqlStore

_COUNTED = re.compile("message_(audit|workers|activity)")
_NOT_KNOWN = "begun; how many were changed is not known"


class Full:
    """A ledger with something that each function of operators changes."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.ledger = open_ledger(url)
        self.ledger.migrate()
        self.failed = failed(self.ledger, "failed")
        granted(self.ledger.claim(Key("billing", "held")))
        _, self.doubt = in_doubt(self.ledger, "doubt")
        waits = replace(aside("waits"), is_set_aside=False, delay_s=600.0)
        self.ledger.mailbox.keep([aside("dead"), waits, _unsent("refused")])

    @property
    def held(self) -> Record:
        """The record of a message that is being processed."""
        return record_of(self.ledger, Key("billing", "held"))

    @property
    def dead(self) -> Sequence[int]:
        """The numbers of the dead letters."""
        return [letter.id for letter in self.ledger.dead()]

    @property
    def refused(self) -> Sequence[int]:
        """The numbers of the messages that were refused."""
        found = ops.unsent_messages(self.ledger, is_refused=True).messages
        return [each.number or 0 for each in found]

    @property
    def worker(self) -> str:
        """The name of this process, when the ledger knows it."""
        wait_until(lambda: ops.workers(self.ledger))
        return ops.workers(self.ledger)[0].worker.name

    def rows(self) -> str:
        """All that the database holds, but for the audit, and what it counts by itself."""
        with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"))) as connection:
            return "\n".join(line for line in connection.iterdump() if not _COUNTED.search(line))


def _unsent(id_: str) -> WaitingMessage:
    return WaitingMessage(id_, "mails", Message(id_), Key("", ""), is_set_aside=True)


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Full]:
    """The ledger in a file."""
    made = Full(f"sqlite:///{tmp_path / 'ledger.db'}", tmp_path)
    with closing(made.ledger):
        yield made


_WAITS = Key("billing", "waits")
_EDITED = Message("dead", b"[]")
_Change = Callable[[Full], object]
CHANGES: Mapping[str, Sequence[_Change]] = {
    "reset": [lambda at: ops.reset(at.ledger, [at.failed], by="ann")],
    "happened": [lambda at: ops.happened(at.ledger, [at.doubt], by="ann")],
    "not_happened": [lambda at: ops.not_happened(at.ledger, [at.doubt], by="ann")],
    "erase": [lambda at: ops.erase(at.ledger, at.failed.key, by="ann")],
    "forget": [lambda at: ops.forget(at.ledger, [at.failed], by="ann")],
    "retry_letters": [
        lambda at: ops.retry_letters(at.ledger, at.dead, by="ann"),
        lambda at: ops.retry_letters(at.ledger, at.dead, message=_EDITED, by="ann"),
    ],
    "discard_letters": [lambda at: ops.discard_letters(at.ledger, at.dead, by="ann")],
    "retry_unsent": [lambda at: ops.retry_unsent(at.ledger, at.refused, by="ann")],
    "retry_every_unsent": [lambda at: ops.retry_every_unsent(at.ledger, by="ann")],
    "discard_unsent": [lambda at: ops.discard_unsent(at.ledger, at.refused, by="ann")],
    "retry": [lambda at: ops.retry(at.ledger, [_WAITS], by="ann")],
    "discard_waiting": [lambda at: ops.discard_waiting(at.ledger, [_WAITS], by="ann")],
    "purge": [lambda at: ops.purge(at.ledger, "0s", by="ann")],
    "probe": [
        lambda at: ops.probe(at.ledger, at.doubt, lambda _: "happened", by="ann"),
        lambda at: ops.probe(at.ledger, at.doubt, lambda _: "not_happened", by="ann"),
    ],
    "end_claim": [lambda at: ops.end_claim(at.ledger, at.held, is_sure=True, by="ann")],
    "worker_dead": [lambda at: ops.worker_dead(at.ledger, at.worker, is_sure=True, by="ann")],
    "archive": [lambda at: archive(at.ledger, str(at.folder / "archive"), "0s", by="ann")],
}
"""What changes a ledger, by the name of the function."""
_EACH = [
    pytest.param(change, id=f"{name}-{number}")
    for name, changes in CHANGES.items()
    for number, change in enumerate(changes)
]


def test_every_change_is_tried() -> None:
    """Each function of ops that takes a name of who asks is among those that are tried here."""
    changing = {
        name
        for name in ops.__all__
        if inspect.isfunction(found := getattr(ops, name))
        and {"by", "noted"} & inspect.signature(found).parameters.keys()
    }
    assert changing == CHANGES.keys() - {"archive"}


@pytest.mark.parametrize("change", _EACH)
def test_no_change_without_an_entry(
    full: Full, change: _Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be noted is not done, and the error says so in a line; nothing is different."""

    def note(_: object, __: AuditEntry) -> int:
        raise StoreUnavailable("gone")

    before = full.rows()
    with monkeypatch.context() as patched:
        patched.setattr(SqlStore, "note", note)
        with pytest.raises(StoreUnavailable) as raised:
            change(full)
    assert str(raised.value) == "nothing was changed, as the audit cannot be written: gone"
    assert full.rows() == before
    assert full.ledger.operations.audit() == []


@pytest.mark.parametrize("change", _EACH)
def test_the_entry_is_there_first(
    full: Full, change: _Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When an entry is written nothing is changed yet, and it has no counts; in the end the change
    is made, and the one entry has them.
    """
    note, seen = SqlStore.note, list[str]()

    def noting(store: SqlStore, entry: AuditEntry) -> int:
        id_ = note(store, entry)
        seen.append(full.rows())
        [begun] = full.ledger.operations.audit()
        assert (begun.by, begun.changed, begun.refused) == ("ann", None, None)
        return id_

    monkeypatch.setattr(SqlStore, "note", noting)
    before = full.rows()
    change(full)
    assert seen == [before]
    assert full.rows() != before
    [entry] = full.ledger.operations.audit()
    assert entry.changed
    assert entry.refused == 0
    assert entry.chosen in (None, entry.changed)


# ---- Killed ------------------------------------------------------------------------------------

_KILLED = """
import os, signal, sys
from oncely import ops
from oncely.core.record import Key
from oncely.ledger.ledger import open_ledger

def die(*told):
    if told[-1] >= int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

ledger = open_ledger(sys.argv[1])
records = [ledger.find(Key("billing", id_)) for id_ in ("1", "2", "3")]
if sys.argv[2] == "purge":
    ops.purge(ledger, "0s", by="ann", batch=2, on_batch=die)
else:
    ops.reset(ledger, records[:int(sys.argv[4])], by="ann", why="back", on_each=die)
"""


@pytest.mark.parametrize("kind", in_turn("store of killed decisions", ["sqlite", "postgresql"]))
@pytest.mark.parametrize(
    ("how", "told", "left"),
    [
        # At which turn it dies, and of how many.
        (("reset", "2", "3"), ("retried", "billing", "1", 3), [True, True, False]),
        (("reset", "1", "1"), ("retried", "billing", "1", 1), [True, False, False]),
        (("purge", "2", "0"), ("purged", "", "", None), None),
    ],
)
def test_killed_before_the_counts(
    kind: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    how: Sequence[str],
    told: tuple[Any, ...],
    left: Sequence[bool] | None,
) -> None:
    """A process is killed between the change and its counts: what it has changed stays, and so does
    the entry, as begun.
    """
    url = url_of(kind, request, tmp_path)
    with closing(open_ledger(url)) as ledger:
        ledger.migrate()
        keys = [Key("billing", id_) for id_ in ("1", "2", "3")]
        for key in keys:
            ledger.fail(granted(ledger.claim(key)), "no", final=True)
        ran = subprocess.run([sys.executable, "-c", _KILLED, url, *how], check=False, timeout=60)
        assert ran.returncode == -signal.SIGKILL
        found = ledger.find_many(keys)
        if left is None:
            assert len(found) == 1
        else:
            resets = ["reset" in (found[key].metadata or {}) for key in keys]
            assert resets == left
        [entry] = ledger.operations.audit()
        assert (entry.action, entry.consumer, entry.message_id, entry.chosen) == told
        assert (entry.by, entry.changed, entry.refused) == ("ann", None, None)
        assert entry.changed_in_words().startswith(_NOT_KNOWN)


# ---- The ledger is away ------------------------------------------------------------------------


def test_ids_that_are_not_usable(full: Full) -> None:
    """An id that no message can have is a mistake before anything is begun."""
    with pytest.raises(MessageError):
        ops.retry(full.ledger, [_WAITS, Key("billing", "a\0")], by="ann")
    assert full.ledger.operations.audit() == []


def test_a_mistake_is_no_doubt(full: Full) -> None:
    """A message that cannot replace another changes nothing, and the entry says so."""
    other = Message("another", b"[]")
    with pytest.raises(ConfigError, match="is another message than"):
        ops.retry_letters(full.ledger, full.dead, message=other, by="ann")
    [entry] = full.ledger.operations.audit()
    assert (entry.action, entry.chosen, entry.changed, entry.refused) == (
        "dead_letter_edited",
        1,
        0,
        0,
    )
    assert record_of(full.ledger, full.failed.key).state is State.FAILED
