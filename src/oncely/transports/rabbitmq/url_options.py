"""The options in the URL of a RabbitMQ broker."""

import ssl
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from pika import SSLOptions, URLParameters
from pika.connection import Parameters

from oncely._util.tls import check_files
from oncely.core.durations import positive_seconds
from oncely.core.errors import ConfigError, mask_passwords
from oncely.transports.url_values import Read, read_values, text, whole

_QUEUE_TYPES = ("quorum", "classic")
_MAX_PREFETCH = 65_535
_MAX_BYTES = 128 << 20
"""RabbitMQ's default limit for the size of a message."""
_FILES = ("cafile", "certfile", "keyfile")
_HARM = 'never be enough; write "30s"'


class RabbitSettings(NamedTuple):
    """The options that the URL of a RabbitMQ transport may set."""

    prefetch: int = 1_000
    queue_type: str = "quorum"
    exchange: str = "oncely"
    max_bytes: int = 1 << 20
    confirm_timeout_s: float = 30.0

    @property
    def counts_deliveries(self) -> bool:
        """Whether the broker counts the deliveries of a message."""
        return self.queue_type == "quorum"


def read_options(address: str, options: str) -> tuple[Parameters, RabbitSettings]:
    """The connection's parameters, and all settings. Raises ConfigError for a wrong URL."""
    try:
        parameters = URLParameters(address)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"transport: {mask_passwords(address)!r} is not an address of a broker; "
            'write "amqp://user:password@host:5672/vhost"'
        ) from error
    # Reach decides when to try again.
    parameters.connection_attempts = 1
    said = read_values(options, _KNOWN)
    if heartbeat_s := said.pop("heartbeat_s", None):
        parameters.heartbeat = max(1, round(heartbeat_s))
    if files := {name: said.pop(name) for name in _FILES if name in said}:
        if not address.startswith("amqps:"):
            raise ConfigError(f'{", ".join(files)}: only with TLS; begin the URL with "amqps://"')
        check_files(options)
        try:
            context = ssl.create_default_context(cafile=files.get("cafile"))
            if certificate := files.get("certfile") or files.get("keyfile"):
                # Without a password, Python would ask for it at the terminal.
                context.load_cert_chain(certificate, files.get("keyfile"), password="")
        except ssl.SSLError as error:
            raise ConfigError(f"{', '.join(files)}: of no use for TLS: {error}") from error
        parameters.ssl_options = SSLOptions(context, parameters.host)
    return parameters, RabbitSettings(**said)


def _queue_type(value: str, _: str) -> str:
    if value in _QUEUE_TYPES:
        return value
    raise ConfigError(f"queue_type: {value!r} is none of {', '.join(_QUEUE_TYPES)}")


def _exchange(value: str, _: str) -> str:
    if value:
        return value
    raise ConfigError('exchange: it has no name; write "oncely"')


_seconds = partial(positive_seconds, harm=_HARM)
_KNOWN: Mapping[str, Read] = {
    "prefetch": partial(whole, largest=_MAX_PREFETCH),
    "queue_type": _queue_type,
    "exchange": _exchange,
    "max_bytes": partial(whole, largest=_MAX_BYTES),
    "confirm_timeout_s": _seconds,
    "heartbeat_s": _seconds,
    **dict.fromkeys(_FILES, text),
}
