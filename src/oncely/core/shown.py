"""Times, and text from outside, made safe to show."""

from collections.abc import Mapping
from datetime import UTC, datetime

_UNITS_S: Mapping[str, int] = {"d": 86_400, "h": 3_600, "min": 60, "s": 1}


def shown(text: str) -> str:
    """`text` for a terminal or a page: characters that are not printable are escaped."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def span(length_s: float) -> str:
    """A length of time in its two largest units: "3 h 12 min"."""
    rest = max(int(length_s), 0)
    parts: list[str] = []
    for unit, unit_s in _UNITS_S.items():
        count, rest = divmod(rest, unit_s)
        if count:
            parts.append(f"{count} {unit}")
        if parts and (not count or len(parts) == 2):
            break
    return " ".join(parts) or "0 s"


def utc(at: float) -> str:
    """A point in time."""
    try:
        return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError):
        return "beyond the year 9999"


def moment(at: float, now: float) -> str:
    """A point in time, and how far off it is."""
    return f"{utc(at)} ({f'in {span(at - now)}' if at > now else f'{span(now - at)} ago'})"
