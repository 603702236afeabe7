"""Tests for handlers, and conformance suites for your own stores and transports (need pytest).

The public names stand in `__init__.pyi`; each is imported when it is first asked for.
"""

import sys

from oncely._util.lazy_names import lazily

_SUITES = (
    "audit",
    "claim",
    "delivery",
    "horizon",
    "inside",
    "reading",
    "store",
    "transport",
    "waiting",
)
if pytest := sys.modules.get("pytest"):
    # Before their first import, so that a failed assert in them shows its values.
    pytest.register_assert_rewrite(*(f"oncely.testing.{name}_suite" for name in _SUITES))

__getattr__, __dir__, __all__ = lazily(__name__)
