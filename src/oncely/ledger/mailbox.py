"""Mailbox: the messages that wait in a ledger, for whoever takes them."""

import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from oncely.core.activity import LATE_S
from oncely.core.commands import (
    ClaimOutcome,
    Complete,
    Discard,
    Finish,
    Granted,
    Outcome,
    Reset,
    Written,
)
from oncely.core.durations import Duration, seconds
from oncely.core.errors import MessageError, RefusedError
from oncely.core.message import Message, check_message
from oncely.core.policy import Policy
from oncely.core.record import Key, Record, check_key
from oncely.core.waiting import (
    ERASED,
    OUTBOX,
    DeadLetter,
    Erased,
    WaitingMessage,
    consumer_of,
    retries_of,
)
from oncely.ledger.arguments import to_claim
from oncely.ledger.ledger_calls import LedgerCalls, keep_anew, make_room
from oncely.stores.store import Backlog, Listing, PutBack, Store, Transaction

_PAGE = 100
_Waiting = Sequence[WaitingMessage]
_Records = Mapping[Key, Record]


class Mailbox:
    """Messages that wait: to be sent, for a retry, for people, for a consumer.

    The mailbox of an inbox is a part of its transaction. Where the store has no transactions, no
    message ever waits, and `keep` and `take` raise ConfigError.
    """

    def __init__(self, calls: LedgerCalls) -> None:
        self._calls = calls

    def deferred(self, key: Key) -> Sequence[WaitingMessage]:
        """The messages that `key` deferred and that are not sent yet, in the order of sending."""
        check_key(key)
        return [each for each in self._of([key]) if each.queue == OUTBOX]

    def of(self, key: Key) -> Sequence[WaitingMessage]:
        """All that waits of `key`, in whatever queue, set aside or not."""
        return self._of([check_key(key)])

    def of_many(self, keys: Collection[Key]) -> Mapping[Key, Sequence[WaitingMessage]]:
        """The same of those of `keys` of which anything waits."""
        found: dict[Key, list[WaitingMessage]] = {}
        for message in self._of(keys):
            found.setdefault(message.parent, []).append(message)
        return found

    def waiting(self, keys: Collection[Key]) -> set[Key]:
        """Those of `keys` of which messages wait, or are set aside."""
        return {message.parent for message in self._of(keys)}

    def retries(self, keys: Collection[Key]) -> Mapping[Key, WaitingMessage]:
        """The retries of those of `keys` that have one, waiting or set aside."""
        return {each.parent: each for each in self._of(keys) if each.is_retry}

    def _of(self, keys: Collection[Key]) -> Sequence[WaitingMessage]:
        calls = self._calls
        return (
            calls._transact(lambda transaction: transaction.waiting(keys))
            if calls.can_defer
            else []
        )

    def keep(
        self,
        messages: Sequence[WaitingMessage],
        anew: Sequence[WaitingMessage] = (),
        removed: Sequence[WaitingMessage] = (),
    ) -> None:
        """Keep `messages`; one that is there already stays as it is. Keep those of `anew`; one that
        is there already is replaced. Remove from their queues those of `removed` that are still
        held. All of that is stored together, or nothing.
        """

        def work(transaction: Transaction) -> None:
            if messages:
                make_room(transaction, messages)
                transaction.keep(messages)
            keep_anew(transaction, anew)
            if removed:
                transaction.remove_held(removed)

        if messages or anew or removed:
            self._calls._transact(work)

    def lanes(self, queue: str, lanes: Collection[str]) -> set[str]:
        """Those of these lanes of a queue in which messages wait that are not set aside."""
        return self._calls._transact(lambda transaction: transaction.lanes(queue, lanes))

    def take(
        self,
        limit: int,
        visibility: Duration,
        parents: Sequence[Key] | None = None,
        *,
        queue: str = OUTBOX,
    ) -> Sequence[WaitingMessage]:
        """At most `limit` messages of a queue that can be taken now, in their order; only those of
        these `parents`, where any are named. Nobody else is given them for the time of
        `visibility`. Except in the outbox, the next of a lane waits until the one before it is
        removed.
        """
        visibility_s = seconds(visibility, "visibility")
        one_per_lane = queue != OUTBOX
        return self._calls._transact(
            lambda transaction: transaction.take(
                queue, limit, visibility_s, parents, one_per_lane=one_per_lane
            )
        )

    def sent(self, messages: Sequence[WaitingMessage]) -> None:
        """A transport has confirmed these: they are removed. A message whose last ones they were is
        completed. Safe to repeat.
        """

        def work(transaction: Transaction) -> None:
            parents = _parents(messages)
            # The load locks: of two relays that send the last two, one comes after the other.
            found = transaction.load(parents).records if parents else {}
            transaction.remove(messages)
            self._finish(transaction, parents, found)

        self._calls._transact(work)

    def let_go(self, done: Sequence[WaitingMessage], left: Sequence[PutBack]) -> None:
        """Of messages that were taken, remove those that are `done`, and put back those that are
        `left`. One that has failed or was set aside since, or is taken again, stays as it is.
        """

        def work(transaction: Transaction) -> None:
            held = transaction.held([*done, *(each.message for each in left)])
            transaction.remove([each for each in done if each.number in held])
            transaction.put_back([each for each in left if each.message.number in held])

        self._calls._transact(work)

    def put_back(self, changes: Sequence[PutBack]) -> None:
        """Let these, which were taken, go on waiting, each as its change says; as `let_go`."""
        self.let_go((), changes)

    def finish(self, keys: Sequence[Key]) -> None:
        """Complete those that are handled and of which nothing waits to be sent."""

        def work(transaction: Transaction) -> None:
            self._finish(transaction, keys, transaction.load(keys).records)

        if self._calls.can_defer:
            self._calls._transact(work)
        else:
            self._calls._settle([Finish(key) for key in keys])

    def _finish(
        self, transaction: Transaction, keys: Sequence[Key], found: Mapping[Key, Record]
    ) -> None:
        if not keys:
            return
        unsent = {each.parent for each in transaction.waiting(keys) if each.queue == OUTBOX}
        done = [Finish(key, found.get(key)) for key in keys if key not in unsent]
        self._calls._settle_in(transaction, done)


