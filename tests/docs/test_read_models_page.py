"""The code of docs/read-models.md runs, and makes what the page says."""

from __future__ import annotations

import importlib
import inspect
import shlex
import sys
from typing import Any

import psycopg
from alembic.migration import MigrationContext
from alembic.operations import Operations
from click.testing import CliRunner
from sqlalchemy import create_engine, event, text

from jobs_lib import App
from jobs_lib.cli.main import cli
from tests.support.engines import sqlalchemy_url
from tests.support.pages import ROOT, read_blocks, write_modules

PAGE = "docs/read-models.md"
MODULES = ["board", "orders", "alerts", "migration", "test_board"]


def test_the_modules_of_the_page_are_declared_and_their_test_passes(
    tmp_path, monkeypatch
):
    assert write_modules(PAGE, tmp_path) == [f"{name}.py" for name in MODULES]
    monkeypatch.syspath_prepend(tmp_path)
    board, _, _, _, test_board = map(importlib.import_module, MODULES)
    try:
        test_board.test_the_row_of_an_aircraft()
        groups = {one.group for one in board.app.consumers}
        assert groups == {"board", "alerts"}
    finally:
        board.app.close()
        for name in MODULES:
            del sys.modules[name]


def test_the_table_of_the_page_has_the_columns_of_the_migration(empty_url):
    (table,) = read_blocks(PAGE, "sql")
    with psycopg.connect(empty_url) as conn:
        conn.execute(table)
        columns = conn.execute("select * from aircraft_rm").description
    assert [one.name for one in columns or ()] == [
        *("tail", "version", "airport", "seats")
    ]


def test_the_migration_and_the_command_of_the_page_make_the_same_table(empty_url):
    (migration,) = (
        block for block in read_blocks(PAGE, "python") if "create_read_model" in block
    )
    (command,) = (
        b for b in read_blocks(PAGE, "sh") if "jobs-lib readmodel create" in b
    )
    ran: list[str] = []
    engine = create_engine(sqlalchemy_url(empty_url))
    roles = ("board_consumer", "board_web")
    with engine.begin() as connection:
        event.listen(
            connection, "before_cursor_execute", lambda *given: ran.append(given[2])
        )
        for role in roles:
            connection.execute(text(f"create role {role}"))
        ran.clear()
        made: dict[str, Any] = {}
        exec(migration, made)
        with Operations.context(MigrationContext.configure(connection)):
            made["upgrade"]()
        statements = "".join(f"{statement};\n" for statement in ran)
        writes = "select has_table_privilege(:role, 'aircraft_rm', 'insert')"
        found = [
            connection.execute(text(writes), {"role": role}).scalar() for role in roles
        ]
        assert found == [True, False]
        connection.rollback()  # the roles would outlive the database
    engine.dispose()
    words = shlex.split(command.replace("\\\n", ""))
    result = CliRunner().invoke(cli, words[1:])
    assert result.output == f"begin;\n{statements}commit;\n"


def test_every_argument_of_a_read_model_stands_in_the_page():
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    for name in list(inspect.signature(App.read_model).parameters)[1:]:
        assert f"`{name}`" in page, name
