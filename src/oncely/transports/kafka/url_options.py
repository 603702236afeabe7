"""The options in the URL of a Kafka cluster."""

import re
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote

from confluent_kafka import Consumer, KafkaException

from oncely._util.tls import check_files
from oncely.core.durations import positive_seconds
from oncely.core.errors import ConfigError, mask_passwords
from oncely.transports.url_values import Read, read_values, text, whole

_BROKER = re.compile(r"(?:[^\s/:\[\],?#]+|\[[0-9a-fA-F:.]+\])(?::\d{1,5})?")
_DRIVERS = "rdkafka."
"""The prefix of librdkafka's own settings in a URL."""
_SECURITY = ("plaintext", "ssl", "sasl_plaintext", "sasl_ssl")
_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_FILES = {
    "cafile": "ssl.ca.location",
    "certfile": "ssl.certificate.location",
    "keyfile": "ssl.key.location",
}
_TAKEN = {
    "bootstrap.servers": "name the brokers in the URL",
    "metadata.broker.list": "name the brokers in the URL",
    "group.id": "write ?group=NAME",
    "security.protocol": f"write ?security= and one of {', '.join(_SECURITY)}",
    **dict.fromkeys(
        ("enable.auto.commit", "enable.auto.offset.store", "enable.partition.eof"),
        "offsets are committed when messages are acknowledged",
    ),
    **dict.fromkeys(
        ("acks", "request.required.acks", "enable.idempotence", "message.timeout.ms"),
        "publishing waits for all replicas, for as long as ?confirm_timeout= says",
    ),
}
"""Settings on which a promise depends, and what to do instead."""
_MAX_PREFETCH = 1_000_000
_MAX_BYTES = 1_000_000_000
_HARM = 'never be enough; write "30s"'


class KafkaSettings(NamedTuple):
    """The options that the URL of a Kafka transport may set."""

    client: Mapping[str, str]
    """librdkafka's settings, of every client."""
    group: str = ""
    """The consumer group; where it is empty, each queue has its own."""
    id: str = ""
    """The header with the id of a message."""
    prefetch: int = 1_000
    max_bytes: int = 1_000_000
    confirm_timeout_s: float = 30.0

    def group_of(self, queue: str) -> str:
        """The consumer group that reads a queue."""
        return self.group or f"oncely-{queue}"


def read_options(address: str, options: str) -> KafkaSettings:
    """All settings. Raises ConfigError for a wrong URL."""
    user, at, brokers = address.partition("://")[2].rpartition("@")
    brokers = brokers.removesuffix("/")
    if not all(_BROKER.fullmatch(each) for each in brokers.split(",")):
        raise ConfigError(
            f"transport: {mask_passwords(address)!r} is not an address of brokers; "
            'write "kafka://host:9092,host:9092"'
        )
    pairs = parse_qsl(options, keep_blank_values=True)
    drivers = {
        name.removeprefix(_DRIVERS): value for name, value in pairs if name.startswith(_DRIVERS)
    }
    own = "&".join(part for part in options.split("&") if not part.startswith(_DRIVERS))
    said = read_values(own, _KNOWN)
    for name in drivers.keys() & _TAKEN.keys():
        raise ConfigError(f"{_DRIVERS}{name}: it is set already; {_TAKEN[name]}")
    client = {"bootstrap.servers": brokers, "log_level": "0", **_security(user, bool(at), said)}
    check_files(own)
    settings = KafkaSettings({**client, **drivers}, **said)
    try:
        # It connects to nothing, and reads all settings and files.
        Consumer({**settings.client, "bootstrap.servers": "", "group.id": "oncely"}).close()
    except KafkaException as error:
        name = next((f"{_DRIVERS}{each}" for each in drivers if each in str(error)), "transport")
        raise ConfigError(f"{name}: {error.args[0].str()}") from error
    return settings


def _security(user: str, has_user: bool, said: dict[str, str]) -> dict[str, str]:
    """The settings for TLS and SASL; takes their options out of `said`."""
    files = {name: said.pop(name) for name in _FILES if name in said}
    usual = ("sasl_ssl" if has_user else "ssl") if has_user or files else "plaintext"
    security, mechanism = said.pop("security", usual), said.pop("mechanism", "")
    is_sasl = security.startswith("sasl")
    if files and not security.endswith("ssl"):
        raise ConfigError(f"{', '.join(files)}: only with TLS; write ?security=ssl or sasl_ssl")
    if is_sasl and not has_user:
        raise ConfigError(f'security: {security} needs a user; write "kafka://user:password@host"')
    if not is_sasl and (has_user or mechanism):
        raise ConfigError(f"security: {security} has no user; write ?security=sasl_ssl")
    settings = {"security.protocol": security}
    settings |= {_FILES[name]: file for name, file in files.items()}
    if is_sasl:
        name, _, password = user.partition(":")
        settings |= {
            "sasl.mechanism": mechanism or _MECHANISMS[0],
            "sasl.username": unquote(name),
            "sasl.password": unquote(password),
        }
    return settings


def _one_of(values: tuple[str, ...]) -> Read:
    def read(value: str, name: str) -> str:
        if value in values:
            return value
        raise ConfigError(f"{name}: {value!r} is none of {', '.join(values)}")

    return read


def _named(value: str, name: str) -> str:
    if value.strip():
        return value
    raise ConfigError(f"{name}: it is empty; leave it out, or write a name")


_KNOWN: Mapping[str, Read] = {
    "group": _named,
    "id": _named,
    "prefetch": partial(whole, largest=_MAX_PREFETCH),
    "max_bytes": partial(whole, largest=_MAX_BYTES),
    "confirm_timeout_s": partial(positive_seconds, harm=_HARM),
    "security": _one_of(_SECURITY),
    "mechanism": _one_of(_MECHANISMS),
    **dict.fromkeys(_FILES, text),
    # As they stand in the error that lists all.
    f"{_DRIVERS}NAME": text,
}
