"""Batches in tables of Delta Lake and Apache Iceberg; `__init__.pyi` lists the public names."""

from oncely._util.lazy_names import lazily

__getattr__, __dir__, __all__ = lazily(__name__)
