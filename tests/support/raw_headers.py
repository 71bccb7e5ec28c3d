"""Send records with headers that no client in Python sends: names that are no UTF-8."""

from __future__ import annotations

import ctypes
from pathlib import Path

import confluent_kafka

_TOPIC, _VALUE, _KEY, _FLAGS, _HEADER, _END = 1, 4, 5, 7, 9, 0
_COPY = 2


def produce_raw(
    bootstrap_servers: str, topic: str, key: bytes, value: bytes, name: bytes
) -> None:
    """Send a record with one header, by the library below the client.

    Args:
        bootstrap_servers: the brokers.
        topic: to send to.
        key: of the record.
        value: of the record.
        name: of the header; its value is the same.
    """
    package = Path(confluent_kafka.__file__).parent
    (path,) = package.with_name(f"{package.name}.libs").glob("librdkafka-*.so*")
    library = ctypes.CDLL(str(path))
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    text = ctypes.c_char_p
    for make in (library.rd_kafka_conf_new, library.rd_kafka_new):
        make.restype = pointer
    conf = pointer(library.rd_kafka_conf_new())
    servers = text(bootstrap_servers.encode())
    set_servers = (conf, text(b"bootstrap.servers"), servers, None, size(0))
    assert library.rd_kafka_conf_set(*set_servers) == 0
    producer = pointer(library.rd_kafka_new(number(0), conf, None, size(0)))
    assert producer.value
    refused = library.rd_kafka_producev(
        producer,
        *(number(_TOPIC), text(topic.encode())),
        *(number(_VALUE), text(value), size(len(value))),
        *(number(_KEY), text(key), size(len(key))),
        *(number(_FLAGS), number(_COPY)),
        *(number(_HEADER), text(name), text(name), ctypes.c_ssize_t(len(name))),
        number(_END),
    )
    assert refused == 0
    assert library.rd_kafka_flush(producer, number(30_000)) == 0
    library.rd_kafka_destroy(producer)
