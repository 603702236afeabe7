"""U3 to U6: the ends of deliveries and of deferred messages."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping

from tests.simulation.history import Event, History, Name, StoredRow
from tests.simulation.judging import Judge, Run, is_held, is_operator, returned_runs

_LONGEST_S = 20.0
"""Between the answer to an asking and what follows from it: a worker may be frozen."""


class DeliveryJudge(Judge):
    """U3: an acknowledged message has ended, or the policy lets it go."""

    def wrongs(self) -> Iterator[str]:
        self._lives_of = self._lives()
        self._returned = returned_runs(self.history)
        received: dict[tuple[int, int], float] = {}
        kept: dict[int, Event] = {}
        was_kept: dict[tuple[str, str], float] = {}
        """When a message of that id and content was kept last."""
        for event in self.history.of("delivered", "acknowledged", "dead_letter", "kept"):
            facts = event.facts
            if event.what == "delivered":
                received[facts["tag"]] = event.at
                continue
            name = (facts["id"], facts["fingerprint"])
            if event.what == "kept":
                is_another = any(
                    id_ == facts["id"] and other != facts["fingerprint"] for id_, other in was_kept
                )
                if facts["is_aside"] and not (is_operator(event) or is_another):
                    # What it was when it was asked for: others may have gone on since.
                    yield from self._wrong(event, event.at - _LONGEST_S)
                kept[facts["number"]] = event
                was_kept[name] = event.at
                continue
            is_kept = any(
                (each.facts["id"], each.facts["fingerprint"]) == name
                for each in kept.values()
                if each.facts["is_aside"] is not None
            )
            since = received[facts["tag"]]
            if not (is_kept or was_kept.get(name, -1.0) >= since):
                yield from self._wrong(event, since)

    def _wrong(self, event: Event, since: float) -> Iterator[str]:
        """Why a message may not be let go or set aside, by its record's states during that time."""
        during = [
            row
            for begun, until, row in self._lives_of[event.facts["id"]]
            if until >= since and begun <= event.at and row is not None
        ]
        same = [row for row in during if row.fingerprint == event.facts["fingerprint"]]
        is_acknowledged = event.what == "acknowledged"
        if not is_acknowledged and len(same) < len(during):
            return
        may = self._may_acknowledge if is_acknowledged else self._may_set_aside
        if not any(may(event, row) for row in same):
            yield f"U3: {event.what} without a durable end: {event}"

    def _lives(self) -> Mapping[str, list[tuple[float, float, StoredRow | None]]]:
        """Each version of each record, and from when to when it was stored."""
        lives: dict[str, list[tuple[float, float, StoredRow | None]]] = defaultdict(list)
        for event in self.history.of("row"):
            life = lives[event.facts["key"][1]]
            if life:
                since, _, row = life[-1]
                life[-1] = (since, event.at, row)
            life.append((event.at, float("inf"), event.facts["after"]))
        return lives

    def _may_acknowledge(self, event: Event, row: StoredRow) -> bool:
        if row.state in ("sent", "handled"):
            return True
        if (event.facts["id"], row.birth, row.fence) in self._returned:
            return True
        if self.promises.on_busy == "discard" and row.state == "processing":
            return True
        return self.promises.on_failed == "skip" and row.state == "failed"

    def _may_set_aside(self, event: Event, row: StoredRow) -> bool:
        if row.exhausted:
            return True
        if row.state == "failed":
            return self.promises.on_failed == "skip"
        is_doubt = row.state == "processing" and (row.is_unknown or not is_held(row, event.at))
        return is_doubt and self.promises.on_in_doubt in ("hold", "probe")


