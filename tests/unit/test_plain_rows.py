"""Plain rows: sent as they were read, they equal the records they would become."""

from __future__ import annotations

import pytest

from jobs_lib.outbox.block import Block, Headers, PlainRows, Refusal, make_messages

HEADS: dict[str, Headers] = {
    "orders": [("ce_type", b"orders"), ("ce_cause", b"live")],
    "flights": [("ce_type", b"flights")],
}
NOON, LATER = '"2026-03-01T12:00:00"', '"2026-03-01T12:00:01.5"'


def row(
    number: int,
    topic: str = "orders",
    key: str | None = "k",
    headers: dict[str, str] | None = None,
    version: int | None = None,
    at: str = NOON,
):
    """A live row, as the relay reads it."""
    place = b"%06d" % number
    return number, place, topic, key, b"value", headers, version, None, at, False, None


ROWS = [
    row(1, version=7),
    row(2, key=None),
    row(3, at=LATER, version=8),
    row(4, "flights", at=LATER),
    row(5, headers={"traceparent": "00", "ce_type": "own"}),
    row(6, version=9),
]


@pytest.fixture
def plain():
    """Rows that leave unchanged."""
    return PlainRows(ROWS, HEADS)


def all_of(messages):
    """Messages with their headers at the moment when the producer would copy them."""
    return [
        (topic, value, key, [*dict(headers).items()])
        for topic, value, key, headers in messages
    ]


def test_plain_rows_are_sent_as_their_records_would_be(plain):
    assert all_of(make_messages(plain)) == all_of(make_messages(plain.records))


def test_plain_rows_do_not_share_headers(plain):
    headers = [dict(of_one) for *_, of_one in all_of(make_messages(plain))]
    noon, later = NOON.strip('"'), LATER.strip('"')
    assert [one["ce_id"] for one in headers] == [
        f"1-{noon}", f"2-{noon}", f"3-{later}", f"4-{later}", f"5-{noon}", f"6-{noon}"
    ]  # fmt: skip
    assert [one.get("ce_version") for one in headers] == [
        "7",
        None,
        "8",
        *[None] * 2,
        "9",
    ]
    assert [one["ce_time"][17:] for one in headers] == [
        "00Z", "00Z", "01.5Z", "01.5Z", "00Z", "00Z"
    ]  # fmt: skip
    assert [one["ce_type"] for one in headers] == [
        b"orders", b"orders", b"orders", b"flights", "own", b"orders"
    ]  # fmt: skip
    assert [one.get("traceparent") for one in headers] == [*[None] * 4, "00", None]


def test_plain_rows_are_done_as_their_records_would_be(plain):
    spelled = Block(plain.records)
    assert Block(plain).done == spelled.done


def test_rows_behind_a_refused_row_of_their_key_stay(plain):
    block = Block(plain)
    refused = plain.records[2]
    sent = [one for one in plain.records if one.key is None or one.topic != "orders"]
    block.keep(sent, [Refusal(refused, "too large")])
    assert [one.row_id for one in block.records] == [2, 4]
    assert [row_id for _, row_id, _ in block.behind] == [1, 5, 6]
    assert block.done == ([2, 4], [b"000002", b"000004"])
