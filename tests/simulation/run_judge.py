"""Handlers: what their runs may do, and who may store what comes of them."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from tests.simulation.history import Event, Name, StoredRow
from tests.simulation.judging import Judge, is_operator

_NOTICED_S = 1.0
"""What befalls a process is felt a while."""


class HolderJudge(Judge):
    """Steps, messages and failures are stored by who holds the newest claim; and a worker that
    lives and reaches the store keeps its claim.
    """

    def wrongs(self) -> Iterator[str]:
        self._owner: dict[Name, tuple[str, float]] = {}
        """Who was granted the newest claim, and when."""
        self._rows: dict[Name, StoredRow] = {}
        self._troubled: dict[str, float] = {}
        """Until when something was wrong with a process."""
        self._final: set[tuple[Any, ...]] = set()
        """Runs after which no other may follow."""
        self._unknown: set[tuple[Any, ...]] = set()
        """Runs that have raised, and nobody knows what they did."""
        self._marks = {
            (event.facts["key"], event.actor, event.at)
            for event in self.history.of("row")
            if event.facts["after"] is not None and event.facts["after"].state == "handled"
        }
        for event in self.history.events:
            wrong = self._wrong(event)
            if wrong is not None:
                yield f"{wrong}: {event}"

    def _wrong(self, event: Event) -> str | None:
        facts = event.facts
        match event.what:
            case "row":
                return self._wrong_row(event, facts["before"], facts["after"])
            case "step_kept":
                owner, _ = self._owner.get(facts["key"], ("", 0.0))
                row = self._rows.get(facts["key"])
                is_holder = owner == event.actor and row is not None and row.state == "processing"
                return None if is_holder else "U2: a step kept by who holds no claim"
            case "deferred":
                is_marked = (facts["key"], event.actor, event.at) in self._marks
                return None if is_marked else "U4: deferred, and not with the end of its handler"
            case "raised" if facts["final"] or facts["unknown"]:
                runs = self._final if facts["final"] else self._unknown
                runs.add((facts["key"], facts["birth"], facts["fence"]))
            case "wire" | "ends" | "gives_up":
                self._troubled[event.actor] = event.at + _NOTICED_S
            case "kill" | "freeze" | "stop" | "interrupt":
                self._troubled[facts["process"]] = event.at + _NOTICED_S
        return None

    def _wrong_row(
        self, event: Event, before: StoredRow | None, after: StoredRow | None
    ) -> str | None:
        key = event.facts["key"]
        if after is None:
            self._rows.pop(key, None)
            return None
        self._rows[key] = after
        if before is None or after.fence > before.fence:
            former = self._owner.get(key)
            self._owner[key] = event.actor, event.at
            is_taken = before is not None and before.state == "processing" and not before.is_unknown
            if is_taken and former is not None:
                return self._wrong_loss(*former)
        elif after.birth != before.birth:
            self._owner.pop(key, None)  # It is released, and in doubt again, as it was before.
        run = (key, after.birth, after.fence)
        if after.state != "failed" or is_operator(event):
            return None
        if run in self._final and not after.exhausted:
            return "failed permanently, and to be tried again"
        is_doubt = run in self._unknown and self.promises.on_in_doubt in ("hold", "probe")
        return "said to have failed, and nobody knows" if is_doubt else None

    def _wrong_loss(self, former: str, granted_at: float) -> str | None:
        if self._troubled.get(former, -1.0) >= granted_at:
            return None
        return f"taken from {former}, whom nothing befell"


class RunJudge(Judge):
    """Handlers: only under a claim, once for each, and as often as the policy allows."""

    def wrongs(self) -> Iterator[str]:
        grants = self._grants()
        seen: set[tuple[Any, ...]] = set()
        first_body: dict[tuple[Name, int], bool] = {}
        births = self._births()
        for event in self.history.of("started"):
            facts = event.facts
            run = (facts["key"], facts["birth"], facts["fence"])
            if (*run, facts["attempt"], event.actor) not in grants:
                yield f"U2: a handler runs without a claim: {event}"
            if run in seen:
                yield f"a handler runs twice under one claim: {event}"
            seen.add(run)
            life = (facts["key"], births.get(run, 0))
            if first_body.setdefault(life, facts["other"]) != facts["other"]:
                yield f"another body under a known id was handled: {event}"
        yield from self._once()
        yield from self._doubts()
        yield from self._steps()
        yield from self._results()

    def _grants(self) -> set[tuple[Any, ...]]:
        return {
            (event.facts["key"], after.birth, after.fence, after.attempts, event.actor)
            for event in self.history.of("row")
            if (after := event.facts["after"]) is not None and after.state == "processing"
        }

    def _births(self) -> dict[tuple[Any, ...], int]:
        """Which life of its key a claim belongs to: each removal begins another."""
        lives: dict[Name, int] = defaultdict(int)
        of: dict[tuple[Any, ...], int] = {}
        for event in self.history.of("row"):
            key, after = event.facts["key"], event.facts["after"]
            if after is None:
                lives[key] += 1
            else:
                of[key, after.birth, after.fence] = lives[key]
        return of

    def _once(self) -> Iterator[str]:
        """At most once: one start, and one more for each time that an operator allows it."""
        promises = self.promises
        if (promises.on_failed, promises.on_in_doubt) != ("skip", "hold"):
            return
        allowed: dict[Name, int] = defaultdict(lambda: 1)
        for event in self.history.of("row"):
            allowed[event.facts["key"]] += is_operator(event)
        starts: dict[Name, int] = defaultdict(int)
        for event in self.history.of("started"):
            starts[event.facts["key"]] += 1
            if starts[event.facts["key"]] > allowed[event.facts["key"]]:
                yield f"at most once: a second start: {event}"

    def _doubts(self) -> Iterator[str]:
        """Under `hold` nothing runs again that an error has left in doubt, unless an operator says
        so; under a probe, nothing that has happened.
        """
        left: set[Name] = set()
        happened = {(e.facts["birth"], e.facts["fence"]) for e in self.history.of("effect")}
        policy = self.promises.on_in_doubt
        for event in self.history.of("row", "started"):
            key, after = event.facts["key"], event.facts.get("after")
            if event.what == "started":
                if key in left:
                    yield f"an effect that was in doubt may be repeated: {event}"
            elif after is None or is_operator(event):
                left.discard(key)
            elif after.state != "processing" or not after.is_unknown:
                continue
            elif policy == "hold" or (after.birth, after.fence) in happened:
                left.add(key)

    def _steps(self) -> Iterator[str]:
        """A step whose result is kept does not run again."""
        kept: set[tuple[Name, str]] = set()
        for event in self.history.of("step", "step_kept", "step_gone"):
            name = (event.facts["key"], event.facts["step"])
            if event.what == "step_kept":
                kept.add(name)
            elif event.what == "step_gone":
                kept.discard(name)
            elif name in kept:
                yield f"a finished step runs again: {event}"

    def _results(self) -> Iterator[str]:
        """Whoever asks gets the result that is kept, or nothing."""
        results: dict[Name, set[Any]] = defaultdict(lambda: {None})
        for event in self.history.of("row"):
            after = event.facts["after"]
            if after is not None:
                results[event.facts["key"]].add(after.result)
        done: dict[Name, set[Any]] = defaultdict(set)
        for event in self.history.of("done"):
            facts = event.facts
            name = facts["key"]
            done[name].add(f"{name[1]}/{facts['fence']}/{facts['birth']}")
        for event in self.history.of("returned"):
            name, result = event.facts["key"], event.facts["result"]
            if result not in results[name] | done[name]:
                yield f"a result that no run has come to: {event}"
