"""Mailbox: the messages that wait in a ledger, for whoever sends them."""

from collections.abc import Collection, Mapping, Sequence

from oncely.core.commands import Finish
from oncely.core.deferred import DeferredMessage
from oncely.core.durations import Duration, seconds
from oncely.core.record import Key, Record, check_key
from oncely.engine.means import SettlingMeans
from oncely.engine.request import Request
from oncely.stores.store import Backlog, Inside, PublishRefusal, Store


class Mailbox:
    """What handlers have sent and no transport has confirmed yet; a relay empties it.

    That of an inbox is a part of its transaction. Where the store has no transactions nothing ever
    waits, and to take raises ConfigError.
    """

    def __init__(self, means: SettlingMeans) -> None:
        self._means = means

    def deferred(self, key: Key) -> Sequence[DeferredMessage]:
        """What is not sent yet of what `key` deferred, in the order of sending."""
        check_key(key)
        means = self._means
        return means._transact(lambda inside: inside.waiting([key])) if means.can_defer else []

    def waiting(self, keys: Collection[Key]) -> set[Key]:
        """Those of `keys` with messages that wait to be sent, or are set aside."""
        if not self._means.can_defer:
            return set()
        waiting = self._means._transact(lambda inside: inside.waiting(keys))
        return {message.parent for message in waiting}

    def take(
        self, limit: int, hold: Duration, parents: Sequence[Key] | None = None
    ) -> Sequence[DeferredMessage]:
        """At most `limit` messages that can be sent now, in the order of sending; of these
        `parents` alone, where any are named. Nobody else is given them for the time of `hold`.
        """
        hold_s = seconds(hold, "hold")
        return self._means._transact(lambda inside: inside.take(limit, hold_s, parents))

    def sent(self, messages: Sequence[DeferredMessage]) -> None:
        """A transport has confirmed these: they wait no more, and a message whose last ones they
        were is completed. To say it twice is no error.
        """

        def work(inside: Inside) -> None:
            parents = sorted({message.parent for message in messages})
            # Held: of two that send the last two, one comes after the other.
            found = inside.load(parents).records
            inside.remove(messages)
            self._finish(inside, parents, found)

        self._means._transact(work)

    def put_back(self, refusals: Sequence[PublishRefusal]) -> None:
        """A transport has refused these."""
        self._means._transact(lambda inside: inside.put_back(refusals))

    def finish(self, keys: Sequence[Key]) -> None:
        """Complete those that are handled and of which nothing waits to be sent."""

        def work(inside: Inside) -> None:
            self._finish(inside, keys, inside.load(keys).records)

        if self._means.can_defer:
            self._means._transact(work)
        else:
            self._means._settle([Request(key, Finish()) for key in keys])

    def _finish(self, inside: Inside, keys: Sequence[Key], found: Mapping[Key, Record]) -> None:
        unsent = {message.parent for message in inside.waiting(keys)}
        done = [Request(key, Finish(), found.get(key)) for key in keys if key not in unsent]
        self._means._settle_inside(inside, done)


class LedgerMailbox(Mailbox):
    """The mailbox of a whole ledger."""

    def __init__(self, means: SettlingMeans, store: Store) -> None:
        super().__init__(means)
        self._store = store

    def backlog(self) -> Backlog:
        """What waits to be sent, added up."""
        return self._store.backlog()

    def send_again(self) -> int:
        """Let the messages that were set aside be sent after all; return how many."""
        return self._store.send_again()

    def wait(self, timeout: Duration) -> None:
        """Return as soon as messages may have been deferred, at the latest after `timeout`."""
        self._store.wait_for_deferred(seconds(timeout, "timeout"))
