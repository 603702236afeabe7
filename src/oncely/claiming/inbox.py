"""Inbox: the ledger's calls inside a transaction that is the caller's own."""

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar, cast

from oncely.claiming.async_calls import AsyncCalls
from oncely.claiming.calls import Calls
from oncely.claiming.request import Request, to_claim
from oncely.claiming.settling import Observer, Settler
from oncely.core.commands import ClaimOutcome, Command, Complete, Outcome, Written
from oncely.core.errors import ConfigError, EndedError, StoreError
from oncely.core.message import check_ids, check_key
from oncely.core.policy import Policy
from oncely.core.record import Key, Record
from oncely.core.rules import completed, decide
from oncely.stores.base import Change, Inside, Joined, Loaded, Records, Store

T = TypeVar("T")


class Inbox(Calls):
    """What is asked for here is stored when the caller's transaction commits, or not at all.

    For one thread at a time, as the connection is.
    """

    can_defer = True

    def __init__(
        self,
        ledger: Calls,
        inside: Joined,
        ahead: "Ahead | None" = None,
        observer: Observer | None = None,
    ) -> None:
        self.ledger = ledger
        """Whose calls these are; its own are outside the transaction."""
        self._records: Records = ahead or inside
        self._settler = Settler(self._records, observer)
        self._observer = observer
        self._inside = inside
        self._ahead = ahead

    def _settle_one(self, request: Request) -> Outcome:
        written = self._written_ahead([request])
        return written[0] if written else self._settler.settle_one(request)

    def _settle(self, requests: Sequence[Request]) -> list[Outcome]:
        return self._written_ahead(requests) or self._settler.settle(requests)

    def _written_ahead(self, requests: Sequence[Request]) -> list[Outcome] | None:
        if self._ahead is None:
            return None
        began = time.perf_counter()
        outcomes = self._ahead.complete(requests)
        if outcomes and self._observer is not None:
            self._observer.settled(requests, outcomes, time.perf_counter() - began)
        return outcomes

    def _settle_inside(self, _: Inside, requests: Sequence[Request]) -> list[Outcome]:
        return self._settler.settle(requests)

    def _transact(self, work: Callable[[Inside], T]) -> T:
        return work(self._inside)

    def complete_new(
        self, consumer: str, message_ids: Collection[str], policy: Policy = Policy()
    ) -> set[str]:
        """Claim and complete those messages that have no record; return their ids.

        As `claim_many` and `complete_many` do, in one statement: for work that needs no claim, as
        it is stored with the records or not at all. Nothing changes for the other messages, and
        no observer is told. Raises MessageError for an id that cannot identify a message.
        """
        if not message_ids:
            return set()
        check_ids(message_ids)
        # What the rules say of a message without a record is the same for all of them.
        any_key = Key(consumer, next(iter(message_ids)))
        [first] = to_claim([any_key], None, policy, None, None, None, None)
        claimed = decide(None, first.command, 0.0).new
        assert claimed is not None  # noqa: S101 - a first claim is always granted.
        return self._inside.insert_alike(completed(claimed, 0.0), message_ids)

    def claim_known(self, keys: Sequence[Key], policy: Policy = Policy()) -> list[ClaimOutcome]:
        """As `claim_many`, for messages of which nearly all have a record: those are looked for
        first, where `claim_many` takes them for new.
        """
        found = self._records.load(set(keys)).records
        requests = to_claim(keys, None, policy, None, None, None, None)
        believed = [each._replace(believed=found.get(each.key)) for each in requests]
        return cast(list[ClaimOutcome], self._settle(believed))

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
        pairs = [(record, completed(record, 0.0)) for record in records]
        keys = self._inside.insert([done for _, done in pairs])
        self._written.update((pair[0].key, pair) for pair in pairs if pair[0].key in keys)
        return keys

    def complete(self, requests: Sequence[Request]) -> list[Outcome] | None:
        """The answers to completions that are all written; None where the rules are to be asked."""
        written: list[Outcome] = []
        for request in requests:
            done = self._as_written(request.command)
            if done is None:
                return None
            written.append(Written(done))
        self._inside.check()
        for request in requests:
            self._written.pop(request.key, None)
        return written

    def _as_written(self, command: Command) -> Record | None:
        if not isinstance(command, Complete) or command.result is not None:
            return None
        claimed = command.claim.record
        believed, done = self._written.get(claimed.key, _NONE)
        return done if believed and believed.version == claimed.version else None

    def load(self, keys: Collection[Key]) -> Loaded:
        self._take_back(self._written.keys() & set(keys))
        return self._inside.load(keys)

    def swap(self, changes: Sequence[Change]) -> set[Key]:
        return self._inside.swap([self._from_written(change) for change in changes])

    def settle(self) -> None:
        """Write the claims that were not completed as what they are."""
        self._take_back(set(self._written))

    def _from_written(self, change: Change) -> Change:
        believed, done = self._written.get(change.old.key, _NONE)
        if believed is None or done is None or believed.version != change.old.version:
            return change
        del self._written[change.old.key]
        return Change(done, change.new)

    def _take_back(self, keys: Collection[Key]) -> None:
        pairs = [self._written.pop(key) for key in sorted(keys)]
        if pairs:
            self._inside.swap([Change(done, believed) for believed, done in pairs])


_NONE = (None, None)


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
        failed = error
        try:
            self._settle(error)
        except BaseException as unsettled:
            failed = unsettled
            raise
        finally:
            self._joining.__exit__(None if failed is None else type(failed), failed, traceback)

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
        self._joining = self._store.within(connection)
        inside = self._joining.__enter__()
        self._ahead = Ahead(inside) if inside.is_guarded else None
        return Inbox(self._ledger, inside, self._ahead, self._observer)

    def _settle(self, error: BaseException | None) -> None:
        if self._ahead is None:
            return
        if error is None:
            self._ahead.settle()
            return
        # The transaction may be over. If it is not, what is written there is to be true.
        with suppress(StoreError, EndedError):
            self._ahead.settle()


def _is_async(connection: Any) -> bool:
    return hasattr(connection, "run_sync")
