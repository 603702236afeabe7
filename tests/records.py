"""Helpers for tests of stores: records, waiting messages, and single calls in transactions."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

from oncely.core.cases import cases_of
from oncely.core.change import Change, Fields
from oncely.core.commands import Granted, Outcome
from oncely.core.message import Message
from oncely.core.record import Claim, Key, Record, State
from oncely.core.waiting import OUTBOX, WaitingMessage
from oncely.ledger.ledger import Ledger
from oncely.stores.store import Backlog, Records, Store


def key_of(message_id: str) -> Key:
    """A key of the tests' consumer."""
    return Key("billing", message_id)


PARENT = key_of("parent")
LEASE_S = 60.0


def fresh(message_id: str, consumer: str = "billing", **fields: Any) -> Record:
    """A record as a first claim writes it, except `fields`."""
    record = Record(
        key=Key(consumer, message_id),
        state=State.PROCESSING,
        attempts=1,
        fence=1,
        first_seen=0.0,
        last_seen=0.0,
        lease_until=LEASE_S,
        version=5 << 24,
    )
    return record._replace(**fields)


def deferred(
    message_id: str,
    destination: str = "mail",
    *,
    key: str | None = None,
    body: bytes = b"{}",
    parent: Key = PARENT,
    position: int = 0,
    delay_s: float = 0.0,
) -> WaitingMessage:
    """A deferred message."""
    message = Message(message_id, body, key=key)
    return WaitingMessage(message_id, destination, message, parent, position, delay_s)


def granted(outcome: Outcome) -> Claim:
    """The claim of an outcome that has to be Granted. Raises AssertionError for any other."""
    if isinstance(outcome, Granted):
        return outcome.claim
    raise AssertionError(f"not granted: {outcome}")


def record_of(ledger: Ledger, key: Key) -> Record:
    """The record of a message that has one. Raises AssertionError where there is none."""
    record = ledger.find(key)
    assert record is not None, f"no record of {key}"
    return record


class Swap(NamedTuple):
    """A record as it is believed to be stored, and as it is to be; None where it is removed."""

    old: Record
    new: Record | None


def insert(
    at: Records, records: Sequence[Record], believed: Mapping[str, float | None] | None = None
) -> set[Key]:
    """Insert these where none is there, their leases counted from now; the keys of those that are
    written.
    """
    rows = [
        (each.key, None, _whole(each, without=("exhausted", "duplicates", "result")))
        for each in records
    ]
    return {key for case in cases_of(rows) for key in at.insert(case, believed)}


def swap(at: Records, swaps: Sequence[Swap]) -> set[Key]:
    """Write each new record over the old one; the keys of those that are written."""
    changes = [(old.key, old.version, _whole(new)) for old, new in swaps if new is not None]
    written = {key for case in cases_of(changes) for key in at.update(case)}
    return written | at.delete([(old.key, old.version) for old, new in swaps if new is None])


def _whole(record: Record, without: Collection[str] = ()) -> Change:
    """A change of all fields but these."""
    names = {name: "lease_until" if name == "lease_s" else name for name in Fields.__annotations__}
    values = {name: getattr(record, of) for name, of in names.items() if name not in without}
    return Change(record.version, cast(Fields, values))


class Doing:
    """Has the methods of Inside, each in a transaction of its own."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.ledger = Ledger(store)

    def take(
        self,
        limit: int,
        hold_s: float,
        parents: Sequence[Key] | None = None,
        queue: str = OUTBOX,
        *,
        one_per_lane: bool = False,
        counts: bool = False,
    ) -> Sequence[WaitingMessage]:
        """As in Inside; by default, from the queue of deferred messages."""
        how = {"one_per_lane": one_per_lane, "counts": counts}
        return self.store.transaction(
            lambda transaction: transaction.take(queue, limit, hold_s, parents, **how)
        )

    def backlog(self, queue: str = OUTBOX) -> Backlog:
        """The backlog of a queue."""
        return self.ledger.mailbox.backlog(queue)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def do(*arguments: Any, **named: Any) -> Any:
            return self.store.transaction(
                lambda transaction: getattr(transaction, name)(*arguments, **named)
            )

        return do


def ids_of(messages: Sequence[WaitingMessage]) -> list[str]:
    """Their own ids, in their order."""
    return [message.id for message in messages]
