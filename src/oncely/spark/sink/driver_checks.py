"""Checks of a write before any task runs."""

from functools import lru_cache

from oncely.core.errors import ConfigError
from oncely.spark.sink.paths import check_writable
from oncely.spark.sink.sink_options import SinkOptions, import_function


def check_on_driver(options: SinkOptions) -> None:
    """Raise ConfigError for a handler that cannot be imported, and a folder that cannot be used."""
    if options.handler:
        import_function(options.handler, "handler", options.handler_path)
    check_writable_here(options.quarantine)
    if options.archive is not None:
        # Importing Arrow is slow.
        from oncely.archive.lookup import Archive

        Archive(options.archive, options.consumer)


@lru_cache(maxsize=8)
def check_writable_here(folder: str) -> None:
    """Raise ConfigError if this machine, which may not be the driver's, cannot write to the
    quarantine. Checked once in each process.
    """
    try:
        check_writable(folder)
    except ConfigError as error:
        raise ConfigError(f"option quarantine: {error}") from None
