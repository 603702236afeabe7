"""HTTP: requests that run once per idempotency key, and webhooks that are stored once.

The names stand in `__init__.pyi`; each is imported when it is first asked for.
"""

from oncely._util.lazy_names import lazily

__getattr__, __dir__, __all__ = lazily(__name__)
