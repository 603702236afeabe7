"""What other packages open URLs with, found by the entry points that they declare."""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any


def opener_of(group: str, url: str) -> Callable[..., Any] | None:
    """What an installed package opens URLs of this scheme with; None if no package does. Its own
    errors, such as a driver that is not installed, are raised as they are.
    """
    for entry in entry_points(group=group, name=url.partition("://")[0]):
        return entry.load()  # type: ignore[no-any-return]
    return None


def schemes_of(group: str) -> str:
    """The schemes that installed packages open, as the end of an error; empty if there are none."""
    names = sorted(entry_points(group=group).names)
    return f"; installed: {', '.join(f'{name}://' for name in names)}" if names else ""
