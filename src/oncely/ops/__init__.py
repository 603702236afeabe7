"""What operators ask and do, as functions over a ledger: the only door of the command
line and the dashboard.

The names stand in `__init__.pyi`; each is imported when it is first asked for.
"""

from oncely._util.lazy_names import lazily

__getattr__, __dir__, __all__ = lazily(__name__)
