"""For those who write a store or a transport, and for tests of what uses them. Needs pytest."""

import pytest

# Before the first import of these, so that a failed assert in them shows its values.
_SUITES = ("claim", "deferring", "delivery", "horizon", "inside", "reading", "store", "transport")
pytest.register_assert_rewrite(*(f"oncely.testing.{name}_suite" for name in _SUITES))

from oncely.testing.crashes import killed_at  # noqa: E402
from oncely.testing.meddling import MeddlingStore  # noqa: E402
from oncely.testing.store_suite import StoreConformance  # noqa: E402
from oncely.testing.tools import AdvancingClock, ManualClock, at_once, granted  # noqa: E402
from oncely.testing.transport_suite import TransportConformance  # noqa: E402

__all__ = [
    "AdvancingClock",
    "ManualClock",
    "MeddlingStore",
    "StoreConformance",
    "TransportConformance",
    "at_once",
    "granted",
    "killed_at",
]
