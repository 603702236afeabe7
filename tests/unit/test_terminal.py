"""How the command writes times."""

import pytest

from oncely.core.shown import moment, span


@pytest.mark.parametrize(
    ("length_s", "said"),
    [
        (-1.0, "0 s"),
        (0.9, "0 s"),
        (59.9, "59 s"),
        (60.0, "1 min"),
        (3_599.0, "59 min 59 s"),
        (3_605.0, "1 h"),
        (11_525.0, "3 h 12 min"),
        (90_061.0, "1 d 1 h"),
        (400 * 86_400.0, "400 d"),
    ],
)
def test_spans(length_s: float, said: str) -> None:
    """The two largest units that stand beside each other."""
    assert span(length_s) == said


def test_moments() -> None:
    """A point in time says how far off it is, and is one however far that be."""
    assert moment(1.0, 61.0) == "1970-01-01 00:00:01 UTC (1 min ago)"
    assert moment(60.0, 0.0) == "1970-01-01 00:01:00 UTC (in 1 min)"
    assert moment(1e15, 0.0).startswith("beyond the year 9999 (in ")
