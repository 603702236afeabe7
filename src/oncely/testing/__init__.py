"""Tests for handlers, and the conformance suite of your own transports (need pytest).

The public names stand in `__init__.pyi`; each is imported when it is first asked for.
"""

import sys

from oncely._util.lazy_names import lazily

if pytest := sys.modules.get("pytest"):
    # Before their first import, so that a failed assert in them shows its values.
    pytest.register_assert_rewrite(
        "oncely.testing.transport_suite", "oncely.testing.delivery_suite"
    )

__getattr__, __dir__, __all__ = lazily(__name__)
