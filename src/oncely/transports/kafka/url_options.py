"""The options in the URL of a Kafka cluster."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote

from confluent_kafka import Consumer, KafkaException, Producer

from oncely.core.errors import ConfigError, mask_passwords
from oncely.transports.url_values import Read, read_values, text, whole

_BROKER = re.compile(r"(?:[^\s/:\[\],?#]+|\[[0-9a-fA-F:.]+\])(?::\d{1,5})?")
_USUAL = {
    "log_level": 0,
    "auto.offset.reset": "earliest",
    "auto.commit.interval.ms": 1_000,
    # How soon a topic is read that was created after the group had subscribed to it.
    "topic.metadata.refresh.interval.ms": 30_000,
    # A partition that stays where it is keeps its deliveries.
    "partition.assignment.strategy": "cooperative-sticky",
    # As in Java's clients, so that the records of a key share a partition.
    "partitioner": "murmur2_random",
    # How long it may take until all replicas have what is published.
    "message.timeout.ms": 30_000,
    # The broker decides about sizes, and whoever publishes waits.
    "message.max.bytes": 1_000_000_000,
    "queue.buffering.max.messages": 0,
    "queue.buffering.max.kbytes": 2_147_483_647,
}
_FIXED = {
    # The intake stores what is acknowledged, and librdkafka commits what is stored.
    "enable.auto.commit": True,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    # All replicas have what is published, once.
    "enable.idempotence": True,
    "acks": -1,
}
_KNOWN: Mapping[str, Read] = {
    "id": text,
    "prefetch": partial(whole, largest=1_000_000),
    "max_bytes": partial(whole, largest=1_000_000_000),
    "group": text,
}
"""All others are librdkafka's."""


class KafkaSettings(NamedTuple):
    """The options that the URL of a Kafka transport may set."""

    client: dict[str, Any]
    """librdkafka's settings, of every client."""
    id: str = ""
    """The header with the id of a message; where it is empty, the usual ones."""
    prefetch: int = 4_000
    """By default two windows: while one is handled, the next is claimed."""
    max_bytes: int = 1_000_000


def read_options(address: str, options: str) -> KafkaSettings:
    """All settings. Raises ConfigError for a wrong URL."""
    user, at, brokers = address.partition("://")[2].removesuffix("/").rpartition("@")
    if not all(_BROKER.fullmatch(each) for each in brokers.split(",")):
        raise ConfigError(
            f"transport: {mask_passwords(address)!r} is not an address of brokers; "
            'write "kafka://host:9092,host:9092"'
        )
    own = "&".join(each for each in options.split("&") if each.partition("=")[0] in _KNOWN)
    values = read_values(own, _KNOWN)
    pairs = parse_qsl(options, keep_blank_values=True)
    drivers = {name: value for name, value in pairs if name not in _KNOWN}
    if "group" in values:
        drivers["group.id"] = values.pop("group")
    client = {**_USUAL, **_FIXED}
    if "group.protocol" in drivers:
        del client["partition.assignment.strategy"]
    if at:
        name, _, password = user.partition(":")
        client |= {"security.protocol": "sasl_ssl", "sasl.mechanism": "PLAIN"}
        client |= {"sasl.username": unquote(name), "sasl.password": unquote(password)}
    settings = KafkaSettings(client | drivers, **values)
    for name in drivers.keys() & _FIXED.keys():
        raise ConfigError(f"{name}: messages depend on it; leave it out")
    try:
        # They connect to nothing, and read all settings and files.
        Consumer({"group.id": "oncely", **settings.client}).close()
        Producer(settings.client)
    except KafkaException as error:
        ours = f"; besides librdkafka's settings there are {', '.join(_KNOWN)}"
        raise ConfigError(f"transport: {error.args[0].str()}{ours}") from error
    settings.client["bootstrap.servers"] = brokers
    # librdkafka refuses what would wait for ever for room in its buffer.
    names = "queue.buffering.max.kbytes", "message.max.bytes"
    room, most = (whole(str(settings.client[name]), name) for name in names)
    settings.client["message.max.bytes"] = min(most, room << 10)
    return settings
