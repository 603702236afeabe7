"""Records leave the ledger for the archive: all that is old, nothing that is not readable there."""

import os
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest
from tests.kills import killed_at
from tests.records import granted
from tests.turns import in_turn

from oncely import Key, Message, State
from oncely._util import crash_points as crashpoints
from oncely.archive.layout import bucket_of, date_of
from oncely.core.errors import ConfigError, OncelyError
from oncely.core.waiting import WaitingMessage

if TYPE_CHECKING:
    from tests.archive.conftest import Aging, Open

DAY_S = 86_400.0
_SERVERS = in_turn("server of archives", ["postgresql", "mysql", "redis"])
KINDS = ("memory", "sqlite", *_SERVERS)


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    """No crash point stays armed."""
    yield
    crashpoints.disarm()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_old_and_ended_goes(open_aging: "Open", kind: str) -> None:
    """On every store: what purge would remove is in the archive, whole; all else stays."""
    aging = open_aging(kind)
    ids = [f"m{n:03}" for n in range(50)]
    aging.complete(*ids[:40], fingerprint="f")
    aging.fail(*ids[40:45])
    aging.fail(*ids[45:], final=True)
    aging.ledger.claim(Key("billing", "doubtful"))
    aging.ledger.handled(granted(aging.ledger.claim(Key("billing", "sending"))))
    aging.complete("of-another", consumer="sms")
    before = {record.key: record for record in aging.records()}
    aging.clock.advance(31 * DAY_S)
    aging.complete("new")
    said = aging.archive(batch=7)
    assert (said.archived, said.left) == (50, 0)
    stayed = {record.key for record in aging.records()}
    assert {key.message_id for key in stayed} == {"doubtful", "sending", "of-another", "new"}
    found = aging.known(dict.fromkeys([*ids, "new"], aging.clock.now - 31 * DAY_S))
    assert found == {id_: before[Key("billing", id_)] for id_ in ids}
    assert aging.archive().archived == 0


def test_the_layout(aging: "Aging") -> None:
    """A file is in the folder of its date and bucket, sorted by id, in a name that escapes."""
    consumer = "a/b c=é%"
    for _ in range(3):
        aging.complete(*(f"m{aging.clock.now:.0f}-{n}" for n in range(40)), consumer=consumer)
        aging.clock.advance(DAY_S)
    aging.clock.advance(40 * DAY_S)
    aging.archive(consumer)
    assert [path.name for path in aging.folder.iterdir() if path.name != "_unfinished"] == [
        "consumer=a%2Fb%20c%3Dé%25"
    ]
    ids = [row["message_id"] for row in aging.rows()]
    assert len(ids) == len(set(ids)) == 120
    for row in aging.rows():
        [file] = [
            path
            for path in aging.folder.rglob("part-*.parquet")
            if f"date={date_of(row['last_seen'].timestamp())}" in path.parts
            and f"bucket={bucket_of(row['message_id']):02}" in path.parts
        ]
        there = pq.ParquetFile(file).read().column("message_id").to_pylist()
        assert row["message_id"] in there
        assert all(one < other for one, other in pairwise(there))
    assert not list((aging.folder / "_unfinished").iterdir())


def test_each_consumer_has_its_retention(aging: "Aging") -> None:
    """As for purge: its own, else the common one; a slip in a name moves nothing."""
    from oncely.archive.writing import archive

    for consumer in ("billing", "sms"):
        aging.complete("m", consumer=consumer)
    aging.clock.advance(10 * DAY_S)
    with pytest.raises(ConfigError, match="did you mean 'billing'"):
        archive(aging.ledger, str(aging.folder), retention={"biling": "5d"}, by="")
    own = {"billing": "5d"}
    archived = archive(aging.ledger, str(aging.folder), "30d", retention=own, by="")
    assert {name: each.archived for name, each in archived.counts.items()} == {
        "billing": 1,
        "sms": 0,
    }


def test_what_waits_to_be_sent_stays(aging: "Aging") -> None:
    """Nor is it archived again and again; others behind it are, however small a batch is."""
    mails = []
    for n in range(5):
        claim = granted(aging.ledger.claim(Key("billing", f"waiting{n}")))
        mail = WaitingMessage("d", "mails", Message("d"), claim.key)
        mails.append(mail)
        aging.ledger.fail(claim, "no")
    aging.store.transaction(lambda transaction: transaction.keep(mails))
    aging.clock.advance(DAY_S)
    aging.complete("later")
    aging.fail("failed later")
    aging.clock.advance(40 * DAY_S)
    said = aging.archive(batch=2)
    assert said.archived == 2
    assert {row["message_id"] for row in aging.rows()} == {"later", "failed later"}
    assert len(aging.records()) == 5


