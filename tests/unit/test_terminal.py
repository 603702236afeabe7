"""How the command writes a point in time."""

from oncely.core.shown import moment


def test_moments() -> None:
    """A point in time says how far off it is, and is one however far that be."""
    assert moment(1.0, 61.0) == "1970-01-01 00:00:01 UTC (1 min ago)"
    assert moment(60.0, 0.0) == "1970-01-01 00:01:00 UTC (in 1 min)"
    assert moment(1e15, 0.0).startswith("beyond the year 9999 (in ")
