"""A record is cheap to make, shows no values, and cannot be changed."""

from __future__ import annotations

import copy
import pickle
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

import pytest

from jobs_lib import Record, RecordError
from jobs_lib.consuming.gate import read_derived_from
from jobs_lib.consuming.keys import choose_reader
from jobs_lib.consuming.record import (
    make_record,
    read_cause,
    read_headers,
    read_version,
)
from jobs_lib.coordination.record import Record as CoordinatedRecord
from jobs_lib.streams.log import read_request
from jobs_lib.testing import make_record as make_by_hand
from tests.support.canary import VALUE
from tests.support.fake_records import FakeRecord

if TYPE_CHECKING:
    from confluent_kafka import Message


class FakeMessage(FakeRecord):
    """The record of `orders/3` at offset 41."""

    def __init__(self, key: bytes | None = b"k", **headers: bytes | None) -> None:
        given = headers.items()
        super().__init__(41, topic="orders", partition=3, key=key, headers=given)

    def repeat(self, name: str, value: bytes) -> None:
        self._headers.append((name, value))


def make(message: FakeMessage, **more: Any) -> Any:
    return make_record(message, {"n": 1}, **more)  # type: ignore[arg-type]


def test_headers_and_the_time_are_read_once_and_when_they_are_asked_for():
    message = FakeMessage(ce_type=b"placed")
    record = make(message)
    assert (record.key, record.value, record.offset) == ("k", {"n": 1}, 41)
    assert (record.topic, record.partition, record.origin) == ("orders", 3, "orders/3")
    assert not message.asked
    for _ in range(2):
        assert record.headers == {"ce_type": "placed"}
        assert record.timestamp == datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
    assert message.asked == {"headers": 1, "timestamp": 1}


@pytest.mark.parametrize("read_all_first", [False, True])
def test_the_version_and_the_cause_are_those_that_the_relay_has_written(read_all_first):
    message = FakeMessage(ce_version=b"7", ce_cause=b"live")
    message.repeat("ce_version", b"8")
    record = make(message)
    if read_all_first:
        assert record.headers["ce_version"] == "8"
    assert (record.version, record.cause) == (8, "live")
    bare = make(FakeMessage())
    assert (bare.version, bare.cause, bare.headers) == (None, None, {})
    assert make(FakeMessage(ce_version=b"seven")).version is None


@pytest.mark.guarantee("W63")
@pytest.mark.parametrize(
    "value",
    [b"v12", b"-1", b"1.0", b"9223372036854775808", b"1" * 20, "\u0661".encode()],
)
def test_a_version_that_is_none_is_refused_where_versions_are_compared(value):
    message = cast("Message", FakeMessage(ce_version=value))
    assert read_version(message) is None
    with pytest.raises(RecordError) as refused:
        read_version(message, strict=True)
    assert "orders/3 offset 41" in str(refused.value)
    assert "its header ce_version is no whole number" in str(refused.value)
    assert value.decode() not in str(refused.value).replace(str(2**63 - 1), "")


@pytest.mark.parametrize(
    ("value", "version"), [(b"0", 0), (b"007", 7), (b"9223372036854775807", 2**63 - 1)]
)
def test_a_version_is_a_bigint(value, version):
    message = cast("Message", FakeMessage(ce_version=value))
    assert read_version(message, strict=True) == version


@pytest.mark.parametrize("value", [b"", None])
def test_an_empty_version_is_none(value):
    message = cast("Message", FakeMessage(ce_version=value))
    assert read_version(message, strict=True) is None


@pytest.mark.parametrize(
    ("highest", "repeated"), [(None, False), (41, False), (42, True)]
)
def test_a_record_below_the_highest_offset_is_repeated(highest, repeated):
    assert make(FakeMessage(), highest=highest).repeated is repeated


def test_a_record_cannot_be_changed_and_hides_its_value_and_headers():
    record = make_record(
        FakeMessage(secret=VALUE.encode()),  # type: ignore[arg-type]
        VALUE,
    )
    for name in ("value", "key", "offset", "headers", "anything"):
        with pytest.raises(AttributeError):
            setattr(record, name, 1)
    assert repr(record).startswith("Record(topic='orders', partition=3, offset=41, key")
    assert record.headers == {"secret": VALUE}
    assert VALUE not in repr(record)


def test_records_are_equal_by_their_parts_and_can_be_copied_and_pickled():
    record = make(FakeMessage(ce_version=b"7"), highest=50)
    same = make_by_hand(
        {"n": 1},
        key="k",
        topic="orders",
        partition=3,
        offset=41,
        version=7,
        timestamp=record.timestamp,
    )
    assert record == same
    assert record != make(FakeMessage())
    assert record != "a record"
    for again in (pickle.loads(pickle.dumps(record)), copy.deepcopy(record)):
        assert again == record
        assert again.repeated
    match record:
        case Record(topic, 3, 41, "k"):
            assert topic == "orders"
        case _:
            pytest.fail("it does not match its own parts")


