"""From a URL to a transport. A driver is imported only when its URL is opened."""

from urllib.parse import parse_qsl

from oncely.core.durations import positive_seconds
from oncely.core.errors import ConfigError, mask_passwords
from oncely.stores.names import TABLE_NAME
from oncely.stores.open_store import open_store
from oncely.transports.memory_transport import MemoryTransport, server_named
from oncely.transports.numbers import whole
from oncely.transports.transport import Limits, Transport

_EXAMPLES = (
    '"sqlite:///queue.db" (a file in this folder), "amqp://user:password@host:5672/vhost", '
    '"postgresql://user@host/database", "mysql://user@host/database" or "memory://name"'
)
_OWN = ("visibility", "max_bytes", "table", "schema")
_SERVERS = ("postgresql", "postgres", "mysql", "mariadb")


def open_transport(url: str) -> Transport:
    """The transport that `url` names. Raises ConfigError, which says what to type instead."""
    address, _, options = url.partition("?")
    kind, _, place = address.partition("://")
    named = f"transport: {mask_passwords(url)!r}"
    match kind:
        case "memory" if place:
            return MemoryTransport(server_named(place), _limits(options))
        case "memory":
            raise ConfigError(f'{named} names no queues; write "memory://name"')
        case "sqlite" if place.startswith("/") and place != "/":
            return _open_sql(address, options)
        case "sqlite":
            raise ConfigError(f'{named} names no file; write "sqlite:///queue.db"')
        case _ if kind.partition("+")[0] in _SERVERS:
            return _open_sql(address, options)
        case "amqp" | "amqps" if place:
            return _open_rabbitmq(address, options)
        case "amqp" | "amqps":
            raise ConfigError(f'{named} names no broker; write "amqp://localhost"')
        case _:
            raise ConfigError(f"{named} is of no known kind; write {_EXAMPLES}")


def _open_sql(address: str, options: str) -> Transport:
    own, rest = _own_options(address, options)
    limits = _limits(own, "table", "schema")
    chosen = dict(parse_qsl(own, keep_blank_values=True))
    url = f"{address}?{rest}" if rest else address
    try:
        store = open_store(url, chosen.get("table", TABLE_NAME), chosen.get("schema"))
    except ConfigError as error:
        raise ConfigError(str(error).replace("ledger: ", "transport: ", 1)) from error
    # What there is of SQL has its driver by now.
    from oncely.stores.sql.sql_store import SqlStore
    from oncely.transports.sql import SqlTransport

    assert isinstance(store, SqlStore)  # noqa: S101 - each of these kinds is one.
    return SqlTransport(store, limits)


def _own_options(address: str, options: str) -> tuple[str, str]:
    """Those of the transport, and those of the server's driver. A file has none."""
    if address.startswith("sqlite:"):
        return options, ""
    parts = options.split("&") if options else []
    own = [part for part in parts if part.partition("=")[0] in _OWN]
    return "&".join(own), "&".join(part for part in parts if part not in own)


def _open_rabbitmq(address: str, options: str) -> Transport:
    try:
        from oncely.transports.rabbitmq.rabbitmq_transport import RabbitmqTransport
        from oncely.transports.rabbitmq.url_options import read_options
    except ModuleNotFoundError as error:
        if error.name != "pika":
            raise
        raise ConfigError(
            "transport: pika is not installed; type: pip install 'oncely[rabbitmq]'"
        ) from error
    return RabbitmqTransport(*read_options(address, options))


def _limits(options: str, *more: str) -> Limits:
    """What the options say. Raises ConfigError for one that is neither a limit nor among `more`."""
    limits = Limits()
    for name, value in parse_qsl(options, keep_blank_values=True):
        match name:
            case "visibility":
                why = 'deliver each message for ever; write "60s"'
                limits = limits._replace(visibility_s=positive_seconds(value, name, why))
            case "max_bytes":
                limits = limits._replace(max_bytes=whole(value, "max_bytes"))
            case _ if name not in more:
                known = ", ".join((*Limits._fields, *more)).replace("visibility_s", "visibility")
                raise ConfigError(f"transport: {name!r} is none of {known}")
    return limits
