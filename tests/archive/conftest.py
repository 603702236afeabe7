"""Ledgers with old records, and an archive beside them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.records import granted

from oncely import Key, Ledger, Policy
from oncely.archive.lookup import Archive, Old
from oncely.archive.writing import Archived, archive
from oncely.core.commands import Duplicate, Exhausted
from oncely.core.record import Claim, Record
from oncely.stores.memory_store import MemoryStore
from oncely.stores.redis import RedisStore
from oncely.stores.sql import SqlStore
from oncely.stores.sql.engines import server_engine, sqlite_engine
from oncely.stores.store import Store
from oncely.testing import ManualClock

DAY_S = 86_400.0

Known = dict[str, Record]


class Aging:
    """A ledger whose clock is moved by hand, and an archive beside it."""

    def __init__(self, store: Store, clock: ManualClock, folder: Path) -> None:
        self.clock = clock
        self.folder = folder
        self.store = store
        self.ledger = Ledger(store)
        self.ledger.migrate()

    def claim(
        self, *ids: str, consumer: str = "billing", fingerprint: str | None = None
    ) -> list[Claim]:
        """Claims of all, granted now."""
        keys = [Key(consumer, id_) for id_ in ids]
        outcomes = self.ledger.claim_many(keys, fingerprints=[fingerprint] * len(ids))
        return [granted(outcome) for outcome in outcomes]

    def complete(
        self, *ids: str, consumer: str = "billing", fingerprint: str | None = None
    ) -> None:
        """Records that are completed now."""
        claims = self.claim(*ids, consumer=consumer, fingerprint=fingerprint)
        self.ledger.complete_many(claims, [{"receipt": "é"}] * len(ids))

    def fail(self, *ids: str, final: bool = False) -> None:
        """Records that have failed now."""
        self.ledger.fail_many(self.claim(*ids), ["no"] * len(ids), final)

    def archive(self, consumer: str = "billing", **more: Any) -> Archived:
        """Archive a consumer's; say what came of it."""
        found = archive(self.ledger, str(self.folder), consumer=consumer, by="tests", **more)
        return found.counts[consumer]

    def opened(self, consumer: str = "billing") -> Archive:
        """A consumer's part of the archive."""
        return Archive(str(self.folder), consumer)

    def known(self, sent_at: Mapping[str, float], archive: Archive | None = None) -> Known:
        """What the archive knows of messages, by their ids; each with when it was sent."""
        old = [Old(id_, at) for id_, at in sent_at.items()]
        # By this policy nothing that is found is to run again.
        answers = (archive or self.opened()).judge(old, Policy(on_failed="skip"))
        return {
            message.message_id: answer.record
            for message, answer in zip(old, answers, strict=True)
            if isinstance(answer, Duplicate | Exhausted)
        }

    def records(self) -> list[Record]:
        """What is in the ledger."""
        return list(self.ledger.scan(limit=100_000))

    def rows(self) -> list[dict[str, Any]]:
        """Every row that a reader of Parquet finds in the archive."""
        files = [file for file in self.folder.rglob("*.parquet") if "_unfinished" not in str(file)]
        return [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]


Open = Callable[[str], Aging]


@pytest.fixture
def open_aging(
    request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock
) -> Iterator[Open]:
    """Opens a ledger without records, of any kind of store, at the beginning of a day."""
    clock.now = 20_000 * DAY_S
    with ExitStack() as opened:

        def open_one(kind: str) -> Aging:
            store: Store
            match kind:
                case "memory":
                    store = MemoryStore(clock)
                case "sqlite":
                    store = SqlStore(sqlite_engine(tmp_path / "ledger.db"), clock=clock)
                case "redis":
                    store = RedisStore(request.getfixturevalue("redis_url"), clock=clock)
                case _:
                    url = request.getfixturevalue(f"{kind}_url")
                    store = SqlStore(server_engine(url), clock=clock)
            opened.callback(store.close)
            aging = Aging(store, clock, tmp_path / "archive")
            opened.callback(aging.ledger.close)
            return aging

        yield open_one


@pytest.fixture
def aging(open_aging: Open) -> Aging:
    """One in a file."""
    return open_aging("sqlite")
