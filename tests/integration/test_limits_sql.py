"""The SQL functions refuse JSON that Python could not read again."""

from __future__ import annotations

import json

import psycopg
import pytest

from tests.support.apps import HOME, count, executing, make_app


def nested(levels: int) -> str:
    return '{"data":' + "[" * (levels - 1) + "]" * (levels - 1) + "}"


CALLS = {
    "jobs": "select jobs_lib.enqueue('work', cast(%s as jsonb))",
    "outbox": "select jobs_lib.send('t', 'k', cast(%s as jsonb))",
}


@pytest.mark.guarantee("J2")
@pytest.mark.parametrize("table", CALLS)
@pytest.mark.parametrize("levels", [201, 202, 1_000])
def test_sql_refuses_too_many_levels(admin, table, levels):
    with pytest.raises(psycopg.Error, match=f"has {levels} levels") as refused:
        admin.execute(CALLS[table], (nested(levels),))
    assert refused.value.diag.message_hint
    assert not count(admin, table)


@pytest.mark.guarantee("J2")
@pytest.mark.parametrize("table", CALLS)
@pytest.mark.parametrize("number", ["1" * 4_301, "-" + "9" * 4_301, "1e4300"])
def test_sql_refuses_a_number_of_too_many_digits(admin, table, number):
    with pytest.raises(psycopg.Error, match="a number of 4301 digits") as refused:
        admin.execute(CALLS[table], (f'{{"data": [{{"n": {number}}}]}}',))
    assert refused.value.diag.message_hint
    assert not count(admin, table)


@pytest.mark.guarantee("J2")
def test_json_that_sql_accepts_is_read_by_the_handler(admin, database_url, wait_for):
    app = make_app(database_url)
    read: list[object] = []

    @app.job()
    def work(job, data: object) -> None:
        read.append(data)

    values = [nested(200), json.dumps({"data": "[{" * 9_000})]
    values += [f'{{"data": {"1" * 4_300}}}', f'{{"data": 0.{"1" * 9_000}}}']
    for value in values:
        admin.execute(CALLS["jobs"], (value,))
        admin.execute(CALLS["outbox"], (value,))
    with executing(app, HOME):
        wait_for(lambda: len(read) == len(values), what="all read")
    assert int("1" * 4_300) in read
