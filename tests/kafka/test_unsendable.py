"""A row that Kafka's client cannot accept is held alone; SQL may write any row."""

from __future__ import annotations

import json

import pytest

from jobs_lib import operating
from jobs_lib.partitioner import choose_shard
from tests.support.apps import count_unsent, make_app, running
from tests.support.canary import VALUE
from tests.support.records import read_topic

ODD_HEADERS = {
    "a number": ({"tries": 3}, "the header 'tries' is of type int"),
    "a truth": ({"is_new": True}, "the header 'is_new' is of type bool"),
    "an object": ({"a": "b", "who": {"id": VALUE}}, "the header 'who' is of type dict"),
    "a list": (["a", "b"], "the row's headers are a JSON list"),
    "a text": ("a", "the row's headers are a JSON str"),
}
UNREADABLE = {
    "levels": '{"a": ' + "[" * 2_000 + "]" * 2_000 + "}",
    "digits": '{"a": ' + "1" * 5_000 + "}",
}


@pytest.fixture
def app(database_url, bootstrap_servers):
    """An app with Kafka."""
    return make_app(database_url, kafka_bootstrap_servers=bootstrap_servers)


def write(admin, topic: str, key: str | None, value: bytes, headers=None) -> None:
    """Write a row past all checks, to the one shard that all of these share."""
    admin.execute(
        "insert into jobs_lib.outbox (shard, topic, key, value, headers)"
        " values (%s, %s, %s, %s, %s)",
        [choose_shard(topic, "a", 16), topic, key, value, json.dumps(headers)],
    )


@pytest.mark.guarantee("FK10")
@pytest.mark.parametrize("merge", [False, True], ids=["plain", "merged"])
@pytest.mark.parametrize(("headers", "says"), ODD_HEADERS.values(), ids=[*ODD_HEADERS])
def test_headers_that_are_no_text_hold_their_key_alone(
    app, database, admin, topic, bootstrap_servers, wait_for, headers, says, merge
):
    name = topic(1)
    app.topic(name, value=bytes, merge=merge)
    for key, value, more in [
        ("a", b"1", None),
        ("b", b"2", headers),
        (None, b"3", None),
        (None, b"4", headers),
        ("b", b"5", {"fine": "yes"}),
        ("c", b"6", {"fine": "yes"}),
    ]:
        write(admin, name, key, value, more)
    with running(app, "relay"):
        wait_for(
            # The last row of a state replaces the others, so its key is good.
            lambda: count_unsent(admin) == ((0, 1) if merge else (0, 3)),
            timeout=60,
            what=lambda: f"good rows have left: {operating.list_holds(database)}",
        )
        write(admin, name, "a", b"7")
        wait_for(
            lambda: count_unsent(admin)[0] == 0, timeout=60, what="the shard goes on"
        )
    sent = [record.value for record in read_topic(bootstrap_servers, name)]
    expected = [b"1", b"5", b"3"] if merge else [b"1", b"3"]
    assert sent == [*expected, b"6", b"7"]
    holds = operating.list_holds(database)
    assert [hold.key for hold in holds] == ([None] if merge else ["b", None])
    for hold in holds:
        assert says in hold.error
        assert "drop this row with `jobs-lib outbox drop`" in hold.error
        assert VALUE not in hold.error


@pytest.mark.guarantee("FK10")
@pytest.mark.parametrize("headers", UNREADABLE.values(), ids=[*UNREADABLE])
def test_headers_that_python_cannot_read_hold_their_key_alone(
    app, database, admin, topic, bootstrap_servers, wait_for, headers
):
    name = topic(1)
    app.topic(name, value=bytes)
    write(admin, name, "a", b"1")
    admin.execute(
        "insert into jobs_lib.outbox (shard, topic, key, value, headers)"
        " values (%s, %s, 'b', '2', %s::jsonb)",
        [choose_shard(name, "a", 16), name, headers],
    )
    write(admin, name, "c", b"3")
    with running(app, "relay"):
        wait_for(
            lambda: count_unsent(admin) == (0, 1),
            timeout=60,
            what="good rows have left",
        )
    assert [r.value for r in read_topic(bootstrap_servers, name)] == [b"1", b"3"]
    (hold,) = operating.list_holds(database)
    assert hold.key == "b"
    assert "the row's headers are JSON that Python cannot read" in hold.error


@pytest.mark.guarantee("FK10")
def test_a_record_that_is_larger_than_the_clients_queue_is_held_alone(
    app, database, admin, topic, bootstrap_servers, wait_for
):
    name = topic(1)
    small = app.settings.model_copy(
        update={"kafka": {"queue.buffering.max.kbytes": "64"}}
    )
    app = type(app)("test", settings=small)
    app.topic(name, value=bytes)
    for key, size in [("a", 1), ("b", 200_000), ("b", 2), *[("c", 30_000)] * 9]:
        write(admin, name, key, b"x" * size)
    with running(app, "relay"):
        wait_for(
            lambda: count_unsent(admin) == (0, 2),
            timeout=60,
            what=lambda: f"good rows have left: {operating.list_holds(database)}",
        )
    (hold,) = operating.list_holds(database)
    assert hold.key == "b"
    assert "raise `queue.buffering.max.kbytes` in JOBS_LIB_KAFKA" in hold.error
    assert len(read_topic(bootstrap_servers, name)) == 10
