"""From a URL to a transport. A driver is imported only when its URL is opened."""

from pathlib import Path
from urllib.parse import parse_qsl

from oncely.core.durations import positive_seconds
from oncely.core.errors import ConfigError, mask_passwords
from oncely.transports.memory_transport import MemoryTransport, server_named
from oncely.transports.numbers import whole
from oncely.transports.transport import Limits, Transport

_EXAMPLES = (
    '"sqlite:///queue.db" (a file in this folder), "amqp://user:password@host:5672/vhost", '
    'or "memory://name"'
)


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
            return _open_sqlite(Path(place[1:]), _limits(options))
        case "sqlite":
            raise ConfigError(f'{named} names no file; write "sqlite:///queue.db"')
        case "amqp" | "amqps" if place:
            return _open_rabbitmq(address, options)
        case "amqp" | "amqps":
            raise ConfigError(f'{named} names no broker; write "amqp://localhost"')
        case _:
            raise ConfigError(f"{named} is of no known kind; write {_EXAMPLES}")


def _open_sqlite(file: Path, limits: Limits) -> Transport:
    from oncely.transports.sql import SqliteTransport

    file = file.absolute()
    if not file.parent.is_dir():
        raise ConfigError(f"transport: {str(file)!r} cannot be made: its folder does not exist")
    return SqliteTransport(file, limits)


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


def _limits(options: str) -> Limits:
    limits = Limits()
    for name, value in parse_qsl(options, keep_blank_values=True):
        match name:
            case "visibility":
                why = 'deliver each message for ever; write "60s"'
                limits = limits._replace(visibility_s=positive_seconds(value, name, why))
            case "max_bytes":
                limits = limits._replace(max_bytes=whole(value, "max_bytes"))
            case _:
                raise ConfigError(f"transport: {name!r} is none of visibility, max_bytes")
    return limits
