"""Opens the transport of a URL. A driver is imported only when its URL is opened."""

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import cast

from oncely._util.clock import monotonic
from oncely.core.durations import positive_seconds
from oncely.core.errors import ConfigError, mask_passwords
from oncely.stores.memory_store import MemoryStore
from oncely.stores.names import TABLE_NAME
from oncely.stores.open_store import extra_installed, open_store
from oncely.transports.plugins import TRANSPORTS, installed, opened_by
from oncely.transports.store_transport import StoreTransport
from oncely.transports.transport import Limits, Transport
from oncely.transports.url_values import Read, read_values, text, whole

_EXAMPLES = (
    '"sqlite:///queue.db" (a file in this folder), "amqp://user:password@host:5672/vhost", '
    '"kafka://host:9092", "postgresql://user@host/database", "mysql://user@host/database" or '
    '"memory://name"'
)
_HARM = 'deliver each message again and again; write "60s"'
_LIMITS: Mapping[str, Read] = {
    "visibility_s": partial(positive_seconds, harm=_HARM),
    "max_bytes": whole,
}
_IN_SQL: Mapping[str, Read] = {**_LIMITS, "table": text, "schema": text}
_OWN = ("visibility", "max_bytes", "table", "schema")
_memories: dict[str, MemoryStore] = defaultdict(lambda: MemoryStore(monotonic))
"""By their names, for the life of the process. Not on the wall clock, which may be set."""
_SERVERS = ("postgresql", "postgres", "mysql", "mariadb")


def open_transport(url: str) -> Transport:
    """The transport that `url` names. Raises ConfigError, which says what to type instead."""
    address, _, options = url.partition("?")
    kind, _, path = address.partition("://")
    named = f"transport: {mask_passwords(url)!r}"
    match kind:
        case "memory" if path:
            return StoreTransport(_memories[path], Limits(**read_values(options, _LIMITS)))
        case "memory":
            raise ConfigError(f'{named} names no queues; write "memory://name"')
        case "sqlite" if path.startswith("/") and path != "/":
            return _open_sql(address, options)
        case "sqlite":
            raise ConfigError(f'{named} names no file; write "sqlite:///queue.db"')
        case _ if kind.partition("+")[0] in _SERVERS:
            return _open_sql(address, options)
        case "amqp" | "amqps" | "kafka" if path:
            return _open_broker(kind, address, options)
        case "amqp" | "amqps" | "kafka":
            write = "kafka://localhost:9092" if kind == "kafka" else "amqp://localhost"
            raise ConfigError(f'{named} names no broker; write "{write}"')
        case _:
            if (other := opened_by(TRANSPORTS, url)) is not None:
                return cast(Transport, other)
            known = f"{_EXAMPLES}{installed()}"
            raise ConfigError(f"{named} is not of a known kind; write {known}")


def _open_sql(address: str, options: str) -> Transport:
    parts = options.split("&") if options else []
    # The others are the driver's, which a file does not have.
    is_file = address.startswith("sqlite:")
    own = [part for part in parts if is_file or part.partition("=")[0] in _OWN]
    rest = "&".join(part for part in parts if part not in own)
    said = read_values("&".join(own), _IN_SQL)
    table, schema = said.pop("table", TABLE_NAME), said.pop("schema", None)
    url = f"{address}?{rest}" if rest else address
    try:
        store = open_store(url, table, schema)
    except ConfigError as error:
        raise ConfigError(str(error).replace("ledger: ", "transport: ", 1)) from error
    # A SQL store has its driver by now.
    from oncely.stores.sql.sql_store import SqlStore

    assert isinstance(store, SqlStore)  # noqa: S101 - each of these kinds is one.
    return StoreTransport(store, Limits(**said))


def _open_broker(kind: str, address: str, options: str) -> Transport:
    with extra_installed("kafka" if kind == "kafka" else "rabbitmq", "transport"):
        if kind == "kafka":
            from oncely.transports.kafka.kafka_transport import KafkaTransport
            from oncely.transports.kafka.url_options import read_options as read_kafka

            return KafkaTransport(read_kafka(address, options))
        from oncely.transports.rabbitmq.rabbitmq_transport import RabbitmqTransport
        from oncely.transports.rabbitmq.url_options import read_options

        return RabbitmqTransport(*read_options(address, options))
