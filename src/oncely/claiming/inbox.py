"""Inbox: the ledger's calls inside a transaction that is the caller's own."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, TypeVar

from oncely.claiming.async_calls import AsyncCalls
from oncely.claiming.calls import Calls
from oncely.claiming.request import Request
from oncely.claiming.settling import Observer, Settler
from oncely.core.commands import Complete, Outcome, Written
from oncely.core.errors import ConfigError, EndedError, StoreError
from oncely.core.message import check_key
from oncely.core.record import Claim, Key, Record, State
from oncely.core.rules import decide
from oncely.stores.base import Change, Inside, Joined, Loaded, Records, Store

T = TypeVar("T")


class Inbox(Calls):
    """What is asked for here is stored when the caller's transaction commits, or not at all.

    For one thread at a time, as the connection is.
    """

    can_defer = True

    def __init__(
        self, ledger: Calls, records: Records, inside: Inside, observer: Observer | None = None
    ) -> None:
        self.ledger = ledger
        """Whose calls these are; its own are outside the transaction."""
        self._settler = Settler(records, observer)
        self._records = records
        self._inside = inside

    def _settle_one(self, request: Request) -> Outcome:
        return self._settler.settle_one(request)

    def _settle(self, requests: Sequence[Request]) -> list[Outcome]:
        return self._settler.settle(requests)

    def _settle_inside(self, _: Inside, requests: Sequence[Request]) -> list[Outcome]:
        return self._settler.settle(requests)

    def _transact(self, work: Callable[[Inside], T]) -> T:
        return work(self._inside)

    def find(self, key: Key) -> Record | None:
        """The record of `key`, if there is one."""
        return self._records.load([check_key(key)]).records.get(key)


class AsyncInbox(AsyncCalls):
    """An Inbox whose calls are coroutines, for a connection of SQLAlchemy's asyncio."""

    def __init__(self, inbox: Inbox, connection: Any) -> None:
        self._calls = self._inbox = inbox
        self._connection = connection

    @property
    def blocking(self) -> None:
        return None

    async def _settle_one(self, request: Request) -> Outcome:
        return await self.run(self._inbox._settle_one, request)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """What `function`, which uses the connection, returns."""
        done: T = await self._connection.run_sync(lambda _: function(*args))
        return done


class Ahead:
    """Records of which the completion is written together with the claim.

    Nobody else sees a claim before the transaction commits, and by then it is nearly always
    completed: so that is written at once, which spares a statement for each message. `settle`
    writes what is true of the others. Only for a transaction whose commit can be refused until
    then.
    """

    def __init__(self, inside: Joined) -> None:
        self._inside = inside
        self._written: dict[Key, tuple[Record, Record]] = {}
        """What is believed, and what is written in its place. All of it is newer than the newest
        savepoint: so one that is rolled back takes all of it, and no completion without its claim.
        """
        inside.watch(on_savepoint=self.settle, on_undo=self._written.clear)

    def insert(self, records: Sequence[Record]) -> set[Key]:
        completed = [_completed(record) for record in records]
        keys = self._inside.insert(completed)
        for believed, done in zip(records, completed, strict=True):
            if done.key in keys:
                self._written[done.key] = (believed, done)
        return keys

    def load(self, keys: Collection[Key]) -> Loaded:
        self._take_back(self._written.keys() & set(keys))
        return self._inside.load(keys)

    def swap(self, changes: Sequence[Change]) -> set[Key]:
        self._inside.check()
        there = set()
        rest = []
        for change in changes:
            believed, done = self._written.get(change.old.key, (None, None))
            if believed is None or done is None or believed.version != change.old.version:
                rest.append(change)
            elif change.new is not None and _is_as_written(change.new, done):
                there.add(change.old.key)
                del self._written[change.old.key]
            else:
                rest.append(Change(done, change.new))
                del self._written[change.old.key]
        return there | self._inside.swap(rest) if rest else there

    def settle(self) -> None:
        """Write the claims that were not completed as what they are."""
        self._take_back(set(self._written))

    def _take_back(self, keys: Collection[Key]) -> None:
        pairs = [self._written.pop(key) for key in sorted(keys)]
        if pairs:
            self._inside.swap([Change(done, believed) for believed, done in pairs])


def _completed(record: Record) -> Record:
    outcome = decide(record, Complete(Claim(record)), 0.0).outcome
    assert isinstance(outcome, Written) and outcome.record is not None  # noqa: S101, PT018
    return outcome.record


def _is_as_written(new: Record, done: Record) -> bool:
    return new.is_same_write(done) and new.state is State.COMPLETED and new.result is None


class JoinedTransaction:
    """The time during which the ledger is part of the caller's transaction."""

    def __init__(
        self, ledger: Calls, store: Store, connection: Any, observer: Observer | None = None
    ) -> None:
        self._ledger = ledger
        self._store = store
        self._connection = connection
        self._observer = observer

    def __enter__(self) -> Inbox:
        if _is_async(self._connection):
            raise ConfigError("transaction: this connection is async; write `async with`")
        return self._enter(self._connection)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._opened.__exit__(kind, error, traceback)

    async def __aenter__(self) -> AsyncInbox:
        if not _is_async(self._connection):
            raise ConfigError("transaction: this connection is not async; write `with`")
        inbox = await self._connection.run_sync(self._enter)
        return AsyncInbox(inbox, self._connection)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._connection.run_sync(lambda _: self.__exit__(kind, error, traceback))

    def _enter(self, connection: Any) -> Inbox:
        self._opened = _inbox(self._ledger, self._store, connection, self._observer)
        return self._opened.__enter__()


@contextmanager
def _inbox(
    ledger: Calls, store: Store, connection: Any, observer: Observer | None
) -> Iterator[Inbox]:
    with store.within(connection) as inside:
        if not inside.is_guarded:
            yield Inbox(ledger, inside, inside, observer)
            return
        ahead = Ahead(inside)
        try:
            yield Inbox(ledger, ahead, inside, observer)
        except BaseException:
            # The transaction may be over. If it is not, what is written there is to be true.
            with suppress(StoreError, EndedError):
                ahead.settle()
            raise
        ahead.settle()


def _is_async(connection: Any) -> bool:
    return hasattr(connection, "run_sync")