class SendJudge(Judge):
    """U4: only committed messages are published, and every committed one is, in the end."""

    def wrongs(self) -> Iterator[str]:
        waiting: dict[tuple[str, str], Name] = {}
        arrived: dict[tuple[str, str], set[str]] = defaultdict(set)
        for event in self.history.of("deferred", "arrived", "undeferred"):
            name = event.facts["message"]
            if event.what == "deferred":
                waiting[name] = event.facts["key"]
            elif event.what == "arrived":
                arrived[name].add(event.facts["body"])
                if name not in waiting:
                    yield f"U4: published, and never committed: {event}"
                elif self._is_early(event, waiting[name], arrived):
                    yield f"U4: published before what its handler has sent first: {event}"
            elif name not in arrived and not is_operator(event):
                yield f"U4: taken for sent, and not published: {event}"
        for name, bodies in arrived.items():
            if len(bodies) > 1:
                yield f"U4: one id for several messages: {name}"
        yield from self._missing(arrived)

    def _is_early(
        self, event: Event, key: Name, arrived: Mapping[tuple[str, str], set[str]]
    ) -> bool:
        """Whether what the same handler has sent before this has not arrived yet."""
        if not self.promises.published.get(key):
            return False
        number = json.loads(event.facts["body"])["number"]
        before = {body for bodies in arrived.values() for body in bodies}
        return any(_body(key, earlier) not in before for earlier in range(number))

    def _missing(self, arrived: Mapping[tuple[str, str], set[str]]) -> Iterator[str]:
        """All that a completed run has sent is there, each under one id."""
        by_body: dict[str, set[tuple[str, str]]] = defaultdict(set)
        for name, bodies in arrived.items():
            for body in bodies:
                by_body[body].add(name)
        for body, names in by_body.items():
            if len(names) > 1:
                yield f"U4: one message under several ids: {body}"
        if self.promises.on_in_doubt == "probe":
            return  # What a probe has found out sends nothing.
        touched = {event.facts["key"] for event in self.history.of("row") if is_operator(event)}
        for key in _completed(self.history) - touched:
            for number in range(self.promises.published.get(key, 0)):
                body = _body(key, number)
                if body not in by_body and self.promises.settled_at is not None:
                    yield f"U4: completed, and never published: {body}"


def _body(key: Name, number: int) -> str:
    """Of what the handler of a message sends at that place."""
    return f'{{"parent": "{key[1]}", "number": {number}}}'


def _completed(history: History) -> set[Name]:
    last = {event.facts["key"]: event.facts["after"] for event in history.of("row")}
    return {key for key, row in last.items() if row is not None and row.state == "sent"}


class EndJudge(Judge):
    """U5, U6, and that nothing of the library has broken."""

    def wrongs(self) -> Iterator[str]:
        for event in self.history.of("broke", "thread_died", "stuck", "hangs"):
            yield f"something broke: {event}"
        if self.promises.settled_at is None:
            yield "U6: not settled within its time after the last fault"
            return
        last = {event.facts["key"]: event.facts["after"] for event in self.history.of("row")}
        dead = {event.facts["id"] for event in self.history.of("dead_letter")}
        dead |= {event.facts["id"] for event in self.history.of("kept") if event.facts["is_aside"]}
        done = {event.facts["key"] for event in self.history.of("done")}
        said = {
            event.facts["key"]
            for event in self.history.of("row")
            if event.facts["after"] is not None
            and event.facts["after"].state == "sent"
            and is_operator(event)
        }
        returned = returned_runs(self.history)
        # What an operator forgot after its end has no other: a straggler's run may fail.
        forgotten = {
            event.facts["key"]
            for event in self.history.of("row")
            if event.facts["after"] is None
            and is_operator(event)
            and _has_ended(event.facts["key"], event.facts["before"], returned)
        }
        for key in self.promises.published:
            row = last.get(key)
            is_returned = row is not None and _has_returned(key, row, returned)
            wrong = None if is_returned else self._wrong_end(row, key[1] in dead)
            if wrong is not None and key not in forgotten:
                yield f"U5: {key[1]}: {wrong}"
            # By the word of a probe or of an operator, which are true, it is done without one.
            is_said = self.promises.on_in_doubt == "probe" or key in said
            if row is not None and row.state == "sent" and key not in done and not is_said:
                yield f"at least once: {key[1]}: completed, and no run has come to its end"

    def _wrong_end(self, row: StoredRow | None, is_dead: bool) -> str | None:
        promises = self.promises
        if promises.on_busy == "discard":
            return None  # Whoever found it busy has let the delivery go.
        if row is None:
            return None if is_dead else "accepted, and nobody knows it"
        if row.state == "sent" or row.exhausted:
            return None
        if row.state == "failed":
            is_let_go = promises.on_failed == "skip" or is_dead
            return None if is_let_go else "failed, and nobody tries it again"
        if row.state == "processing" and is_dead:
            return None
        return f"left {row.state}"


def _has_returned(key: Name, row: StoredRow, returned: set[Run]) -> bool:
    return (key[1], row.birth, row.fence) in returned


def _has_ended(key: Name, row: StoredRow, returned: set[Run]) -> bool:
    return row.state != "processing" or _has_returned(key, row, returned)
