"""What stands behind the question mark in the URLs of transports."""

import math
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from oncely.core.errors import ConfigError

Read = Callable[[str, str], object]
"""From the value of an option and its name to what it means. Raises ConfigError."""


def read_values(options: str, known: Mapping[str, Read]) -> dict[str, Any]:
    """What the options of a URL say, by the settings' names; an option's name has no `_s` for its
    unit. Raises ConfigError for one that is not `known`.
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
    """The number of 1 or more that stands in a URL. Raises ConfigError."""
    if not (value.isascii() and value.isdigit() and int(value)):
        raise ConfigError(f"{name}: {value!r} is not a whole number of 1 or more")
    if int(value) > largest:
        raise ConfigError(f"{name}: {value} is more than {largest}")
    return int(value)