def test_what_changes_meanwhile_stays(aging: "Aging") -> None:
    """A duplicate that comes between reading and purging keeps its record, with what it counts."""
    aging.complete("still", "changed")
    aging.clock.advance(31 * DAY_S)
    crashpoints.arm("archive_verified", lambda: aging.ledger.claim(Key("billing", "changed")))
    said = aging.archive()
    assert (said.archived, said.left) == (1, 1)
    [kept] = aging.records()
    assert (kept.key.message_id, kept.duplicates) == ("changed", 1)
    crashpoints.disarm()
    aging.clock.advance(31 * DAY_S)
    assert aging.archive().archived == 1
    rows = [row for row in aging.rows() if row["message_id"] == "changed"]
    assert len({row["version"] for row in rows}) == len(rows) == 2
    found = aging.known({"changed": aging.clock.now - 62 * DAY_S})
    assert found["changed"].state is State.COMPLETED


@pytest.mark.parametrize("harm", ["cut", "other", "gone"])
def test_what_cannot_be_read_back_is_not_purged(aging: "Aging", harm: str) -> None:
    """A file that is cut, says something else, or is gone: the ledger keeps all."""
    aging.complete(*(f"m{n}" for n in range(50)))
    before = aging.records()
    aging.clock.advance(31 * DAY_S)

    def damage() -> None:
        [file] = (aging.folder / "_unfinished").iterdir()
        if harm == "cut":
            file.write_bytes(file.read_bytes()[:-20])
        elif harm == "gone":
            file.unlink()
        else:
            table = pq.ParquetFile(file).read()
            other = table.set_column(3, table.schema.field(3), [[9] * len(table)])
            pq.write_table(other, file)

    crashpoints.arm("archive_written", damage)
    with pytest.raises(OncelyError, match=r"archive: _unfinished/.* read back"):
        aging.archive()
    assert aging.records() == before
    assert not aging.rows()


def test_steps_go_with_their_record(aging: "Aging") -> None:
    """What a handler kept for its retries is not left behind."""
    key = Key("billing", "m")
    claim = granted(aging.ledger.claim(key))
    aging.ledger.keep_step(claim, "charge", {"receipt": 7})
    aging.ledger.complete(claim)
    aging.clock.advance(31 * DAY_S)
    aging.archive()
    assert aging.ledger.steps(key) == {}


@pytest.mark.parametrize("kind", in_turn("store of killed archives", ["sqlite", "postgresql"]))
@pytest.mark.parametrize(
    ("point", "nth"), [("archive_written", 20), ("archive_verified", 1), ("archive_purged", 2)]
)
def test_killed_anywhere(open_aging: "Open", kind: str, point: str, nth: int) -> None:
    """Every record is in the ledger or in the archive, readable; run again, it goes on."""
    aging = open_aging(kind)
    ids = [f"m{n:02}" for n in range(60)]
    aging.complete(*ids)
    aging.fail("failed")
    before = {record.key.message_id: record for record in aging.records()}
    aging.clock.advance(31 * DAY_S)
    assert killed_at(point, lambda: aging.archive(batch=25), nth)
    archived = {row["message_id"]: row["fence"] for row in aging.rows()}
    kept = {record.key.message_id: record.fence for record in aging.records()}
    assert {**archived, **kept} == {id_: record.fence for id_, record in before.items()}
    assert kept
    aging.archive(batch=25)
    assert not aging.records()
    assert aging.known(dict.fromkeys(before, 0.0)) == before
    # The same records have the same file: none stands there twice.
    assert Counter(row["message_id"] for row in aging.rows()) == dict.fromkeys(before, 1)


def test_what_a_crash_left_unfinished_goes(aging: "Aging") -> None:
    """A day later; what may still be being written stays."""
    unfinished = aging.folder / "_unfinished"
    unfinished.mkdir(parents=True)
    for name in ("abandoned", "new"):
        (unfinished / name).touch()
    os.utime(unfinished / "abandoned", (0, 0))
    aging.archive()
    assert [file.name for file in unfinished.iterdir()] == ["new"]
