"""Requests that are alike: one says what all are, columns say in what they differ."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, TypeVar, final, overload

from oncely.core.commands import Ask, Extend, Held
from oncely.core.durations import Duration, lease_seconds
from oncely.core.record import Claim, Key
from oncely.core.rules import depends_on_horizon
from oncely.engine.request import Request, to_write

Item = TypeVar("Item")

_ASKED = tuple(each.name for each in fields(Ask))[1:]
"""What an Ask has besides its key."""
_command_of = attrgetter("command")
_believed_of = attrgetter("believed")
_claimed_of = attrgetter("claim.record")
_TOLD_BY_KIND = {str, int, float}
"""Two values of one of these kinds that are equal, and not zero, are the same in JSON."""


class MadeSequence(Sequence[Item]):
    """A sequence whose items are made when they are looked at."""

    __slots__ = ()

    @abstractmethod
    def _at(self, index: int) -> Item:
        """The item at that place."""

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | Sequence[Item]:
        if isinstance(index, slice):
            return [self._at(n) for n in range(len(self))[index]]
        return self._at(index)


@final
class AlikeAsks(MadeSequence[Request]):
    """Asks for the claims of `keys`, which no record is believed to have. They differ in the fields
    of `columns`, and else are as `first`. A request is made when it is looked at.
    """

    __slots__ = ("columns", "first", "keys")

    def __init__(
        self, keys: Sequence[Key], first: Ask, columns: Mapping[str, Sequence[Any]]
    ) -> None:
        self.keys = keys
        self.first = first
        self.columns = {name: of for name, of in columns.items() if not are_same(of)}

    def __len__(self) -> int:
        return len(self.keys)

    def _at(self, index: int) -> Request:
        key, of = self.keys[index], self.columns
        values = [of[n][index] if n in of else getattr(self.first, n) for n in _ASKED]
        return Request(key, Ask(key, *values))

    def __iter__(self) -> Iterator[Request]:
        values = [self.columns.get(name, repeat(getattr(self.first, name))) for name in _ASKED]
        return map(Request, self.keys, map(Ask, self.keys, *values))

    def at_indexes(self, indexes: Sequence[int]) -> "AlikeAsks":
        """Those in these places, of which the first is 0, in that order."""
        columns = {name: [values[n] for n in indexes] for name, values in self.columns.items()}
        return AlikeAsks([self.keys[n] for n in indexes], self.first, columns)


@final
class AlikeWrites(MadeSequence[Request]):
    """One command for each of these claims, whose holders believe what the claims last saw."""

    __slots__ = ("claims", "command", "keys", "records")

    def __init__(self, claims: Sequence[Claim], command: Callable[[Claim], Held]) -> None:
        self.claims = [*claims]
        self.command = command
        self.records = [claim.record for claim in self.claims]
        self.keys = [record.key for record in self.records]

    def __len__(self) -> int:
        return len(self.claims)

    def _at(self, index: int) -> Request:
        return to_write(self.command(self.claims[index]))

    def __iter__(self) -> Iterator[Request]:
        return map(to_write, map(self.command, self.claims))


AlikeRequests = AlikeAsks | AlikeWrites


def are_same(values: Sequence[Any]) -> bool:
    """Whether these, one or more, are all stored as the same: 1, 1.0 and True are equal, also deep
    in a mapping, and JSON tells them apart.
    """
    first = values[0]
    if values.count(first) < len(values):
        return False
    if all(map(is_, values, repeat(first))):
        return True
    if first and type(first) in _TOLD_BY_KIND and {*map(type, values)} == {type(first)}:
        return True
    return len({*map(repr, values)}) == 1


def to_extend(claims: Sequence[Claim], lease: Duration) -> AlikeWrites:
    """The requests that renew these leases. Raises ConfigError for what is not one."""
    return AlikeWrites(claims, partial(Extend, lease_s=lease_seconds(lease)))


def grouped(requests: Sequence[Request]) -> AlikeRequests | None:
    """The same requests, where they are alike: two or more."""
    if len(requests) < 2:
        return None
    if type(requests) is AlikeAsks or type(requests) is AlikeWrites:
        return requests
    commands: Sequence[Any] = [*map(_command_of, requests)]
    if len({*map(type, commands)}) > 1:
        return None
    first, believed = commands[0], [*map(_believed_of, requests)]
    if isinstance(first, Ask):
        if believed.count(None) < len(believed):
            return None
        columns = {name: [*map(attrgetter(name), commands)] for name in _ASKED}
        return AlikeAsks([request.key for request in requests], first, columns)
    if not isinstance(first, Held) or not all(map(is_, map(_claimed_of, commands), believed)):
        return None
    said = [attrgetter(each.name) for each in fields(first) if each.name != "claim"]
    if not all(are_same([*map(of, commands)]) for of in said):
        return None
    return AlikeWrites([command.claim for command in commands], partial(_renewed, first))


def with_horizon(requests: Sequence[Request]) -> set[str]:
    """The consumers of which an answer depends on the horizon."""
    if type(requests) is AlikeWrites:
        return set()
    if type(requests) is AlikeAsks and not requests.columns.keys() & {"sent_at", "policy"}:
        is_concerned = depends_on_horizon(requests.first)
        return {key.consumer for key in requests.keys} if is_concerned else set()
    return {each.key.consumer for each in requests if depends_on_horizon(each.command)}


def believe_nothing(requests: Sequence[Request]) -> bool:
    """Whether no message of these is believed to have a record."""
    if type(requests) is AlikeAsks:
        return True
    return type(requests) is not AlikeWrites and all(
        request.believed is None for request in requests
    )


def _renewed(command: Held, claim: Claim) -> Held:
    return replace(command, claim=claim)
