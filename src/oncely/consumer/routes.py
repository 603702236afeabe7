"""Routes: which handler takes a message, by its type."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

from oncely.core.destination import takes
from oncely.core.errors import ConfigError
from oncely.lifecycle.wrapping import check_function, is_async, name_of

Handler = Callable[..., Any]


class Routes:
    """One handler for each type or pattern of types, and at most one for all other types.

    A pattern is a topic's: words between dots, `*` for any one word, `#` for any number of words.
    """

    def __init__(self) -> None:
        self._by_pattern: dict[str, Handler] = {}
        self.rest: Handler | None = None
        """The handler of all other types."""
        self.events: list[str] = []
        """The types that the consumer subscribes to, if not all."""

    def add(self, handler: Handler, types: Sequence[str] = ()) -> None:
        """Let `handler` take these types; without types, all that no other handler takes.

        Raises ConfigError for a value that is not a handler, or if a type has a handler already.
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

    def with_rest(self, handler: Handler | None) -> "Routes":
        """The same handlers; `handler`, if given, takes the types that no other takes."""
        more = copy(self)
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
        """Whether any handler is async."""
        return any(map(is_async, self.all))

    def of(self, type_: str) -> Handler | None:
        """The handler of messages of that type; None if there is none."""
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
        """The topics by which the consumer's queue is bound, if the broker has exchanges."""
        return self.events or ([] if self.rest is not None else list(self._by_pattern))


def check_pattern(pattern: object) -> str:
    """Return `pattern` if it can be one. Raises ConfigError."""
    if not isinstance(pattern, str) or not pattern or not all(pattern.split(".")):
        raise ConfigError(f'events: {pattern!r} is not a type; write "notification.sms.send"')
    return pattern
