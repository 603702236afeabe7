"""Inbox: the ledger's calls inside the caller's own transaction."""

import inspect
import os
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

from oncely._util.chance import new_name
from oncely._util.forking import end_child
from oncely._util.unawaited import Unawaited
from oncely.core.cases import Case
from oncely.core.commands import Command, Outcome
from oncely.core.destination import check_destination
from oncely.core.durations import Duration, seconds
from oncely.core.errors import ConfigError
from oncely.core.ids import check_ids
from oncely.core.message import Message, check_message
from oncely.core.policy import Policy
from oncely.core.record import Key, Record, check_key
from oncely.core.rules import first_completion, spared_s
from oncely.core.waiting import WaitingMessage
from oncely.ledger.arguments import sent_message, to_claim
from oncely.ledger.async_calls import AsyncCalls, awaited
from oncely.ledger.driver import Driver
from oncely.ledger.ledger_calls import LedgerCalls
from oncely.ledger.mailbox import Mailbox
from oncely.ledger.settle import Beliefs, SettleObserver, Settler
from oncely.stores.store import CallersTransaction, Store, Transaction

T = TypeVar("T")


class Inbox(LedgerCalls):
    """The ledger's calls in a caller's transaction: stored when that commits, or not at all.

    For one thread at a time, as the connection is.
    """

    can_defer = True

    def __init__(
        self,
        ledger: LedgerCalls,
        transaction: CallersTransaction,
        observer: SettleObserver | None = None,
        beliefs: Beliefs | None = None,
    ) -> None:
        self.ledger = ledger
        """The ledger itself: its own calls are outside the transaction."""
        self._settler = Settler(transaction, observer, beliefs)
        self._transaction = transaction

    def _settle(self, commands: Sequence[Command]) -> Sequence[Outcome]:
        return self._settler.settle(commands)

    def _settle_in(self, _: Transaction, commands: Sequence[Command]) -> Sequence[Outcome]:
        return self._settler.settle(commands)

    def _transact(self, work: Callable[[Transaction], T]) -> T:
        return work(self._transaction)

    @property
    def mailbox(self) -> Mailbox:
        """The messages that wait, for whoever sends them."""
        return Mailbox(self)

    def send(
        self,
        destination: str,
        content: Any,
        *,
        key: str | None = None,
        delay: Duration | None = None,
    ) -> str:
        """Send a message: a relay publishes it once the caller has committed. Return its id.

        It needs no claim. `content` is a Message, or the body of one: bytes, text, or anything that
        is JSON. Messages with one ordering `key` arrive in their order; one with a `delay`, not
        before that is over. Raises MessageError for content that cannot be sent, and for text that
        is not a destination.
        """
        check_destination(destination)
        name = new_name()
        message = sent_message(content, name, key)
        delay_s = 0.0 if delay is None else seconds(delay, "delay")
        self._transaction.keep([WaitingMessage.unparented(destination, message, name, delay_s)])
        return message.id

    def complete_new(
        self, consumer: str, message_ids: Collection[str], policy: Policy = Policy()
    ) -> set[str]:
        """Claim and complete those messages that have no record; return their ids.

        As `claim_many` and `complete_many` do, in one statement: for work that needs no claim,
        because it is stored with the records or not at all. Nothing changes for the other messages,
        and no observer is called. Raises MessageError for an id that cannot identify a message.
        """
        if not message_ids:
            return set()
        check_ids(message_ids)
        keys = [Key(consumer, message_id) for message_id in message_ids]
        # The rules' answer for a message without a record is the same for all of them.
        done = first_completion(to_claim(keys[:1], None, policy)[0])
        rows = [(key, None, done.version) for key in keys]
        written = self._transaction.insert(Case(done, (), rows))
        return {key.message_id for key in written}

    def lately_completed(
        self, consumer: str, message_ids: Collection[str], policy: Policy = Policy()
    ) -> Mapping[str, float]:
        """Those of these messages that are duplicates and, by the policy, are not counted; and when
        each was first seen. For messages without a fingerprint. No observer is called.
        """
        spared = spared_s(policy)
        return self._transaction.completed(consumer, message_ids, spared) if spared else {}

    def put(self, queue: str, messages: Sequence[Message]) -> None:
        """Put messages into the queue of that name in this database: its consumers get them once
        the transaction has committed. Raises MessageError for what is not a message.
        """
        for message in messages:
            check_message(message)
        self._transaction.keep(WaitingMessage.queued(queue, messages))

    def find(self, key: Key) -> Record | None:
        """The record of `key`, if there is one, as the transaction sees it."""
        return self._transaction.look([check_key(key)]).get(key)


