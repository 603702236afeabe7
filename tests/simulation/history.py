"""What happened in a simulation, as plain data: all that its oracle gets to see."""

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

Name = tuple[str, str]
"""The consumer and the message id."""


class StoredRow(NamedTuple):
    """A record as the store held it. Times are seconds of the simulation."""

    state: str
    fence: int
    attempts: int
    birth: int
    version: int
    lease_until: float | None
    exhausted: bool
    duplicates: int
    result: Any
    fingerprint: str | None
    is_alone: bool
    """Whether its newest claim says that nothing else was at risk beside it."""
    is_unknown: bool
    """Whether it says that its handler raised, and nobody knows what it did."""


class Event(NamedTuple):
    """One thing that happened."""

    at: float
    """Seconds since the simulation began: the store's clock."""
    actor: str
    """The process that did it, or the world."""
    what: str
    facts: dict[str, Any]

    def __str__(self) -> str:
        facts = " ".join(f"{name}={value!r}" for name, value in self.facts.items())
        return f"{self.at:10.4f} {self.actor:<14} {self.what:<14} {facts}"


class History:
    """Events in their order."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, at: float, actor: str, what: str, **facts: Any) -> None:
        """Note that something happened."""
        self.events.append(Event(at, actor, what, facts))

    def of(self, *whats: str) -> Iterator[Event]:
        """Those of some kinds."""
        return (event for event in self.events if event.what in whats)

    def text(self) -> str:
        """A line for each event."""
        return "\n".join(map(str, self.events))

    def digest(self) -> str:
        """The same for equal histories alone."""
        return hashlib.blake2b(self.text().encode(), digest_size=16).hexdigest()
