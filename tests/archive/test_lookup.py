"""Messages are looked up in an archive: what the rules say of them, and which files are touched."""

import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest
from tests.logs import of_event

from oncely import Key, Policy, State
from oncely.archive.layout import BUCKETS, bucket_of
from oncely.archive.lookup import SKEW_S, Archive, NotCovered, Old
from oncely.core.commands import Duplicate, Exhausted, Mismatch
from oncely.core.errors import ConfigError

if TYPE_CHECKING:
    from tests.archive.conftest import Aging, Open

DAY_S = 86_400.0


@pytest.fixture
def aging(open_aging: "Open") -> "Aging":
    """One in memory: what is looked up has left it."""
    return open_aging("memory")


class Reads:
    """The files that a look-up read, and how many row groups."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        caplog.set_level(logging.DEBUG, "oncely.archive.lookup")

    def taken(self) -> list[tuple[str, int]]:
        """Those since the last time."""
        reads = [
            (str(getattr(record, "path", "")), int(getattr(record, "row_groups", 0)))
            for record in of_event(self._caplog, "archive_read")
        ]
        self._caplog.clear()
        return reads


@pytest.fixture
def reads(caplog: pytest.LogCaptureFixture) -> Reads:
    """What look-ups read."""
    return Reads(caplog)


@pytest.fixture
def days(aging: "Aging") -> list[float]:
    """Five days of 200 messages each, archived; when each day began."""
    days = []
    for day in range(5):
        days.append(aging.clock.now)
        aging.complete(*(f"{day}-{n:03}" for n in range(200)))
        aging.clock.advance(DAY_S)
    aging.clock.advance(40 * DAY_S)
    aging.archive(batch=1_000)
    return days


def test_only_files_that_may_know_it_are_read(
    aging: "Aging", days: list[float], reads: Reads
) -> None:
    """Of the folder's 80 files: one bucket, from its date on, until it is found completed."""
    assert len(list(aging.folder.rglob("part-*.parquet"))) == 5 * BUCKETS
    assert list(aging.known({"2-123": days[2]})) == ["2-123"]
    bucket = f"bucket={bucket_of('7-123'):02}"
    read = reads.taken()
    assert 1 <= len(read) <= 2
    assert all(bucket in path for path, _ in read)
    # What is not there is looked for to the end; by their bounds most files are not read at all.
    assert not aging.known({"2-100a": days[2]})
    read = reads.taken()
    assert len(read) == 4
    assert [groups for _, groups in read] == [0, 1, 0, 0]
    assert not aging.known({"2-100a": days[4] + 40 * DAY_S})
    assert not reads.taken()


