"""A publication may contain all tables, for example before a move to another server."""

from __future__ import annotations

import pytest
from psycopg import sql

from jobs_lib.operating import maintain


@pytest.fixture
def published(admin):
    """Publish every table of the test's database."""
    admin.execute("create publication everything for all tables")


@pytest.mark.usefixtures("published")
def test_rows_of_every_table_may_be_updated_and_deleted_while_they_are_published(admin):
    tables = admin.execute(
        "select c.relname, a.attname from pg_class c"
        " join pg_attribute a on a.attrelid = c.oid and a.attnum > 0"
        "     and not a.attisdropped and a.attgenerated = '' and a.attidentity = ''"
        " where c.relnamespace = 'jobs_lib'::regnamespace and c.relkind = 'r'"
    ).fetchall()
    assert len({table for table, _ in tables}) > 10
    for table, column in tables:
        names = {"table": sql.Identifier(table), "column": sql.Identifier(column)}
        # PostgreSQL checks this before it looks for rows.
        for statement in (
            "update jobs_lib.{table} set {column} = {column} where false",
            "delete from jobs_lib.{table} where false",
        ):
            admin.execute(sql.SQL(statement).format(**names))


@pytest.mark.usefixtures("published")
def test_holds_are_lifted_and_the_history_is_kept_while_they_are_published(
    database, admin
):
    admin.execute(
        "insert into jobs_lib.holds (topic, key, error, retry_at)"
        " values ('t', 'k', 'refused', now())"
    )
    admin.execute("select jobs_lib.lift_hold('t', 'k', null)")
    assert not admin.execute("select from jobs_lib.holds").rowcount
    today = "(now() at time zone 'UTC')::date"
    for day in (-1, 0):
        admin.execute(
            "insert into jobs_lib.history (keep_until, id, origin, type, outcome,"
            f" attempt, enqueued_at) values ({today} + %s, 1, 'local/1', 'work',"
            " 'completed', 1, now())",
            (day,),
        )
    admin.execute(f"select jobs_lib.make_history({today}, 10)")
    maintain(database, [1])
    rows = admin.execute(f"select keep_until = {today} from jobs_lib.history")
    assert rows.fetchall() == [(True,)]
