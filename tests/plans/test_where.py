"""To ask where a change is costs a few pages, however many rows wait."""

from __future__ import annotations

import re
from unittest.mock import ANY

import pytest

from jobs_lib.consuming.keys import KnownKey
from jobs_lib.operating.where_facts import (
    COUNTED,
    KeyPlace,
    read_consumers,
    read_outbox,
    read_source,
)
from tests.plans.test_plans import Plans
from tests.support.apps import make_app

_FILL = """
insert into jobs_lib.reexports (id, entity, topic, rate, state)
overriding system value values (1, 'things', 'states', 60, 'paused');
insert into jobs_lib.outbox (shard, class, topic, key, value, cause, reexport_id)
select jobs_lib.place_record('states', 'k' || n), c.class, 'states', 'k' || n, '',
    c.cause, nullif(c.class, 0)
from generate_series(1, 40000) n
cross join (values (0, 'live'), (1, 'reexport')) as c(class, cause)
-- So that the rows of a shard lie together.
order by 2, 1, n;
insert into jobs_lib.held_rows (shard, class, id, topic, key, value, cause, created_at)
select 0, 0, 1000000 + n, 'states', 'held' || n, '', 'live', now()
from generate_series(1, 20000) n;
insert into jobs_lib.holds (topic, key, error, retry_at)
select 'states', 'held' || n, 'too large', now() + interval '9 minutes'
from generate_series(1, 20000) n;
insert into jobs_lib.skipped (consumer_group, topic, partition, record_offset, error)
select 'g', 'states', 0, n, '' from generate_series(1, 20000) n;
insert into jobs_lib.model_keys (model, key, version)
select 'states_rm', n::text, n from generate_series(1, 20000) n;
create table things (id bigint primary key, version bigint);
insert into things select n, n from generate_series(1, 20000) n;
create table states_rm (id bigint primary key, version bigint);
insert into states_rm select n, n from generate_series(1, 20000) n;
"""


@pytest.mark.guarantee("W83")
@pytest.mark.parametrize("analyzed", ["empty", "full", "never"])
def test_no_table_is_read_whole_to_find_one_key(database, admin, analyzed):
    tables = ", ".join(
        f"jobs_lib.{one}" for one in ("outbox", "held_rows", "holds", "skipped")
    )
    for table in tables.split(", "):
        admin.execute(f"alter table {table} set (autovacuum_enabled = off)")
    if analyzed == "empty":
        admin.execute(f"vacuum analyze {tables}")
    admin.execute(_FILL)
    if analyzed == "full":
        admin.execute("vacuum analyze")
    app = make_app(database.url)
    states = app.topic("states", compacted=True, partitions=1)
    app.entity(states, source="things", key="id")(lambda conn, keys: {})
    app.read_model("states", table="states_rm", key="id", group="g", key_type=int)(
        lambda record: {}
    )
    (entity,), consumers = app.entities.values(), list(app.consumers)
    with database.connect("test") as connection:
        plans = Plans(connection)
        for setting in ("analyze", "buffers"):
            connection.execute(f"set auto_explain.log_{setting} = on")

        def ask() -> None:
            assert read_source(connection, database, entity, "7").version == 7
            rows = read_outbox(connection, database, "states", "k7", 5.0)
            assert (rows.live, rows.batch, rows.held) == (1, 1, 0)
            held = read_outbox(connection, database, "states", "held7", 5.0)
            assert (held.held, held.error) == (1, "too large")
            place = KeyPlace("states", 0, "7", 7, None)
            (one,) = read_consumers(connection, database, consumers, place, 5.0)
            assert (one.known, one.skip_error) == (KnownKey(True, 7, True, ANY), "")

        ask()
        with plans.told(generic=False) as told:
            ask()
    assert any("find_rows" in plan or "batch.looked" in plan for plan in told)
    for plan in told:
        scanned = re.findall(
            r"(?:Seq|Bitmap Heap) Scan on (outbox|held_rows|holds|skipped|model_keys"
            r"|things|states_rm)",
            plan,
        )
        assert not scanned, plan
        # At most the rows of re-exports of one shard, which are 2,500 here.
        pages = re.findall(r"^\S.*\n\s+Buffers: shared (.*)", plan, re.MULTILINE)
        read = sum(map(int, re.findall(r"(?:hit|read)=(\d+)", "".join(pages[:1]))))
        assert read < 400, plan


@pytest.mark.guarantee("W83")
def test_a_row_of_a_reexport_is_found_behind_all_rows_of_another_one(database, admin):
    admin.execute(
        "insert into jobs_lib.reexports (id, entity, topic, rate, state)"
        " overriding system value values (1, 'others', 'others', 60, 'paused'),"
        " (2, 'things', 'states', 60, 'running')"
    )
    admin.execute(
        "insert into jobs_lib.outbox (shard, class, topic, key, cause, reexport_id)"
        " select jobs_lib.place_record('states', 'k'), 1, o.topic, o.key, 'reexport',"
        " o.reexport from (select 'others', n::text, 1 from generate_series(1, %s) n"
        " union all select 'states', 'k', 2) o(topic, key, reexport)",
        [COUNTED + 1],
    )
    with database.connect("test") as connection:
        rows = read_outbox(connection, database, "states", "k", 5.0)
    assert (rows.batch, rows.is_paused) == (1, False)