def test_only_row_groups_that_may_know_it_are_read(
    aging: "Aging", reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is sorted by id, so that of its groups one is read."""
    monkeypatch.setattr("oncely.archive.writing._ROW_GROUP", 10)
    ids = [f"m{n:04}" for n in range(1_000)]
    aging.complete(*ids)
    sent_at = aging.clock.now
    aging.clock.advance(40 * DAY_S)
    aging.archive()
    for id_ in ids[::97]:
        assert list(aging.known({id_: sent_at})) == [id_]
    read = reads.taken()
    assert {groups for _, groups in read} == {1}
    assert all(pq.ParquetFile(aging.folder / path).num_row_groups >= 4 for path, _ in read)
    assert set(aging.known(dict.fromkeys(ids, sent_at))) == set(ids)


def judged(aging: "Aging", old: Old, policy: Policy = Policy()) -> object:
    """What the archive says of one message."""
    [answer] = aging.opened().judge([old], policy)
    return answer


def test_what_the_rules_say(aging: "Aging") -> None:
    """The record decides as it did in the ledger; the policy where there is a choice."""
    aging.complete("done", fingerprint="f")
    aging.fail("failed")
    aging.fail("exhausted", final=True)
    at = aging.clock.now
    aging.clock.advance(40 * DAY_S)
    aging.archive()
    assert isinstance(judged(aging, Old("done", at, "f")), Duplicate)
    assert isinstance(judged(aging, Old("done", at, "g")), Mismatch)
    assert isinstance(judged(aging, Old("done", at, "g"), Policy(on_mismatch="ignore")), Duplicate)
    assert judged(aging, Old("failed", at)) is None
    assert isinstance(judged(aging, Old("failed", at), Policy(on_failed="skip")), Duplicate)
    assert isinstance(judged(aging, Old("failed", at), Policy(tries=1)), Exhausted)
    assert isinstance(judged(aging, Old("exhausted", at)), Exhausted)
    assert aging.opened("sms").judge([Old("done", at)], Policy()) == [NotCovered()]


def test_a_later_success_counts(aging: "Aging") -> None:
    """What failed, was archived, and was then completed, is a duplicate."""
    at = aging.clock.now
    aging.fail("m")
    aging.clock.advance(40 * DAY_S)
    aging.archive()
    assert judged(aging, Old("m", at)) is None
    aging.complete("m")
    aging.clock.advance(40 * DAY_S)
    aging.archive()
    said = judged(aging, Old("m", at))
    assert isinstance(said, Duplicate)
    assert said.record.state is State.COMPLETED


def test_what_is_covered(aging: "Aging") -> None:
    """Before the first that was completed the ledger may have been purged, and nobody knows."""
    aging.folder.mkdir()
    assert isinstance(judged(aging, Old("unknown", aging.clock.now)), NotCovered)
    aging.ledger.claim(Key("billing", "held"))
    aging.fail("kept for long")
    aging.clock.advance(DAY_S)
    first = aging.clock.now
    aging.complete("first")
    aging.clock.advance(50 * DAY_S)
    aging.complete("not yet old")
    aging.archive()
    assert isinstance(judged(aging, Old("unknown", first + SKEW_S - 1)), NotCovered)
    assert judged(aging, Old("unknown", first + SKEW_S)) is None


def test_a_clock_that_is_ahead(aging: "Aging") -> None:
    """A message from a sender whose clock was hours ahead is found."""
    aging.complete("m", "before")
    sent_at = aging.clock.now + 20 * 3_600
    aging.clock.advance(40 * DAY_S)
    aging.archive()
    assert isinstance(judged(aging, Old("m", sent_at)), Duplicate)


@pytest.mark.parametrize(("year", "day"), [(1, 1), (1, 2), (300, 1)])
def test_the_times_of_programs_that_knew_none(
    aging: "Aging", days: list[float], year: int, day: int
) -> None:
    """Go's and .NET's zero is the calendar's first moment: found, or too old, as any other."""
    sent_at = datetime(year, 1, day, tzinfo=UTC).timestamp()
    assert list(aging.known({"2-123": sent_at})) == ["2-123"]
    assert isinstance(judged(aging, Old("unknown", sent_at)), NotCovered)


def test_unfinished_files_are_not_read(aging: "Aging", days: list[float]) -> None:
    """Nor anything else that lies there."""
    for name in ("_unfinished/cut.parquet", "consumer=billing/notes.txt"):
        (aging.folder / name).write_text("no Parquet")
    assert list(aging.known({"0-000": days[0]})) == ["0-000"]


@pytest.mark.parametrize(
    ("folder", "said"), [("{file}", "is a file; name a folder"), ("nowhere://x", "'nowhere://x'")]
)
def test_a_wrong_folder(tmp_path: Path, folder: str, said: str) -> None:
    """Is told in one line."""
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=said):
        Archive(folder.format(file=file), "billing")


@pytest.mark.parametrize("mistyped", ["archvie", "archvie/", "archive/consumer=billing/archive"])
def test_a_folder_that_is_not_there(
    aging: "Aging", days: list[float], tmp_path: Path, mistyped: str
) -> None:
    """It knows nothing, and is not taken for an archive in which nothing is."""
    said = r"archive: \S+ sees no folder '.*arch.*'; mount it there, or let `oncely archive --to "
    with pytest.raises(ConfigError, match=said):
        Archive(str(tmp_path / mistyped), "billing")
    with pytest.raises(ConfigError, match=said):
        Archive((tmp_path / mistyped).as_uri(), "billing")


def test_a_folder_that_goes_away(aging: "Aging", days: list[float]) -> None:
    """Between two look-ups: the second has no answer. The folder may be named by its URI."""
    archive = Archive(aging.folder.as_uri(), "billing")
    assert list(aging.known({"3-100": days[3]}, archive)) == ["3-100"]
    aging.folder.rename(aging.folder.with_name("elsewhere"))
    with pytest.raises(ConfigError, match="sees no folder"):
        archive.judge([Old("3-100", days[3])], Policy())
