"""A topic is compared with a large table by one pass over each."""

from __future__ import annotations

import pytest

from jobs_lib.reexport.source import find_source
from tests.plans.test_old_snapshots import count_pages
from tests.reexport.helpers import make_entity, make_table

KEYS = 50_000


@pytest.mark.guarantee("W26")
@pytest.mark.parametrize("gone", [0, KEYS // 2], ids=["none gone", "half gone"])
def test_each_page_of_the_table_is_read_once(database, admin, gone):
    make_table(database, (f"k{n}" for n in range(gone, KEYS)))
    queries = database.queries
    with admin.transaction():
        source = find_source(admin, queries, make_entity())
        admin.execute(queries["make_topic_keys"])
        with (
            admin.cursor() as cursor,
            cursor.copy(queries["copy_topic_keys"]) as copy,
        ):
            for n in range(KEYS):
                copy.write_row((n % 16, n, f"k{n}", n, False))
        admin.execute(queries["analyze_topic_keys"])
        statement = source.query(queries, "source_stale")
        (pages,) = admin.execute(
            "select relpages from pg_class where oid = 'aircraft'::regclass"
        ).fetchone()
        read = count_pages(admin, statement, None)
        found = admin.execute(statement).fetchall()
    assert len(found) == gone
    assert read < 2 * pages + 100
