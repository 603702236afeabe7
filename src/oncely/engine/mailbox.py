"""Mailbox: the messages that wait in a ledger, for whoever takes them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

from oncely.core.binding import Binding
from oncely.core.commands import ClaimOutcome, Complete, Finish, Granted, Reset
from oncely.core.durations import Duration, seconds
from oncely.core.errors import MessageError
from oncely.core.message import Message, check_message
from oncely.core.policy import Policy
from oncely.core.record import Key, Record, check_key
from oncely.core.waiting import (
    OUTBOX,
    DeadLetter,
    WaitingMessage,
    consumer_of,
    retries_of,
    retry_name,
)
from oncely.engine.means import SettlingMeans
from oncely.engine.request import Request, to_claim, to_write
from oncely.stores.store import Backlog, Inside, Listing, PutBack, Store

_PAGE = 100


class Mailbox:
    """What waits: to be sent, to be tried again, for people, for a consumer.

    That of an inbox is a part of its transaction. Where the store has no transactions nothing ever
    waits, and to keep or take raises ConfigError.
    """

    def __init__(self, means: SettlingMeans) -> None:
        self._means = means

    def deferred(self, key: Key) -> Sequence[WaitingMessage]:
        """What is not sent yet of what `key` deferred, in the order of sending."""
        check_key(key)
        return [each for each in self._of([key]) if each.queue == OUTBOX]

    def waiting(self, keys: Collection[Key]) -> set[Key]:
        """Those of `keys` of which messages wait, or are set aside."""
        return {message.parent for message in self._of(keys)}

    def retries(self, keys: Collection[Key]) -> Mapping[Key, WaitingMessage]:
        """As what those of `keys` wait that are to be tried again, or were set aside then."""
        return {each.parent: each for each in self._of(keys) if each.name == retry_name(each.queue)}

    def _of(self, keys: Collection[Key]) -> Sequence[WaitingMessage]:
        means = self._means
        return means._transact(lambda inside: inside.waiting(keys)) if means.can_defer else []

    def keep(
        self,
        messages: Sequence[WaitingMessage],
        anew: Sequence[WaitingMessage] = (),
        removed: Sequence[WaitingMessage] = (),
    ) -> None:
        """Keep these, but for what is there already, which stays as it is; and those of `anew`,
        which waits anew where it is there. With them, those `removed` that are held still are done
        with in their queues. All of that is stored together, or nothing.
        """

        def work(inside: Inside) -> None:
            if messages:
                inside.keep(messages)
            keep_anew(inside, anew)
            if removed:
                inside.remove_held(removed)

        if messages or anew or removed:
            self._means._transact(work)

    def lanes(self, lanes: Collection[str]) -> set[str]:
        """Those of these lanes in which any wait that are not set aside."""
        return self._means._transact(lambda inside: inside.lanes(lanes))

    def take(
        self,
        limit: int,
        hold: Duration,
        parents: Sequence[Key] | None = None,
        *,
        queue: str = OUTBOX,
    ) -> Sequence[WaitingMessage]:
        """At most `limit` messages of a queue that can be taken now, in their order; of these
        `parents` alone, where any are named. Nobody else is given them for the time of `hold`. Of
        what is not to be sent, the next of a lane waits until the one before is removed.
        """
        hold_s = seconds(hold, "hold")
        one_per_lane = queue != OUTBOX
        return self._means._transact(
            lambda inside: inside.take(queue, limit, hold_s, parents, one_per_lane=one_per_lane)
        )

    def sent(self, messages: Sequence[WaitingMessage]) -> None:
        """A transport has confirmed these: they wait no more, and a message whose last ones they
        were is completed. To say it twice is not an error.
        """

        def work(inside: Inside) -> None:
            # What was sent from elsewhere belongs to no message.
            parents = sorted({each.parent for each in messages if each.parent.consumer})
            # Held: of two that send the last two, one comes after the other.
            found = inside.load(parents).records if parents else {}
            inside.remove(messages)
            self._finish(inside, parents, found)

        self._means._transact(work)

    def let_go(self, done: Sequence[WaitingMessage], left: Sequence[PutBack]) -> None:
        """Of what was taken to be tried, these wait no more, and those go on waiting. One that has
        failed since, or was set aside, stays as that has left it.
        """

        def work(inside: Inside) -> None:
            held = inside.held([*done, *(each.message for each in left)])
            inside.remove([each for each in done if each.number in held])
            inside.put_back([each for each in left if each.message.number in held])

        self._means._transact(work)

    def put_back(self, changes: Sequence[PutBack]) -> None:
        """These go on waiting."""
        self._means._transact(lambda inside: inside.put_back(changes))

    def finish(self, keys: Sequence[Key]) -> None:
        """Complete those that are handled and of which nothing waits to be sent."""

        def work(inside: Inside) -> None:
            self._finish(inside, keys, inside.load(keys).records)

        if self._means.can_defer:
            self._means._transact(work)
        else:
            self._means._settle([Request(key, Finish()) for key in keys])

    def _finish(self, inside: Inside, keys: Sequence[Key], found: Mapping[Key, Record]) -> None:
        if not keys:
            return
        unsent = {each.parent for each in inside.waiting(keys) if each.queue == OUTBOX}
        done = [Request(key, Finish(), found.get(key)) for key in keys if key not in unsent]
        self._means._settle_inside(inside, done)


class LedgerMailbox(Mailbox):
    """The mailbox of a whole ledger."""

    def __init__(self, means: SettlingMeans, store: Store) -> None:
        super().__init__(means)
        self._store = store

    # ---- Looking -------------------------------------------------------------------------------

    def backlog(self, queue: str = OUTBOX) -> Backlog:
        """What waits in a queue, added up."""
        return self.backlogs().get(queue, Backlog(waiting=0, set_aside=0, lag_s=0.0))

    def backlogs(self) -> Mapping[str, Backlog]:
        """The same of each queue in which anything waits."""
        return self._store.backlogs()

    def free_in_s(self, queue: str) -> float | None:
        """In how many seconds the next of a queue can be taken; None where nothing waits there."""
        return self._store.free_in_s(queue)

    def wait(self, timeout: Duration) -> None:
        """Return as soon as messages may have been kept, at the latest after `timeout`."""
        self._store.wait_for_messages(seconds(timeout, "timeout"))

    def listed(
        self, queue: str, limit: int, *, is_set_aside: bool = False
    ) -> Iterator[WaitingMessage]:
        """At most `limit` that wait in a queue, in their order; `*` at the end of its name stands
        for any number of letters.
        """
        listing = Listing(queue, is_set_aside, min(limit, _PAGE))
        while limit > 0 and (page := self._store.listed(listing)):
            yield from page
            limit -= len(page)
            listing = Listing(queue, is_set_aside, min(limit, _PAGE), page[-1].number or 0)

    def dead(self, consumer: str | None, limit: int) -> Iterator[DeadLetter]:
        """The dead letters of a consumer, or of all."""
        queue = retries_of("*" if consumer is None else consumer)
        return map(DeadLetter.of, self.listed(queue, limit, is_set_aside=True))

    def dead_numbered(self, ids: Collection[int]) -> Sequence[DeadLetter]:
        """Those of these dead letters that are still there."""
        found = self._means._transact(lambda inside: inside.numbered(ids))
        return [DeadLetter.of(each) for each in _dead_of(found)]

    # ---- Putting in ----------------------------------------------------------------------------

    def put_once(self, key: Key, queue: str, message: Message, policy: Policy) -> ClaimOutcome:
        """Put a message into a queue of this database, unless that was done under `key` before: the
        record of that is completed in the same transaction. Granted where it was put in now.

        Raises MessageError for what is not a message.
        """
        rows = WaitingMessage.queued(queue, [check_message(message)])
        [request] = to_claim([key], None, policy, None, None, None, None)

        def work(inside: Inside) -> ClaimOutcome:
            [outcome] = self._means._settle_inside(inside, [request])
            if isinstance(outcome, Granted):
                self._means._settle_inside(inside, [to_write(Complete(outcome.claim))])
                inside.keep(rows)
            return cast(ClaimOutcome, outcome)

        return self._means._transact(work)

    # ---- What a broker brings ------------------------------------------------------------------

    def bind(self, bindings: Collection[Binding]) -> None:
        """Remember what brings messages into queues of a broker, which does not tell it."""
        self._store.bind(bindings)

    def unbind(self, bindings: Collection[Binding]) -> None:
        """Remember these no more."""
        self._store.unbind(bindings)

    def bindings(self, queue: str) -> Sequence[Binding] | None:
        """What is remembered of a queue; None where the ledger is not in SQL."""
        return self._store.bindings(queue)

    # ---- For operators -------------------------------------------------------------------------

    def send_again(self) -> int:
        """Let the messages that were set aside be sent after all; return how many."""
        count = 0
        while page := self._store.listed(Listing(OUTBOX, is_set_aside=True, limit=_PAGE)):
            self._free(page)
            count += len(page)
        return count

    def _free(self, messages: Sequence[WaitingMessage]) -> None:
        self._means._transact(lambda inside: inside.free(messages))

    def retry_dead(self, ids: Collection[int], message: Message | None, by: str, why: str) -> int:
        """Let dead letters be tried again, and their records run; return how many there were."""

        def work(inside: Inside) -> int:
            letters = _dead_of(inside.numbered(ids))
            resets = [
                Request(each.parent, Reset(by, why, is_edited=message is not None))
                for each in letters
                if each.name == retry_name(each.queue)
            ]
            # Refused where nothing hinders it to run: then there is nothing to reset.
            self._means._settle_inside(inside, resets)
            inside.free([_edited(each, message) for each in letters])
            return len(letters)

        return self._means._transact(work)

    def discard_dead(self, ids: Collection[int]) -> int:
        """Remove dead letters; return how many there were. Their records stay as they are."""

        def work(inside: Inside) -> int:
            letters = _dead_of(inside.numbered(ids))
            inside.remove(letters)
            return len(letters)

        return self._means._transact(work)


def keep_anew(inside: Inside, messages: Sequence[WaitingMessage]) -> None:
    """Keep these; what is there already, and is not to be sent, waits anew."""
    for renews in (False, True):
        if those := [each for each in messages if (each.queue != OUTBOX) == renews]:
            inside.keep(those, renews=renews)


def _dead_of(messages: Sequence[WaitingMessage]) -> list[WaitingMessage]:
    return [each for each in messages if each.is_set_aside and consumer_of(each.queue) is not None]


def _edited(letter: WaitingMessage, message: Message | None) -> WaitingMessage:
    """A dead letter with other content. Raises MessageError where that is another message."""
    if message is None:
        return letter
    check_message(message)
    if letter.parent.message_id and message.id != letter.id:
        raise MessageError(f"id: {message.id!r} is another message than {letter.id!r}")
    return replace(letter, id=message.id, message=message)
