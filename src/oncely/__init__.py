"""oncely processes every message once: on one machine or on Spark, over one ledger.

The public names are listed in `__init__.pyi`; each is imported when it is first used.
"""

from oncely._util.lazy_names import lazily

__getattr__, __dir__, __all__ = lazily(__name__)
