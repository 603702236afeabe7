"""Kills of what a test does: by `kill_at`, for work that may take long or end before."""

from collections.abc import Callable
from unittest.mock import patch

from oncely.testing import crashes, kill_at


def killed_at(point: str, work: Callable[[], object], nth: int = 1) -> bool:
    """Whether a process that does `work` was killed when it reached `point` the nth time; not where
    it ended before. Raises AssertionError if `work` raises.
    """
    with patch.object(crashes, "_DEADLINE_S", 3_600.0):
        try:
            kill_at(f"{point}:{nth}", work)
        except AssertionError as error:
            if "ended without coming there" not in str(error):
                raise
            return False
    return True
