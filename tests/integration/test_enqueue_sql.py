"""The SQL function gives the same job, order and checks as Python."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import psycopg
import pytest

from jobs_lib.partitioner import choose_origin, murmur2
from tests.support.apps import make_app

if TYPE_CHECKING:
    from jobs_lib import Job


@pytest.mark.parametrize("size", range(14))
def test_murmur2_is_that_of_python(connect, size):
    keys = [bytes((seed * 37 + n * 91) % 256 for n in range(size)) for seed in range(9)]
    with connect() as connection:
        rows = connection.execute(
            "select jobs_lib.murmur2(key) from unnest(%s::bytea[]) with ordinality"
            " as k(key, place) order by place",
            (keys,),
        ).fetchall()
    assert rows == [(murmur2(key),) for key in keys]


@pytest.mark.parametrize(
    ("key", "number"),
    # These come from Apache Kafka's own tests of its Java client, as unsigned numbers.
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_is_that_of_kafka(connect, key, number):
    with connect() as connection:
        row = connection.execute("select jobs_lib.murmur2(%s)", (key,)).fetchone()
    assert row == (number % 2**32,)


@pytest.mark.guarantee("J2")
def test_a_trigger_enqueues_as_python_does(connect, database_url):
    app = make_app(database_url)

    @app.job(group="customer")
    def invoice(job: Job, customer: str, order: int) -> None: ...

    with connect() as connection:
        connection.execute("create table orders (id int, customer text)")
        connection.execute("""
            create function on_order() returns trigger language plpgsql as $$
            begin
                perform jobs_lib.enqueue(
                    'invoice',
                    payload => jsonb_build_object(
                        'customer', new.customer, 'order', new.id
                    ),
                    "group" => new.customer
                );
                return new;
            end $$;
            create trigger on_order after insert on orders
                for each row execute function on_order();
        """)
    names = [f"ada{n}" for n in range(50)] + ["ünal", "x" * 1_000, "日本"]
    with connect() as connection:
        # A table of the session with the name of ours changes nothing.
        connection.execute("create temp table jobs (id int)")
        for n, name in enumerate(names):
            connection.execute("insert into orders values (%s, %s)", (n, name))
            invoice.enqueue(connection, customer=name, order=n)
        pairs = connection.execute(
            'select origin, type, "group", state, payload, run_at, priority, headers,'
            " unique_key from jobs_lib.jobs order by id"
        ).fetchall()
    assert len(pairs) == 2 * len(names)
    assert pairs[::2] == pairs[1::2]
    assert [row[0] for row in pairs[::2]] == [
        choose_origin(name, "local", 16) for name in names
    ]


def test_the_sql_function_stores_every_argument(connect):
    at = datetime(2200, 1, 1, tzinfo=UTC)
    with connect() as connection:
        ids = [
            connection.execute(
                "select jobs_lib.enqueue('work', payload => '{\"a\": 1}', run_at => %s,"
                " priority => 'high', unique_key => 'k', origin => 'local/77',"
                ' headers => \'{"tenant": "t"}\', ordered => false)',
                (at,),
            ).fetchone()
            for _ in range(2)
        ]
        assert ids[0] == ids[1]
        row = connection.execute(
            "select origin, state, payload, run_at, priority, headers, unique_key"
            " from jobs_lib.jobs"
        ).fetchall()
        assert row == [("local/77", "scheduled", {"a": 1}, at, 1, {"tenant": "t"}, "k")]
        for _ in range(200):
            connection.execute("select jobs_lib.enqueue('anywhere')")
        spread = connection.execute(
            "select count(distinct origin) from jobs_lib.jobs where type = 'anywhere'"
        ).fetchone()
        assert spread == (16,)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ("null", "no name for a job type"),
        ("'no spaces'", "no name for a job type"),
        ("'w', payload => null", "no JSON object"),
        ("'w', payload => '[1]'", "no JSON object"),
        (
            "'w', payload => jsonb_build_object('a', repeat('x', 1048576))",
            "the limit is 1048576",
        ),
        ("'w', \"group\" => ''", "the group of w has 0 bytes"),
        ("'w', \"group\" => repeat('ü', 501)", "the group of w has 1002 bytes"),
        ("'w', unique_key => ''", "the unique key of w has 0 bytes"),
        ("'w', run_at => 'infinity'", "years 2000 to 9999"),
        ("'w', run_at => '1970-01-01Z'", "years 2000 to 9999"),
        ("'w', run_at => '10000-01-01Z'", "years 2000 to 9999"),
        ("'w', priority => 'urgent'", "'urgent' is no priority"),
        ("'w', priority => null", "NULL is no priority"),
        ("'w', headers => '[]'", "object of strings"),
        ("'w', headers => '{\"a\": 1}'", "object of strings"),
        ("'w', origin => 'elsewhere/1'", "no topic is declared"),
        ("'w', origin => 'local'", "no topic is declared"),
        *(
            (f"'w', origin => 'local/{number}'", "no topic is declared")
            for number in ("007", "00", "-1", "7 ", "7\n", "1234567890", "٣")
        ),
    ],
)
def test_the_sql_function_refuses_invalid_arguments_with_a_hint(
    connect, arguments, match
):
    with connect() as connection:
        with pytest.raises(psycopg.errors.InvalidParameterValue, match=match) as caught:
            connection.execute(f"select jobs_lib.enqueue({arguments})")
        assert caught.value.diag.message_hint


def test_enqueue_without_a_home_topic_hints_at_topics_declare(connect):
    with connect() as connection:
        connection.execute("update jobs_lib.topics set home = false")
        with pytest.raises(psycopg.Error, match="no home topic") as caught:
            connection.execute("select jobs_lib.enqueue('w')")
        assert "topics declare MODULE:APP" in str(caught.value.diag.message_hint)
