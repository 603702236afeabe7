"""What waits in the ledger: who may take it, when, in which order, and when it may be gone."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from tests.simulation.history import Event, Name, StoredRow
from tests.simulation.judging import NEAR_S, Judge, is_operator

_SEEN_S = 10.0
"""After so long a process knows what another has left that has died."""


@dataclass(slots=True)
class _Kept:
    """A message that is to be tried again, or is set aside, as it was kept."""

    key: Name
    lane: str
    order: str | None
    is_aside: bool
    at: float
    by: str


class WaitingJudge(Judge):
    """What waits is taken by one at a time and only when it is due, the first of its lane; who has
    not taken it does not run it; and it goes on waiting until its message is done.
    """

    def wrongs(self) -> Iterator[str]:
        self._kept: dict[int, _Kept] = {}
        self._takers: dict[Name, set[str]] = defaultdict(set)
        self._rows: dict[Name, StoredRow | None] = {}
        for event in self.history.of("kept", "taken", "row", "started"):
            wrong = self._wrong(event)
            if wrong is not None:
                yield f"{wrong}: {event}"

    def _wrong(self, event: Event) -> str | None:
        match event.what:
            case "kept":
                return self._wrong_keeping(event)
            case "taken":
                self._takers[event.facts["key"]].add(event.actor)
                return self._wrong_taking(event)
            case "row":
                return self._wrong_row(event)
            case _:
                return self._wrong_order(event)

    def _wrong_keeping(self, event: Event) -> str | None:
        facts = event.facts
        number, key, is_aside = facts["number"], facts["key"], facts["is_aside"]
        former = self._kept.pop(number, None)
        if is_aside is not None:
            kept = _Kept(key, facts["lane"], facts["order"], is_aside, event.at, event.actor)
            self._kept[number] = kept
            return None
        row = self._rows.get(key)
        is_done = row is not None and row.state in ("sent", "handled")
        is_let_go = is_operator(event) or self.promises.on_busy == "discard"
        # A message that an operator forgot while it waited, and that was delivered and failed anew.
        is_skipped = row is not None and row.state == "failed" and self.promises.on_failed == "skip"
        if is_done or is_let_go or is_skipped or former is None:
            return None
        return "U5: what waits is gone, and its message is not done"

    def _wrong_taking(self, event: Event) -> str | None:
        facts = event.facts
        if facts["is_aside"]:
            return "taken, though it waits for people"
        if facts["due"] > event.at + NEAR_S:
            return "taken before it is due"
        if facts["held_until"] > event.at + NEAR_S:
            return "taken from who holds it"
        own = self._kept.get(facts["number"])
        if own is not None and self._stand_in_front(own.lane, facts["number"]):
            return "taken before what stands in front of it"
        return None

    def _stand_in_front(self, lane: str, number: int) -> bool:
        return any(
            each.lane == lane and not each.is_aside and other < number
            for other, each in self._kept.items()
        )

    def _wrong_row(self, event: Event) -> str | None:
        key, before, after = (event.facts[name] for name in ("key", "before", "after"))
        # Who was about to remove what was done does so also when an operator forgets it meanwhile.
        self._rows[key] = before if after is None and is_operator(event) else after
        if before is None or after is None or is_operator(event):
            return None
        waits = before.state == "failed" and before.lease_until is not None
        is_granted = after.fence > before.fence and after.state == "processing"
        if waits and is_granted and event.actor not in self._takers[key]:
            return "granted to who has not taken it, while it waits"
        if waits and is_granted and before.lease_until > event.at + NEAR_S:
            return "granted before it is due"
        return None

    def _wrong_order(self, event: Event) -> str | None:
        """Whether a message runs while one of its order waits that comes before it."""
        key = event.facts["key"]
        order = self.promises.order.get(key)
        if order is None:
            return None
        own = min((n for n, each in self._kept.items() if each.key == key), default=None)
        for number, each in self._kept.items():
            is_before = each.key != key and (own is None or number < own)
            is_known = each.by == event.actor or event.at - each.at > _SEEN_S
            if each.order == order and is_before and is_known and not each.is_aside:
                return f"runs before {each.key[1]}, behind which it is to wait"
        return None
