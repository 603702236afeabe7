"""Transports and sources of other packages, found by the entry points that they declare: each is
named by a URL's scheme, and loads a function of the URL or, for a source, of the URL and the queue.
"""

from importlib.metadata import entry_points
from typing import Any

TRANSPORTS, SOURCES = "oncely.transports", "oncely.sources"


def opened_by(group: str, url: str, *more: str) -> Any:
    """What an installed package opens at that URL; None if no package has its scheme."""
    found = entry_points(group=group, name=url.partition("://")[0])
    return next((entry.load()(url, *more) for entry in found), None)


def installed() -> str:
    """All schemes of packages, for the end of an error; empty if there are none."""
    found = [f"{g} {each.name}://" for g in (TRANSPORTS, SOURCES) for each in entry_points(group=g)]
    return f"; installed: {', '.join(sorted(found))}" if found else ""
