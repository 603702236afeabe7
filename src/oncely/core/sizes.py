"""Sizes, as users write them: a number of bytes, or "1MiB"."""

import re

from oncely.core.errors import ConfigError

Size = int | str
"""What users write for a number of bytes: an int, or "512KiB", "1MiB", "2MB"."""

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = re.compile(rf"(\d+) *({'|'.join(_UNITS)})", re.ASCII)


def bytes_in(size: Size, what: str) -> int:
    """How many bytes that is. Raises ConfigError, which names `what`."""
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    if isinstance(size, str) and (found := _SIZE.fullmatch(size)):
        return int(found[1]) * _UNITS[found[2]]
    raise ConfigError(f'{what}: {size!r} is not a size: write "1MiB", "500KB" or 1048576')
