"""Destinations: where a message is published to, as text and parsed. Pure."""

import re
from dataclasses import dataclass
from functools import lru_cache

from oncely.core.errors import ConfigError, MessageError

MAX_DESTINATION_LENGTH = 255
"""Characters of a destination in the outbox. The column of the table is as wide."""
_EXAMPLES = 'a queue\'s name, "exchange:NAME/routing.key" or "events:TYPE"'
_LONGEST = 255
"""Bytes: what AMQP has room for."""


@dataclass(frozen=True, slots=True)
class QueueNamed:
    """A queue, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class ExchangeNamed:
    """An exchange of the broker, which passes messages on by a routing key."""

    name: str
    routing_key: str


@dataclass(frozen=True, slots=True)
class EventsOf:
    """The queues that have subscribed to messages of a type."""

    type: str


Destination = QueueNamed | ExchangeNamed | EventsOf


def destination_of(text: str) -> Destination:
    """A destination, parsed. Raises ConfigError, which says what is wrong and what to type."""
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"destination: {text!r} names nothing; write {_EXAMPLES}")
    kind, _, rest = text.partition(":")
    match kind:
        case "exchange":
            name, slash, key = rest.partition("/")
            if not name or not slash:
                missing = "no routing key" if name else "no exchange"
                raise ConfigError(
                    f'destination: {text!r} names {missing}; write "exchange:NAME/routing.key"'
                )
            return ExchangeNamed(_checked(name, text), _checked(key, text))
        case "events":
            if not rest:
                raise ConfigError(f'destination: {text!r} names no type; write "events:TYPE"')
            return EventsOf(_checked(rest, text))
    return QueueNamed(_checked(text, text))


def check_destination(text: str) -> str:
    """Return `text` if messages sent there can wait in a ledger. Raises MessageError, which says
    what is wrong and what to type.
    """
    try:
        destination_of(text)
    except ConfigError as error:
        raise MessageError(str(error)) from None
    if len(text) > MAX_DESTINATION_LENGTH:
        raise MessageError(
            f"destination: {text[:80]!r} is longer than {MAX_DESTINATION_LENGTH} characters; "
            f"write {_EXAMPLES}"
        )
    return text


def takes(pattern: str, type_: str) -> bool:
    """Whether a subscription takes messages of a type: `*` is a word between dots, `#` any number.

    >>> takes("order.*", "order.placed"), takes("order.*", "order"), takes("order.#", "order")
    (True, False, True)
    """
    # Each word takes the dot before it, so that no dot is left over where `#` matches nothing.
    words = f".{type_}" if type_ else ""
    return _expression(pattern).fullmatch(words) is not None


def topic_expression(pattern: str) -> str:
    """A subscription that begins with a word, as librdkafka writes it: a topic, or an extended
    regular expression.
    """
    is_topic = not {*"*#"} & {*pattern}
    return pattern if is_topic else f"^{_expression(pattern).pattern[2:]}$"


@lru_cache
def _expression(pattern: str) -> "re.Pattern[str]":
    each = {"*": r"\.[^.]*", "#": r"(\.[^.]*)*"}
    words = (each.get(word, rf"\.{re.escape(word)}") for word in pattern.split("."))
    return re.compile("".join(words), re.DOTALL)


def _checked(name: str, text: str) -> str:
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"destination: {text!r} is not text; write {_EXAMPLES}") from None
    if size > _LONGEST or not name.isprintable():
        what = f"longer than {_LONGEST} bytes" if size > _LONGEST else "not printable"
        raise ConfigError(f"destination: {text[:80]!r} is {what}; write {_EXAMPLES}")
    return name
