"""The values of options, from Spark's strings, checked. Errors name the option."""

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

from oncely.core.errors import ConfigError, MessageError
from oncely.core.ids import check_id

T = TypeVar("T")

_SPARKS_OWN = frozenset({"checkpointlocation", "path", "queryname", "outputmode"})
"""Spark's own options for every format."""


def unknown(name: str, known: Iterable[str], kind: str = "key") -> str:
    """The error text for an unknown name, with the nearest known one."""
    near = get_close_matches(name, list(known), n=1)
    return f"{name}: there is no such {kind}" + (f"; did you mean {near[0]!r}?" if near else "")


def refuse_unknown(given: Iterable[str], known: Collection[str]) -> None:
    """Raise ConfigError for an unknown name."""
    for name in given:
        # Spark passes its own settings, too; those have a dot.
        if "." not in name and name not in known and name not in _SPARKS_OWN:
            raise ConfigError(f"option {unknown(name, known)}")


def required(given: Mapping[str, str], name: str, example: str) -> str:
    """A required option. Raises ConfigError with an example if it is missing."""
    if not given.get(name):
        raise ConfigError(f'option {name}: missing; write .option("{name}", "{example}")')
    return given[name]


def choice(name: str, value: str, offered: Iterable[T]) -> T:
    """`value`, if it is one of `offered`. Raises ConfigError."""
    for each in offered:
        if each == value:
            return each
    words = ", ".join(f'"{each}"' for each in offered)
    raise ConfigError(f"option {name}: {value!r} is not offered; write one of {words}")


def check_consumer(name: str) -> str:
    """`name`, if a consumer can have it. Raises ConfigError."""
    try:
        return check_id(name, "consumer")
    except MessageError as error:
        raise ConfigError(f"option consumer: {error}") from error


def share(given: Mapping[str, str], name: str) -> float | None:
    """An option that is a share; None if it is not set. Raises ConfigError."""
    if name not in given:
        return None
    try:
        value = float(given[name])
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise ConfigError(f"option {name}: {given[name]!r} is not a share; write one such as 0.5")
    return value


def whole_number(given: Mapping[str, str], name: str, default: int) -> int:
    """An option that counts something. Raises ConfigError for less than 1."""
    text = given.get(name, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{name}: {text!r} is not a whole number of 1 or more")
    return int(text)