def test_the_kit_makes_records_with_a_cause_that_come_again():
    record = make_by_hand(None, key=7, cause="reexport", repeated=True)
    assert (record.key, record.value) == (7, None)
    assert (record.cause, record.repeated) == ("reexport", True)
    assert record.headers == {"ce_cause": "reexport"}


ID = UUID("0f5b1a3e-2c4d-4e6f-8a90-b1c2d3e4f506")


@pytest.mark.parametrize(
    ("key_type", "key", "expected"),
    [
        (str, "ключ".encode(), "ключ"),
        (bytes, b"\xff\0", b"\xff\0"),
        (int, b"0", 0),
        (int, b"-17", -17),
        (int, b"9" * 40, int("9" * 40)),
        (UUID, str(ID).encode(), ID),
        *((one, None, None) for one in (str, bytes, int, UUID)),
    ],
)
def test_a_key_has_the_declared_type(key_type, key, expected):
    reader = choose_reader(key_type, "it")
    record = make(FakeMessage(key), read_key=reader)
    assert record.key == expected
    assert type(record.key) is type(expected)


@pytest.mark.parametrize(
    ("key_type", "key"),
    [
        (str, b"secret\xff"),
        # Each would be the same integer or id as another key of the topic.
        *((int, key) for key in (b"007", b"-0", b"+5", b" 5", b"5 ", b"1_0", b"")),
        *((int, key) for key in (b"secret", b"5.0", "٣".encode(), b"9" * 5_000)),
        (UUID, str(ID).upper().encode()),
        (UUID, ID.hex.encode()),
        (UUID, b"secret"),
        (UUID, f"{ID}\n".encode()),
    ],
)
def test_a_key_of_another_type_is_a_record_that_cannot_be_read(key_type, key):
    reader = choose_reader(key_type, "it")
    with pytest.raises(RecordError) as refused:
        make(FakeMessage(key), read_key=reader)
    said = str(refused.value)
    assert said.startswith("the record at orders/3 offset 41 cannot be read: its key")
    assert "key_type=bytes" in said
    assert "secret" not in said


@pytest.mark.guarantee("T11", "T16")
def test_an_event_has_one_idempotency_key_wherever_it_lies_in_the_topic():
    def key_of(
        offset: int = 0, topic: str = "tenants", ms: int = 0, **headers: str
    ) -> str:
        given = {f"ce_{name}": text for name, text in headers.items()}
        at = datetime(2026, 1, 2, tzinfo=UTC) + timedelta(milliseconds=ms)
        record = make_by_hand(
            1, topic=topic, offset=offset, headers=given, timestamp=at
        )
        assert record.idempotency_key == record.idempotency_key
        return record.idempotency_key

    # The same in each release: providers remember it.
    assert key_of() == "0a9dcc56-23bf-5958-ad65-d5828d3ea34c"
    assert key_of(7, request="r1", id="1") == key_of(8, request="r1", id="2")
    assert key_of(7, id="1", source="a") == key_of(8, id="1", source="a")
    assert key_of(7, request="r1", ms=1) == key_of(7, request="r1", ms=2)
    others = [
        key_of(7),
        key_of(8),
        # Another event, in a topic that was made anew.
        *(key_of(7, ms=ms) for ms in range(1, 1_001)),
        key_of(request="r1"),
        key_of(request="r2"),
        key_of(id="r1"),
        key_of(id="1", source="a"),
        key_of(id="1", source="b"),
        key_of(request="r1", topic="users"),
    ]
    assert len({*others}) == len(others)
    read = make(FakeMessage())
    assert pickle.loads(pickle.dumps(read)).idempotency_key == read.idempotency_key


class CrashingMessage(FakeMessage):
    """Kafka's message with a header whose name is no UTF-8."""

    looks = 0

    def headers(self) -> Any:
        self.looks += 1
        assert self.looks == 1, "the second look crashes the process"
        raise SystemError("headers returned a result with an exception set")

    def set_headers(self, headers: Any) -> None:
        self.headers = lambda: headers  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "read",
    [read_version, read_headers, read_cause, partial(read_derived_from, topic="t")],
)
def test_a_header_whose_name_is_no_text_is_named_however_often_it_is_read(read):
    message: Any = CrashingMessage()
    for _ in range(2):
        with pytest.raises(RecordError, match="orders/3 offset 41 cannot be read"):
            read(message)


def test_such_a_header_is_named_to_consumers_over_the_log():
    record = CoordinatedRecord(cast("Any", CrashingMessage()))
    for _ in range(2):
        with pytest.raises(RecordError, match="the name of one of its headers"):
            _ = record.headers


def test_an_event_with_such_a_header_is_not_the_one_of_a_request():
    odd, message = CrashingMessage(), FakeMessage(ce_request=b"r1")
    assert read_request(cast("Any", odd)) is None
    assert read_request(cast("Any", message)) == b"r1"


def test_a_header_whose_value_is_no_text_is_read_with_marks_in_its_place():
    message: Any = FakeMessage(said=b"caf\xe9")
    assert read_headers(message) == {"said": "caf\ufffd"}
