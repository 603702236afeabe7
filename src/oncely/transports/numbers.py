"""Numbers in the URLs of transports."""

import math

from oncely.core.errors import ConfigError


def whole(value: str, name: str, largest: float = math.inf) -> int:
    """The number of 1 or more that stands in a URL. Raises ConfigError."""
    if not (value.isascii() and value.isdigit() and int(value)):
        raise ConfigError(f"{name}: {value!r} is no whole number of 1 or more")
    if int(value) > largest:
        raise ConfigError(f"{name}: {value} is more than {largest}")
    return int(value)