class LedgerMailbox(Mailbox):
    """The mailbox of a whole ledger."""

    def __init__(self, calls: LedgerCalls, store: Store) -> None:
        super().__init__(calls)
        self._store = store

    # ---- Looking -------------------------------------------------------------------------------

    def backlog(self, queue: str = OUTBOX) -> Backlog:
        """How much waits in a queue."""
        return self.backlogs().get(queue, Backlog(waiting=0, set_aside=0, lag_s=0.0))

    def backlogs(self) -> Mapping[str, Backlog]:
        """The same of each queue in which anything waits."""
        return self._store.backlogs()

    def broker_backlogs(self) -> Mapping[str, Backlog]:
        """The same of each queue of a broker that tells, as its consumers have said last; nothing
        of consumers that are gone.
        """
        telling = [each for each in self._store.workers() if each.lags and each.ended is None]
        if not telling:
            return {}
        since, most = self._store.load(()).now - LATE_S, dict[str, int]()
        for lags in (each.lags or {} for each in telling if each.seen >= since):
            most |= {name: max(count, most.get(name, 0)) for name, count in lags.items()}
        return {name: Backlog(most[name], set_aside=0, lag_s=0.0) for name in sorted(most)}

    def free_in_s(self, queue: str) -> float | None:
        """Seconds until the next of a queue can be taken; None where nothing waits there."""
        return self._store.free_in_s(queue)

    def wait(self, timeout: Duration) -> None:
        """Return as soon as messages may have been kept, at the latest after `timeout`."""
        self._store.wait_for_messages(seconds(timeout, "timeout"))

    def listed(
        self,
        queue: str,
        limit: int,
        *,
        is_set_aside: bool = False,
        with_bodies: bool = True,
    ) -> Iterator[WaitingMessage]:
        """At most `limit` that wait in a queue: those that are set aside, or free to take, in their
        order, then the others, by when they can be taken; `*` at the end of its name stands for any
        number of characters. Without bodies each message has an empty one.
        """
        return self._store.listed(Listing(queue, is_set_aside, limit, with_bodies=with_bodies))

    def dead(
        self, consumer: str | None, limit: int, *, with_bodies: bool = True
    ) -> Iterator[DeadLetter]:
        """The dead letters of a consumer, or of all. Without bodies each has an empty one."""
        queue = retries_of("*" if consumer is None else consumer)
        found = self.listed(queue, limit, is_set_aside=True, with_bodies=with_bodies)
        return map(DeadLetter.of, found)

    def dead_of(self, key: Key) -> Sequence[DeadLetter]:
        """The dead letters of one message: as it failed, and what came under its id."""
        return [DeadLetter.of(each) for each in self._of([key]) if is_dead(each)]

    def dead_numbered(self, ids: Collection[int]) -> Sequence[DeadLetter]:
        """Those of these dead letters that are still there."""
        found = self._calls._transact(lambda transaction: transaction.numbered(ids))
        return [DeadLetter.of(each) for each in found if is_dead(each)]

    # ---- Putting in ----------------------------------------------------------------------------

    def put_once(self, key: Key, queue: str, message: Message, policy: Policy) -> ClaimOutcome:
        """Put a message into a queue of this database, unless that was done under `key` before. The
        record of `key` is completed in the same transaction. Granted where it was put in now.

        Raises MessageError for what is not a message.
        """
        rows = WaitingMessage.queued(queue, [check_message(message)])
        commands = to_claim([key], None, policy)

        def work(transaction: Transaction) -> ClaimOutcome:
            [outcome] = self._calls._settle_in(transaction, commands)
            if isinstance(outcome, Granted):
                self._calls._settle_in(transaction, [Complete(outcome.claim)])
                transaction.keep(rows)
            return cast(ClaimOutcome, outcome)

        return self._calls._transact(work)

    # ---- For operators -------------------------------------------------------------------------

    def send_again(self) -> int:
        """Let the messages that were set aside be sent after all; return how many."""
        refused = self.listed(OUTBOX, sys.maxsize, is_set_aside=True, with_bodies=False)
        ids = [each.number or 0 for each in refused]
        starts = range(0, len(ids), _PAGE)
        return sum(len(self.send_again_numbered(ids[at : at + _PAGE])) for at in starts)

    def send_again_numbered(self, ids: Collection[int]) -> Sequence[WaitingMessage]:
        """The same for those of these numbers; return those that still were set aside."""
        return self._decide(ids, _is_refused, lambda transaction, found, _: transaction.free(found))

    def discard_unsent(self, ids: Collection[int]) -> Sequence[WaitingMessage]:
        """Remove those of these numbers that still are set aside, which are not sent; return them.
        A message of which they were the last is completed.
        """

        def discard(transaction: Transaction, refused: _Waiting, records: _Records) -> None:
            transaction.remove(refused)
            self._finish(transaction, _parents(refused), records)

        return self._decide(ids, _is_refused, discard)

    def unsent(self, ids: Collection[int]) -> Sequence[WaitingMessage]:
        """Those of these numbers that are to be sent, set aside or not."""
        found = self._calls._transact(lambda transaction: transaction.numbered(ids))
        return [each for each in found if each.queue == OUTBOX]

    def discard(self, key: Key, by: str, why: str) -> Outcome:
        """Set a waiting retry aside. Raises RefusedError where it does not wait."""
        reason = f"discarded by {by}: {why}" if why else f"discarded by {by}"

        def work(transaction: Transaction) -> Outcome:
            # First: it holds the record, so that nobody begins with the message meanwhile.
            [outcome] = self._calls._settle_in(transaction, [Discard(key, by, why)])
            found = [each for each in transaction.waiting([key]) if each.is_retry]
            if isinstance(outcome, Written) and outcome.is_repeated:
                return outcome
            if isinstance(outcome, Written) and outcome.record is None:
                # It was never tried, and there is no record to hold: a worker may take it now.
                found = [*transaction.idle([each.number or 0 for each in found])]
            if not found or found[0].is_set_aside:
                raise RefusedError(f"{key.message_id!r} ({key.consumer}) does not wait for a retry")
            if isinstance(outcome, Written):
                transaction.put_back([PutBack(found[0], reason, None, is_try=False)])
            return outcome

        return self._calls._transact(work)

    def retry_dead(self, ids: Collection[int], message: Message | None, by: str, why: str) -> int:
        """Let dead letters be tried again, and their records run; return how many still were dead
        letters.
        """

        def retry(transaction: Transaction, letters: _Waiting, _: _Records) -> None:
            resets = [
                Reset(each.parent, by, why, message is not None, is_kept=each.is_taken_here)
                for each in letters
                if each.is_retry
            ]
            # A reset is refused where the record may run anyway: then nothing has to be reset.
            self._calls._settle_in(transaction, resets)
            transaction.free([_edited(each, message) for each in letters])

        return len(self._decide(ids, is_dead, retry))

    def discard_dead(self, ids: Collection[int], before: float = math.inf) -> int:
        """Remove those set aside before that time; return how many. Their records stay."""
        is_meant = partial(is_dead, before=before)
        return len(self._decide(ids, is_meant, lambda at, found, _: at.remove(found)))

    def _decide(
        self,
        ids: Collection[int],
        is_meant: Callable[[WaitingMessage], bool],
        change: Callable[[Transaction, _Waiting, _Records], None],
    ) -> _Waiting:
        """Change those of these that are set aside and meant, given their records; return them.
        Nobody else decides about them meanwhile: of two operators, both were told that they had.
        """

        def work(transaction: Transaction) -> _Waiting:
            parents = _parents(transaction.numbered(ids))
            # The records first, as whoever ends a message holds them first, too.
            records = transaction.load(parents).records if parents else {}
            found = [each for each in transaction.idle(ids) if is_meant(each)]
            change(transaction, found, records)
            return found

        return self._calls._transact(work)


