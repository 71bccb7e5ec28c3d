"""Names that come from an application are never read as SQL."""

from __future__ import annotations

import pytest
from psycopg import sql

from jobs_lib import reexport
from jobs_lib.errors import ReexportError
from spark_bridge import start
from tests.reexport.helpers import loaded_keys, make_entity, query

HOSTILE = [
    'a"; drop table victims; --',
    "a'; drop table victims; --",
    "{table}",
    "%s; drop table victims",
    "50 % (or %% more) %(size)s",
    "$$a$$\\",
    "ünï côde",
]


@pytest.fixture(autouse=True)
def victims(database):
    with database.connect("test") as connection:
        connection.execute("create table victims as select 1 as id")
    yield
    assert query(database, "select id from victims") == [(1,)]


@pytest.mark.guarantee("FS13")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_of_a_table_and_its_key_is_only_a_name(database, name):
    table = sql.Identifier(name)
    with database.connect("test") as connection:
        connection.execute(sql.SQL("create table {} ({} text)").format(table, table))
        insert = sql.SQL("insert into {} values ('a'), ('b'), ('a')")
        connection.execute(insert.format(table))
    entity = make_entity(source=name, key=name, name=name)
    progress = start(database, entity, rate=60, engine="sql")
    assert (progress.entity, progress.loaded) == (name, 2)
    assert loaded_keys(database) == ["a", "b"]
    assert reexport.status(database, name).total == 2


@pytest.mark.guarantee("FS13")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_of_nothing_is_refused(database, name):
    for entity in (make_entity(source=name), make_entity(source="victims", key=name)):
        with pytest.raises(ReexportError, match="no such table or column"):
            start(database, entity, rate=60, engine="sql")
    assert query(database, "select count(*) from jobs_lib.reexports") == [(0,)]
