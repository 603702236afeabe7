"""What every judge of a simulation works with: plain data, and what may be seen from outside."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.simulation.history import Event, History, Name, StoredRow

NEAR_S = 0.001
"""Times that differ by less are equal: stores round."""
RETRY_S = 0.7
"""After which a handler asks to be tried again, where it says so itself."""


@dataclass(frozen=True)
class Promises:
    """What the policy of all workers promises, as plain data."""

    tries: int
    lease_s: float
    on_failed: str
    on_in_doubt: str
    on_busy: str
    delays_s: Sequence[float]
    """After failures, until the next try; the last repeats."""
    published: Mapping[Name, int]
    """How many messages each handler run sends, by the key of the message that is handled."""
    order: Mapping[Name, str]
    """The ordering keys of messages that are handled in order."""
    settled_at: float | None
    """When all was settled; None where it never was."""


class Judge(ABC):
    """Looks at one kind of thing."""

    def __init__(self, history: History, promises: Promises) -> None:
        self.history = history
        self.promises = promises

    @abstractmethod
    def wrongs(self) -> Iterator[str]:
        """What is wrong, a sentence each."""


def is_held(row: StoredRow, at: float) -> bool:
    """Whether a claim is live at that time."""
    return row.state == "processing" and (row.lease_until is None or at < row.lease_until)


Run = tuple[str, int, int]
"""A message's id, and birth and fence of the claim under which its handler ran."""


_TROUBLE = ("wire", "freeze", "stop", "interrupt")


def returned_runs(history: History) -> set[Run]:
    """Those of which a caller got the result, though a fault kept their end from being stored, as
    far as it could know. It acknowledges the message: the effect has happened, and the record is
    left in doubt.
    """
    done: dict[tuple[str, str], Run] = {}
    troubled: set[str] = set()
    returned = set()
    for event in history.of("done", "returned", *_TROUBLE):
        facts = event.facts
        if event.what in _TROUBLE:
            troubled.add(facts.get("process", event.actor))
            continue
        of = (event.actor, facts["key"][1])
        if event.what == "done":
            done[of] = (of[1], facts["birth"], facts["fence"])
            troubled.discard(event.actor)
        elif event.actor in troubled and of in done:
            returned.add(done.pop(of))
    return returned


def is_operator(event: Event) -> bool:
    """Whether an operator did it, and no worker."""
    return event.actor.startswith("operator")
