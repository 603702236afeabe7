"""The options in the URLs of transports, after the question mark."""

import math
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from oncely.core.errors import ConfigError

Read = Callable[[str, str], object]
"""Reads the value of an option, given its name. Raises ConfigError."""


def read_values(options: str, known: Mapping[str, Read]) -> dict[str, Any]:
    """The values of a URL's options, by the settings' names; an option's name lacks the unit `_s`.
    Raises ConfigError for an option that is not `known`.
    """
    settings = {setting.removesuffix("_s"): setting for setting in known}
    said = {}
    for name, value in parse_qsl(options, keep_blank_values=True):
        if name not in settings:
            raise ConfigError(f"transport: {name!r} is none of {', '.join(settings)}")
        said[settings[name]] = known[settings[name]](value, name)
    return said


def text(value: str, _: str) -> str:
    """The value as it is."""
    return value


def whole(value: str, name: str, largest: float = math.inf) -> int:
    """A whole number of 1 or more in a URL. Raises ConfigError."""
    if not (value.isascii() and value.isdigit() and int(value)):
        raise ConfigError(f"{name}: {value!r} is not a whole number of 1 or more")
    if int(value) > largest:
        raise ConfigError(f"{name}: {value} is more than {largest}")
    return int(value)
