"""What can be found wrong with a write before any task runs."""

from contextlib import suppress
from functools import lru_cache

from oncely.core.errors import ConfigError
from oncely.spark.ledgers import migrated_ledger, url_here
from oncely.spark.sink.places import check_writable
from oncely.spark.sink.sink_options import SinkOptions, import_function


def check_on_driver(options: SinkOptions) -> None:
    """Raise ConfigError for a handler that cannot be imported, and a folder that cannot be used."""
    if options.handler:
        import_function(options.handler, "handler", options.handler_path)
    check_writable_here(options.quarantine)
    if options.archive is not None:
        # Arrow takes its time to be imported.
        from oncely.archive.lookup import Archive

        Archive(options.archive, options.consumer)


def check_reachable(options: SinkOptions) -> None:
    """Raise StoreUnavailable where the ledger does not answer, as far as can be told here: tasks
    would wait for it.
    """
    with suppress(ConfigError):
        migrated_ledger(options.place).now()


def check_here(options: SinkOptions) -> None:
    """The same in a task, before its first message: raise ConfigError for a ledger that a cluster
    cannot share, or that only other machines know, and a quarantine that only others can write.
    """
    with url_here(options.ledger):
        check_writable_here(options.quarantine)


@lru_cache(maxsize=8)
def check_writable_here(folder: str) -> None:
    """Raise ConfigError where this machine, which may be another than the driver's, cannot write
    to the quarantine. Asked for once by a process.
    """
    try:
        check_writable(folder)
    except ConfigError as error:
        raise ConfigError(f"option quarantine: {error}") from None
