"""Messages that failed alike as one group: by consumer, class of the error and its text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from oncely.core.errors import RefusedError
from oncely.core.errors_by_kind import kind_of
from oncely.core.waiting import digest
from oncely.ops.known import first

Item = TypeVar("Item")

MOST_GROUPED = 10_000
"""So many messages are looked at."""
_ID = 12
"""Characters of a group's id."""


FailedMessage = tuple[Item, str, str, float]
"""What names a message, its consumer, its error, and the time that counts of it."""


@dataclass(frozen=True, slots=True)
class ErrorGroup(Generic[Item]):
    """Messages of one consumer that failed alike: dead letters, or waiting retries."""

    id: str
    """The same whenever they are grouped, on any ledger."""
    consumer: str
    error: str
    """What they have in common: the class of the error and the first line of its text, with what
    varies replaced, such as `<n>` for a number.
    """
    count: int
    first: float
    """When the earliest was set aside or last seen, or is due, in seconds since 1970."""
    last: float
    sample: Item
    """The number of the newest of them, or its key."""
    ids: Sequence[Item]
    """Their numbers, or their keys."""


class FoundGroups(NamedTuple, Generic[Item]):
    """Groups, the largest first."""

    groups: Sequence[ErrorGroup[Item]]
    looked_at: int
    """How many messages were looked at."""
    more: bool
    """Whether there are others, which are in no group because of the limit: some of them may be of
    these groups, too.
    """

    def only(self, id_: str) -> "FoundGroups[Item]":
        """The same with the group of that id alone. Raises RefusedError where there is none: all of
        it may have been retried.
        """
        for group in self.groups:
            if group.id == id_:
                return self._replace(groups=[group])
        raise no_group(id_)


def groups_of(messages: Iterable[FailedMessage[Item]], most: int) -> FoundGroups[Item]:
    """The first `most` of the messages, grouped by consumer and error."""
    found, more = first(messages, most)
    members: dict[tuple[str, str], list[tuple[Item, float]]] = {}
    for item, consumer, error, at in found:
        members.setdefault((consumer, kind_of(error)), []).append((item, at))
    groups = [
        ErrorGroup(
            id=group_id(consumer, kind),
            consumer=consumer,
            error=kind,
            count=len(failed),
            first=min(at for _, at in failed),
            last=max(at for _, at in failed),
            sample=failed[-1][0],
            ids=[item for item, _ in failed],
        )
        for (consumer, kind), failed in members.items()
    ]
    groups.sort(key=lambda group: (-group.count, group.consumer, group.error))
    return FoundGroups(groups, len(found), more)


def group_id(consumer: str, kind: str) -> str:
    """The id of the group of a consumer's messages whose errors are of that kind."""
    return digest(consumer, kind)[:_ID]


def no_group(id_: str) -> RefusedError:
    """What says that there is none of that id."""
    return RefusedError(f"there is no group {id_!r}; list the groups again")
