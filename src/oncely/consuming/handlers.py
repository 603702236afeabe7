"""Handlers: which function takes a message, by its type."""

from collections.abc import Callable, Sequence
from typing import Any

from oncely.core.destination import takes
from oncely.core.errors import ConfigError
from oncely.lifecycle.wrapping import check_function, is_async, name_of

Handler = Callable[..., Any]


class Handlers:
    """One for each type or pattern of types, and at most one for all the others.

    A pattern is that of a topic: words between dots, `*` for any one word, `#` for any number.
    """

    def __init__(self) -> None:
        self._by_pattern: dict[str, Handler] = {}
        self.rest: Handler | None = None
        """What takes every other type."""
        self.events: list[str] = []
        """What the consumer is to be given, where it is not everything."""

    def add(self, handler: Handler, types: Sequence[str] = ()) -> None:
        """Let `handler` take these types; all that no other takes, where none is named.

        Raises ConfigError for what is no handler, and where there is one already.
        """
        if not callable(handler):
            raise ConfigError(
                f"handler: {handler!r} is not a function; write `def handle(message):`"
            )
        check_function(handler, "handler")
        if not types:
            if self.rest is not None:
                raise ConfigError(f"handler: {name_of(self.rest)} takes all messages already")
            self.rest = handler
        for each in types:
            if each in self._by_pattern:
                raise ConfigError(f"handler: {each!r} has a handler already")
            self._by_pattern[check_pattern(each)] = handler

    def with_rest(self, handler: Handler | None) -> "Handlers":
        """The same, of which `handler` takes what no other does, where one is given."""
        more = Handlers()
        more._by_pattern, more.rest = self._by_pattern, self.rest
        more.events = self.events
        if handler is not None:
            more.add(handler)
        return more

    @property
    def all(self) -> list[Handler]:
        """Every handler."""
        rest = [] if self.rest is None else [self.rest]
        return [*self._by_pattern.values(), *rest]

    @property
    def are_async(self) -> bool:
        """Whether any of them is."""
        return any(map(is_async, self.all))

    def of(self, type_: str) -> Handler | None:
        """What takes messages of that type; None where nothing does."""
        if self.events and not any(takes(pattern, type_) for pattern in self.events):
            return None
        handler = self._by_pattern.get(type_)
        if handler is not None:
            return handler
        for pattern, each in self._by_pattern.items():
            if takes(pattern, type_):
                return each
        return self.rest

    @property
    def topics(self) -> list[str]:
        """By which the consumer's queue is bound, where there is an exchange."""
        return self.events or ([] if self.rest is not None else list(self._by_pattern))


def check_pattern(pattern: object) -> str:
    """Return `pattern` if it can be one. Raises ConfigError."""
    if not isinstance(pattern, str) or not pattern or not all(pattern.split(".")):
        raise ConfigError(f'events: {pattern!r} is not a type; write "notification.sms.send"')
    return pattern