class AsyncInbox(AsyncCalls):
    """An Inbox whose calls are coroutines, for a connection of SQLAlchemy's asyncio."""

    def __init__(self, inbox: Inbox, connection: Any) -> None:
        self._calls = inbox
        self._connection = connection
        self.unawaited = Unawaited()

    send = awaited(Inbox.send)
    put = awaited(Inbox.put)

    async def _settle_one(self, command: Command) -> Outcome:
        return await self.run(self._calls._settle_one, command)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """What `function`, which uses the connection, returns."""
        done: T = await self._connection.run_sync(lambda _: function(*args))
        return done


def _noting(call: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., Coroutine[Any, Any, T]]:
    @wraps(call)
    def noted(inbox: AsyncInbox, *args: Any, **options: Any) -> Coroutine[Any, Any, T]:
        return inbox.unawaited.note(call.__name__, call(inbox, *args, **options))

    return noted


for _name, _call in inspect.getmembers(AsyncInbox, inspect.iscoroutinefunction):
    if not _name.startswith("_"):
        setattr(AsyncInbox, _name, _noting(_call))


class AsyncInboxDriver(Driver):
    """The driver over an AsyncInbox."""

    is_joined = True
    may_block = False

    def __init__(self, inbox: AsyncInbox) -> None:
        self._inbox = inbox
        self.calls = inbox._calls

    async def settle(self, commands: Sequence[Command]) -> Sequence[Outcome | Exception]:
        """One outcome for each, in order."""
        return await self.run(self.calls._settle, commands)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """What `function`, which uses the connection, returns."""
        return await self._inbox.run(function, *args)


class JoinedTransaction:
    """The block in which the ledger is part of the caller's transaction."""

    def __init__(
        self, store: Store, connection: Any, inbox_in: Callable[[CallersTransaction], Inbox]
    ) -> None:
        self._store = store
        self._connection = connection
        self._inbox_in = inbox_in

    def __enter__(self) -> Inbox:
        if _is_async(self._connection):
            raise ConfigError("transaction: this connection is async; write `async with`")
        return self._enter(self._connection)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if os.getpid() != self._pid:
            end_child(error)
        self._joining.__exit__(kind, error, trace)

    async def __aenter__(self) -> AsyncInbox:
        if not _is_async(self._connection):
            raise ConfigError("transaction: not an AsyncConnection or AsyncSession; write `with`")
        inbox = await self._connection.run_sync(self._enter)
        self._async_inbox = AsyncInbox(inbox, self._connection)
        return self._async_inbox

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if os.getpid() != self._pid:
            end_child(error)
        if error is None and (call := self._async_inbox.unawaited.forgotten()):
            forgotten = ConfigError(
                f"transaction: inbox.{call}(...) was not awaited; write `await inbox.{call}(...)`"
            )
            await self.__aexit__(ConfigError, forgotten, None)
            raise forgotten
        await self._connection.run_sync(lambda _: self._joining.__exit__(kind, error, trace))

    def _enter(self, connection: Any) -> Inbox:
        self._pid = os.getpid()
        self._joining = self._store.within(connection)
        return self._inbox_in(self._joining.__enter__())


def _is_async(connection: Any) -> bool:
    return hasattr(connection, "run_sync")
