"""All JSON that the library writes can be read again."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from pydantic import TypeAdapter

from jobs_lib.errors import PayloadError
from jobs_lib.jobs.payload import Payload
from jobs_lib.schemas.codec import BytesCodec, JsonCodec, show_json
from jobs_lib.schemas.json_limits import MOST_DIGITS, MOST_LEVELS, check_limits

MEGABYTE = 1_048_576


def work(job, data: Any) -> None: ...


def nested(levels: int) -> Any:
    value: Any = []
    for n in range(levels - 1):
        value = [value] if n % 2 else {"[{": value}
    return value


@pytest.mark.guarantee("J4")
def test_a_payload_of_the_greatest_depth_is_enqueued_and_read():
    payload = Payload("work", work, globals())
    value = nested(MOST_LEVELS - 1)
    encoded = payload.encode({"data": value}, MEGABYTE)
    assert payload.decode(encoded.decode()) == {"data": value}


@pytest.mark.guarantee("J4")
@pytest.mark.parametrize("levels", [MOST_LEVELS, MOST_LEVELS + 40])
def test_a_deeper_payload_is_refused_with_its_depth_and_the_way_out(levels):
    payload = Payload("work", work, globals())
    for refused in (
        lambda: payload.encode({"data": nested(levels)}, MEGABYTE),
        lambda: payload.encode_many([{"data": 1}, {"data": nested(levels)}], MEGABYTE),
    ):
        with pytest.raises(PayloadError, match=rf"{levels + 1} levels.*flat list"):
            refused()


def test_brackets_in_strings_are_no_levels():
    check_limits(json.dumps({"a": "[{" * 5_000, '"[\\': ["\\", '"[' * 500]}).encode())
    check_limits(json.dumps([[]] * 5_000).encode())


def test_pydantic_reads_no_more_levels():
    adapter = TypeAdapter(Any)
    adapter.validate_json(json.dumps(nested(MOST_LEVELS)))
    with pytest.raises(ValueError, match="recursion"):
        adapter.validate_json(json.dumps(nested(MOST_LEVELS + 2)))


@pytest.mark.guarantee("J4")
def test_a_number_of_too_many_digits_is_refused_with_their_number():
    for sign in ("", "-"):
        check_limits(f"[{sign}{'1' * MOST_DIGITS}]".encode())
        with pytest.raises(ValueError, match=r"4301 digits.*send a string"):
            check_limits(f"[{sign}{'1' * (MOST_DIGITS + 1)}]".encode())
    check_limits(json.dumps(["1" * 9_000]).encode())


@pytest.mark.parametrize("run", [MOST_DIGITS - 1, MOST_DIGITS, 9_000])
def test_a_megabyte_of_digits_is_checked_at_once(run):
    data = ("1" * run + "x") * (1_000_000 // run)
    payload = Payload("work", work, globals())
    began = time.process_time()
    payload.encode({"data": data}, MEGABYTE)
    # A search that starts again at each digit would take ten seconds.
    assert time.process_time() - began < 2


def test_a_record_that_no_consumer_could_read_is_refused():
    codec = JsonCodec(TypeAdapter(Any))
    codec.encode(nested(MOST_LEVELS))
    with pytest.raises(ValueError, match=f"{MOST_LEVELS + 1} levels"):
        codec.encode(nested(MOST_LEVELS + 1))


def test_bytes_that_no_consumer_could_read_are_refused_where_json_is_declared():
    deep = b"[" * (MOST_LEVELS + 1) + b"]" * (MOST_LEVELS + 1)
    binary = b"[" * 500
    declared = JsonCodec(TypeAdapter(list[Any]))
    with pytest.raises(ValueError, match="201 levels"):
        declared.encode(deep)
    assert declared.encode(deep[1:-1]) == deep[1:-1]
    # With any type, or with bytes, they may be no JSON at all.
    assert JsonCodec(TypeAdapter(Any)).encode(binary) == binary
    assert BytesCodec(TypeAdapter(bytes)).encode(binary) == binary


def test_bytes_that_are_too_deep_to_show_are_shown_as_they_are():
    data = b"[" * 100_000 + b"]" * 100_000
    assert show_json(data) is data
