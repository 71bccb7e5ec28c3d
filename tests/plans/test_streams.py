"""A query of streams costs a few pages, however many streams and requests there are."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.pages_read import count_pages

ROWS = 100_000
FEW = 100
"""Pages; each of the tables has more than 500. A first insert looks for free space."""
TOPIC = "topic-7"
DIGEST = b"\0" * 32
ONE = {"topic": TOPIC, "id": "request-70007"}
PLACE = {"partition": 0, "search_from": 1, "seconds": 5.0}
GROWER = "00000000-0000-0000-0000-000000000001"
_STREAMS = """
insert into jobs_lib.streams (topic, send_seconds, grower, partitions, stopped_at,
    renewed_at, stopped_until)
select 'topic-' || n, 5, %s, 3, clock_timestamp(), clock_timestamp(),
    clock_timestamp() + interval '1 h'
from generate_series(1, %s) n
"""
_REQUESTS = """
insert into jobs_lib.requests (topic, id, digest, partition, search_from, sent_until)
select 'topic-' || n %% 10, 'request-' || n, %s, 0, n, clock_timestamp()
from generate_series(1, %s) n
"""
_OFFSETS = """
insert into jobs_lib.offsets (topic, partition, consumer_group, next_offset)
select 'topic-' || n, 0, 'group-' || n, n from generate_series(1, %s) n
"""


THREE = {"topics": [TOPIC, "topic-70007", "new"]}
QUERIES: list[tuple[str, dict[str, Any]]] = [
    # Each process that publishes asks this twice a second.
    ("read_streams", {**THREE, "seconds": 5.0}),
    ("note_streams", {**THREE, "seconds": 9.0}),
    ("list_stopped", THREE),
    ("renew_stop", {"topic": TOPIC, "grower": GROWER, "lease": 10.0}),
    ("open_stream", {"topic": TOPIC, "grower": GROWER, "has_ended": True}),
    ("find_growth", {"topic": TOPIC}),
    ("lower_send_seconds", {"topic": TOPIC, "grower": GROWER, "seconds": 3.0}),
    (
        "stop_stream",
        {"topic": TOPIC, "grower": GROWER, "partitions": 3, "seconds": 5.0, "lease": 9},
    ),
    ("find_request", ONE),
    ("add_request", {**ONE, **PLACE, "digest": DIGEST}),
    ("add_request", {**PLACE, "topic": TOPIC, "id": "new", "digest": DIGEST}),
    ("take_request", {**ONE, **PLACE, "attempts": 1}),
    ("forget_request", {**ONE, "attempts": 2}),
    ("answer_request", {"topic": TOPIC, "id": "new", "partition": 0, "offset": 1}),
    ("read_next_offsets", {"topic": TOPIC, "partition": 0, "groups": ["group-7", "g"]}),
    ("forget_requests", {"seconds": 86_400.0, "rows": 1_000}),
]


@pytest.mark.guarantee("FP25")
@pytest.mark.parametrize("analyzed", ["empty", "full", "never"])
def test_many_streams_and_requests_do_not_make_a_query_dearer(
    database, admin, analyzed
):
    for table in ("streams", "requests", "offsets"):
        admin.execute(f"alter table jobs_lib.{table} set (autovacuum_enabled = off)")
    if analyzed == "empty":
        admin.execute("vacuum analyze")
    admin.execute(_STREAMS, (GROWER, ROWS))
    admin.execute(_REQUESTS, (DIGEST, ROWS))
    admin.execute(_OFFSETS, (ROWS,))
    if analyzed == "full":
        admin.execute("vacuum analyze")
    with database.connect("test") as connection:
        for query, values in QUERIES:
            pages, plan = count_pages(connection, database.queries[query], values)
            assert pages < FEW, f"{query}\n{plan}"


@pytest.mark.guarantee("FP25")
def test_the_upkeep_of_requests_reads_those_that_are_old(database, admin):
    admin.execute(_REQUESTS, (DIGEST, ROWS))
    old = "update jobs_lib.requests set remembered_at = now() - interval '2 d' where id"
    admin.execute(f"{old} in ('request-1', 'request-70007')")
    with database.connect("test") as connection:
        values = {"seconds": 86_400.0, "rows": 1_000}
        forget = database.queries["forget_requests"]
        pages, plan = count_pages(connection, forget, values)
        assert pages < FEW, plan
    left = "select count(*), bool_or(remembered_at < now() - interval '1 d')"
    found = admin.execute(f"{left} from jobs_lib.requests").fetchall()
    assert found == [(ROWS - 2, False)]
