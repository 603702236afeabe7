"""For those who write a store, and for tests of what uses the ledger. Needs pytest."""

import pytest

# Before the first import of these, so that a failed assert in them shows its values.
pytest.register_assert_rewrite("oncely.testing.claims", "oncely.testing.stores")

from oncely.testing.meddling import MeddlingStore  # noqa: E402
from oncely.testing.stores import StoreConformance  # noqa: E402
from oncely.testing.tools import AdvancingClock, ManualClock, at_once, granted  # noqa: E402

__all__ = [
    "AdvancingClock",
    "ManualClock",
    "MeddlingStore",
    "StoreConformance",
    "at_once",
    "granted",
]
