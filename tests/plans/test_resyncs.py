"""The end of a re-synchronisation looks through what was shown once."""

from __future__ import annotations

import json

import pytest

from jobs_lib.consuming.table_statements import as_type

_FILL = """
insert into jobs_lib.resync_noted (model, keys, versions, partitions, record_offsets)
select 'm', array_agg('k' || n), array_agg(n::bigint), array_agg(0),
    array_agg(n::bigint)
from generate_series(1, 200000) n group by n / 1000;
insert into jobs_lib.resync_shown (model, keys)
select 'm', array_agg('k' || n) from generate_series(11, 200000) n group by n % 200
"""


@pytest.mark.guarantee("W64")
@pytest.mark.parametrize(
    "analyzed",
    [(), ("resync_noted",), ("resync_shown",), ("resync_noted", "resync_shown")],
)
def test_what_was_shown_is_read_once_whatever_the_planner_knows(
    database, admin, analyzed
):
    for one in ("resync_noted", "resync_shown"):
        admin.execute(f"alter table jobs_lib.{one} set (autovacuum_enabled = off)")
    admin.execute(_FILL)
    for one in analyzed:
        admin.execute(f"analyze jobs_lib.{one}")
    query = database.queries.fill("find_unshown", key_type=as_type("text"))
    explained = "explain (analyze, format json) " + query.as_string(admin)
    admin.execute("set plan_cache_mode = force_generic_plan")
    ((found,),) = admin.execute(explained, {"model": "m"}).fetchall()
    scans = [one for one in walk(found[0]["Plan"]) if one.get("CTE Name") == "shown"]
    assert [one["Actual Loops"] for one in scans] == [1], json.dumps(found)
    rows = admin.execute("select key from jobs_lib.resync_unshown order by version")
    assert rows.fetchall() == [(f"k{n}",) for n in range(1, 11)]


def walk(plan):
    """All nodes of a plan."""
    yield plan
    for one in plan.get("Plans", []):
        yield from walk(one)