def erase_besides(transaction: Transaction, key: Key, records: int) -> Erased:
    """Remove all that is kept of a message but its record, which is held, or is not there."""
    copies = [*transaction.waiting([key]), *transaction.unparented(key.message_id)]
    if len(transaction.idle([each.number or 0 for each in copies])) < len(copies):
        raise RefusedError(
            f"{key.message_id!r} ({key.consumer}): a worker or a relay has a copy of it in hand; "
            "erase it again in a few minutes"
        )
    steps = len(transaction.steps_of([key]).get(key, ()))
    transaction.forget_steps(key)
    transaction.remove(copies)
    counts = Counter(
        "unsent" if each.queue == OUTBOX else "dead_letters" if is_dead(each) else "waiting"
        for each in copies
    )
    audit = transaction.rename_in_audit(key, ERASED)
    return Erased(records, steps, audit=audit, **counts)


def _parents(messages: _Waiting) -> Sequence[Key]:
    """The keys that these belong to: a message that was sent outside a handler has none."""
    return sorted({each.parent for each in messages if each.parent.consumer})


def is_dead(message: WaitingMessage, before: float = math.inf) -> bool:
    """Whether it is a dead letter, set aside before that time."""
    is_letter = message.is_set_aside and consumer_of(message.queue) is not None
    return is_letter and (message.last_seen or 0.0) < before


def _is_refused(message: WaitingMessage) -> bool:
    return message.is_set_aside and message.queue == OUTBOX


def _edited(letter: WaitingMessage, message: Message | None) -> WaitingMessage:
    """A dead letter with the content of `message`. Raises MessageError where the ids differ."""
    if message is None:
        return letter
    check_message(message)
    if letter.parent.message_id and message.id != letter.id:
        raise MessageError(
            f"id: {message.id!r} is another message than {letter.id!r}; leave the id as it is"
        )
    return replace(letter, id=message.id, message=message)
