"""Records that Python's client cannot publish: by librdkafka itself, which it brings."""

import ctypes
from pathlib import Path

import confluent_kafka

_NO_PARTITION = -1
_COPY = 2
_TOPIC, _PARTITION, _VALUE, _HEADERS = 1, 3, 4, 10
_PRODUCER = 0


def publish(brokers: str, topic: str, header: bytes) -> None:
    """Publish a record with a header whose name is these bytes."""
    [file] = Path(confluent_kafka.__file__).parents[1].glob("confluent_kafka.libs/librdkafka-*")
    library = ctypes.CDLL(str(file))
    for name in ("conf_new", "new", "headers_new", "topic_new"):
        getattr(library, f"rd_kafka_{name}").restype = ctypes.c_void_p
    conf = ctypes.c_void_p(library.rd_kafka_conf_new())
    library.rd_kafka_conf_set(conf, b"bootstrap.servers", brokers.encode(), None, 0)
    client = ctypes.c_void_p(library.rd_kafka_new(_PRODUCER, conf, None, 0))
    headers = ctypes.c_void_p(library.rd_kafka_headers_new(1))
    library.rd_kafka_header_add(headers, header, len(header), b"x", 1)
    # The end of the arguments is a 0.
    error = library.rd_kafka_producev(
        client,
        *(_TOPIC, topic.encode()),
        *(_VALUE, b"raw", ctypes.c_size_t(3)),
        *(_HEADERS, headers),
        0,
    )
    assert error == 0, error
    assert library.rd_kafka_flush(client, 60_000) == 0
    library.rd_kafka_destroy(client)
