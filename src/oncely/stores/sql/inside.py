"""SqlInside: what a SQL store does inside one transaction, whoever began it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from oncely.core.deferred import DeferredMessage
from oncely.core.record import Key, Record
from oncely.stores.base import Change, Clock, Loaded, Refusal
from oncely.stores.sql import deferred, steps
from oncely.stores.sql.batches import batches
from oncely.stores.sql.database import Database, Link
from oncely.stores.sql.rows import by_key, parted


class SqlInside:
    """The tables of `database`, through a connection with an open transaction.

    `translate` puts an error of the driver into one that the Store protocol knows; any other it
    gives back.
    """

    def __init__(
        self,
        database: Database,
        link: Link,
        clock: Clock | None,
        translate: Callable[[Exception], Exception],
    ) -> None:
        self._database = database.inside
        self._link = link
        self._clock = clock
        self._translated = _Translated(self, translate)
        self.error: Exception | None = None
        """What has ended the transaction."""
        self.has_deferred = False
        """Whether anything was deferred: it may be sent when the transaction has committed."""

    # ---- Records -------------------------------------------------------------------------------

    def insert(self, records: Sequence[Record]) -> set[Key]:
        with self._translated:
            written: set[Key] = set()
            for batch in self._database.batches(by_key(records)):
                written |= self._database.insert(self._link, batch, self._now())
        return written

    def insert_alike(self, record: Record, message_ids: Collection[str]) -> set[str]:
        with self._translated:
            written: set[str] = set()
            for batch in batches(sorted(message_ids)):
                written |= self._database.insert_alike(self._link, record, batch, self._now())
        return written

    def load(self, keys: Collection[Key]) -> Loaded:
        with self._translated:
            return self._database.load(self._link, keys, self._now())

    def swap(self, changes: Sequence[Change]) -> set[Key]:
        kept, gone = parted(changes)
        written: set[Key] = set()
        with self._translated:
            for pairs in self._database.batches(kept):
                written |= self._database.swap(self._link, pairs, self._now())
            for records in self._database.batches(gone):
                written |= self._database.remove(self._link, records)
        return written

    # ---- Deferred messages ---------------------------------------------------------------------

    def defer(self, messages: Sequence[DeferredMessage]) -> None:
        with self._translated:
            deferred.defer(self._database, self._link, messages, self._now())
            self.has_deferred = True

    def waiting(self, keys: Collection[Key]) -> Sequence[DeferredMessage]:
        with self._translated:
            return deferred.waiting(self._database, self._link, keys)

    def take(
        self, limit: int, hold_s: float, parents: Collection[Key] | None = None
    ) -> Sequence[DeferredMessage]:
        with self._translated:
            return deferred.take(self._database, self._link, limit, hold_s, parents, self._now())

    def remove(self, messages: Sequence[DeferredMessage]) -> None:
        with self._translated:
            deferred.remove(self._database, self._link, messages)

    def put_back(self, refusals: Sequence[Refusal]) -> None:
        with self._translated:
            deferred.put_back(self._database, self._link, refusals, self._now())

    # ---- Steps ---------------------------------------------------------------------------------

    def forget(self, key: Key) -> None:
        with self._translated:
            deferred.forget(self._database, self._link, key)
            steps.forget(self._database, self._link, key)

    def steps(self, key: Key) -> Mapping[str, Any]:
        with self._translated:
            return steps.steps(self._database, self._link, key)

    def keep_step(self, key: Key, name: str, result: Any) -> None:
        with self._translated:
            steps.keep_step(self._database, self._link, key, name, result, self._now())

    # ---- Errors --------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the error that has ended the transaction, where one has."""
        if self.error is not None:
            raise self.error

    def check_call(self) -> None:
        """As `check`, before each call."""
        self.check()

    def _now(self) -> float | None:
        return None if self._clock is None else self._clock()


class _Translated:
    """Around what is done in a transaction: after an error of it, every further call raises that.

    A class, since a generator's context takes three times as long, for each call.
    """

    def __init__(self, inside: SqlInside, translate: Callable[[Exception], Exception]) -> None:
        self._inside = inside
        self._translate = translate

    def __enter__(self) -> None:
        self._inside.check_call()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not isinstance(error, Exception):
            return
        self._inside.error = self._translate(error)
        if self._inside.error is not error:
            raise self._inside.error from error
