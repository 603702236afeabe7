"""A consumer: takes the messages of a queue, and hands each to a handler, once.

`Consumer` stands in `__init__.pyi`; it is imported when it is first asked for.
"""

from oncely._util.lazy_names import lazily

__getattr__, __dir__, __all__ = lazily(__name__)
