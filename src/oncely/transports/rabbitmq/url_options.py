"""What the URL of a RabbitMQ broker says."""

import ssl
from urllib.parse import parse_qsl

from pika import SSLOptions, URLParameters
from pika.connection import Parameters

from oncely.core.durations import positive_seconds
from oncely.core.errors import ConfigError, mask_passwords
from oncely.transports.numbers import whole
from oncely.transports.rabbitmq.rabbitmq_transport import RabbitSettings

_NAMES = "prefetch, queue_type, exchange, max_bytes, confirm_timeout, heartbeat, cafile"
_QUEUE_TYPES = ("quorum", "classic")
_MAX_PREFETCH = 65_535
_HARM = 'never be enough; write "30s"'


def read_options(address: str, options: str) -> tuple[Parameters, RabbitSettings]:
    """How to connect, and everything else. Raises ConfigError, which says what to type instead."""
    parameters = _parameters(address)
    settings = RabbitSettings()
    for name, value in parse_qsl(options, keep_blank_values=True):
        match name:
            case "prefetch":
                settings = settings._replace(prefetch=whole(value, name, _MAX_PREFETCH))
            case "queue_type":
                settings = settings._replace(queue_type=_queue_type(value))
            case "exchange":
                settings = settings._replace(exchange=_exchange(value))
            case "max_bytes":
                settings = settings._replace(max_bytes=whole(value, name))
            case "confirm_timeout":
                settings = settings._replace(confirm_timeout_s=positive_seconds(value, name, _HARM))
            case "heartbeat":
                parameters.heartbeat = max(1, round(positive_seconds(value, name, _HARM)))
            case "cafile":
                parameters.ssl_options = _ssl_options(value, parameters.host)
            case _:
                raise ConfigError(f"transport: {name!r} is none of {_NAMES}")
    return parameters, settings


def _parameters(address: str) -> URLParameters:
    try:
        parameters = URLParameters(address)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"transport: {mask_passwords(address)!r} is no address of a broker; "
            'write "amqp://user:password@host:5672/vhost"'
        ) from error
    # When to try again is decided elsewhere.
    parameters.connection_attempts = 1
    return parameters


def _queue_type(value: str) -> str:
    if value in _QUEUE_TYPES:
        return value
    raise ConfigError(f"queue_type: {value!r} is none of {', '.join(_QUEUE_TYPES)}")


def _exchange(value: str) -> str:
    if value:
        return value
    raise ConfigError('exchange: it has no name; write "oncely"')


def _ssl_options(file: str, host: str) -> SSLOptions:
    try:
        return SSLOptions(ssl.create_default_context(cafile=file), host)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cafile: {file!r} cannot be read: {error}") from error
