"""Records of Kafka become columns of keys, versions and tombstones."""

from __future__ import annotations

import gc
from collections import Counter
from types import SimpleNamespace

import pytest
from confluent_kafka import Message

import jobs_lib.kafka.keys as module
from jobs_lib.kafka.keys import make_columns, pausing_collector

try:
    Message()
except TypeError:
    pytestmark = pytest.mark.skip("this confluent-kafka makes messages itself alone")

PLAIN = [("ce_id", b"1"), ("ce_version", b"41")]


def columns_of(*records):
    """The columns of records, each given as key, value and headers."""
    messages = [
        Message("states", 3, offset, key, value, headers)
        for offset, (key, value, headers) in enumerate(records)
    ]
    return make_columns(3, messages, True)


def version_of(*headers, beside=()):
    """The version that a record with these headers has, beside other records."""
    found = columns_of((b"k", b"", [*headers]), *((b"k", b"", one) for one in beside))
    return found.versions[0]


def test_plain_records_become_columns():
    found = columns_of((b"a", b"1", PLAIN), ("ключ".encode(), None, PLAIN))
    assert found == (3, [0, 1], ["a", "ключ"], [41, 41], [False, True], [b"1", None])


@pytest.mark.parametrize(
    ("key", "text"), [(None, None), (b"", ""), (b"\xff", None), (b"b\0", "b\0")]
)
def test_an_odd_key_leaves_the_keys_beside_it_as_they_are(key, text):
    found = columns_of((b"a", b"1", PLAIN), (key, b"", PLAIN), (b"c", b"1", PLAIN))
    assert found.keys == ["a", text, "c"]
    assert found.tombstones == [False] * 3


@pytest.mark.parametrize("beside", [[], [PLAIN]], ids=["alone", "beside a plain one"])
@pytest.mark.parametrize(
    ("value", "version"),
    [
        (b"0", 0),
        (b"007", 7),
        (b"9223372036854775807", 2**63 - 1),
        (b"9223372036854775808", None),
        (b"00000000000000000007", None),
        (b"", None),
        (None, None),
        (b"-1", None),
        (b"+1", None),
        (b" 1", None),
        (b"1_000", None),
        (b"1.0", None),
        ("\u0661".encode(), None),
    ],
)
def test_a_version_is_what_consumers_take_for_one(value, version, beside):
    assert version_of(("ce_version", value), beside=beside) == version


def test_the_last_of_repeated_versions_counts():
    assert version_of(("ce_version", b"1"), ("ce_version", b"2")) == 2
    assert version_of(("ce_version", b"1"), ("ce_version", b"2"), ("more", b"")) == 2
    assert version_of(("ce_version", b"1"), ("ce_version", b"x")) is None


def test_a_record_without_a_version_has_none():
    assert version_of() is None
    assert version_of(("ce_id", b"7"), beside=[PLAIN]) is None
    assert columns_of((b"k", b"", None), (b"k", b"", PLAIN)).versions == [None, 41]


@pytest.mark.parametrize("odd", [{0}, {1}, {2}, {0, 1, 2}])
def test_headers_that_the_client_cannot_give_leave_those_beside_them_as_they_are(
    monkeypatch, odd
):
    looks: Counter[int] = Counter()

    def give(message: Message) -> object:
        """Look as the client does at a header whose name is no UTF-8."""
        looks[message.offset() or 0] += 1
        if message.offset() in odd:
            raise SystemError("headers returned a result with an exception set")
        return Message.headers(message)

    parts = {name: getattr(Message, name) for name in ("key", "value", "offset")}
    monkeypatch.setattr(module, "Message", SimpleNamespace(**parts, headers=give))
    found = columns_of(*[(b"k", b"", PLAIN)] * 3)
    assert found.versions == [None if n in odd else 41 for n in range(3)]
    # The second look would crash the process.
    assert looks == {0: 1, 1: 1, 2: 1}


@pytest.mark.parametrize("before", [True, False])
def test_the_collector_is_paused_and_then_as_it_was(before):
    enabled = gc.isenabled()
    try:
        (gc.enable if before else gc.disable)()
        with pausing_collector():
            assert not gc.isenabled()
        assert gc.isenabled() is before
    finally:
        (gc.enable if enabled else gc.disable)()
