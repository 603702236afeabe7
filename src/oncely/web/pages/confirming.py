"""The page that says first what a decision would do, and the one that says what it did."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from starlette.responses import Response

from oncely import ops
from oncely.core.errors import ConfigError
from oncely.core.record import Key
from oncely.web.decisions import OperatorDecision, needs_note
from oncely.web.visit import MOST, Visit

Item = TypeVar("Item")

MORE = f"all after the first {MOST:,}: decide again for the rest"
"""What is left out, where more are meant than can be decided at once."""
NOTE_MISSING = "Write why: the note is kept with the change."


class Subject(NamedTuple):
    """A record or dead letter of which something is decided."""

    key: Key
    value: str
    """By which the form names it."""
    label: str


class Outcome(NamedTuple):
    """What a decision came to."""

    done: Sequence[tuple[str, str]]
    """The names, and what comes next; empty where that is not known."""
    refused: Sequence[str]
    audit_error: str | None = None
    """Why the counts are not in the audit, where they could not be kept there."""


class Chosen(NamedTuple):
    """What was chosen, and which of it can not be decided about, with the reasons."""

    subjects: Sequence[Subject]
    left_out: Sequence[str] = ()


def left_of_group(found: ops.FoundGroups[Item]) -> Sequence[str]:
    """What is left out, where a group is meant."""
    if len(found.groups[0].ids) > MOST:
        return [MORE]
    looked_at = f"any after the first {found.looked_at:,} messages"
    return [f"{looked_at}: decide again for the rest"] if found.more else []


def named(key: Key) -> str:
    """A message in a sentence."""
    return f"{key.message_id!r} ({key.consumer})"


def told(changed: ops.Changed[Item], name: Callable[[Item], str]) -> Sequence[tuple[str, str]]:
    """Those that were changed, with what comes next."""
    return [(name(each), changed.next_steps.get(each, "")) for each in changed.done]


@dataclass(frozen=True, slots=True)
class DecisionPages:
    """The page that says first what a decision would do, and the one that does it."""

    decisions: Mapping[str, OperatorDecision]
    to: str
    """Where it is done."""
    back: str
    """Where it is left."""
    field: str
    """In which the form names the subjects."""
    choose: Callable[[Visit], Chosen]
    decide: Callable[[Visit, OperatorDecision], Outcome]
    what: str = "message"
    """What a subject is."""

    def confirm(self, visit: Visit, error: str | None = None) -> Response:
        """Ask whether that is meant, and why: show what would be done, to how many."""
        decided, (subjects, left_out) = self._decided(visit), self.choose(visit)
        return visit.page(
            "confirm.html",
            400 if error else 200,
            decided=decided,
            subjects=subjects,
            counts=Counter(each.key.consumer for each in subjects),
            left_out=left_out,
            needs_note=needs_note(decided, len(subjects)),
            to=self.to,
            field=self.field,
            what=self.what,
            back=self.back,
            error=error,
        )

    def change(self, visit: Visit) -> Response:
        """Do it, unless whoever decides has to say why and has not."""
        decided = self._decided(visit)
        count = len(visit.sent(self.field)[:MOST])
        if needs_note(decided, count) and not visit.field("why").strip():
            return self.confirm(visit, NOTE_MISSING)
        return self.done(visit, decided, self.decide(visit, decided))

    def done(self, visit: Visit, decided: OperatorDecision, outcome: Outcome) -> Response:
        """Say what has become of each."""
        # What the tabs count was counted before.
        visit.site.pages.forget()
        return visit.page(
            "done.html",
            decided=decided,
            outcome=outcome,
            next_steps=Counter(step for _, step in outcome.done if step),
            back=self.back,
        )

    def _decided(self, visit: Visit) -> OperatorDecision:
        name = visit.field("decision")
        if name not in self.decisions:
            raise ConfigError(f"decision: {name!r} is none of {', '.join(self.decisions)}")
        return self.decisions[name]
