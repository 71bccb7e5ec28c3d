"""The services of docs/consume.md and their tests, in a project of their own."""

from __future__ import annotations

import inspect
import re
import shlex
from typing import Any

from alembic.migration import MigrationContext
from alembic.operations import Operations
from click.testing import CliRunner
from sqlalchemy import create_engine, event, text

from jobs_lib import App
from jobs_lib.cli.main import cli
from tests.docs.test_testing import run_pytest
from tests.support.engines import sqlalchemy_url
from tests.support.pages import ROOT, read_blocks, write_modules

PAGE = "docs/consume.md"
MADE = ["migration.py", "test_shop.py"]
CONFTEST = '''
import psycopg
import pytest


@pytest.fixture(scope="session")
def jobs_database_setup():
    def setup(url):
        with psycopg.connect(url) as conn:
            conn.execute("create table orders (id int, customer text)")
            conn.execute("""{table}""")

    return setup
'''


SETTINGS = """
[tool.pytest.ini_options]
pythonpath = ["."]
jobs_lib_app = "shop:app"
"""


def test_the_tests_of_the_page_pass(tmp_path, postgres_server):
    written = write_modules(PAGE, tmp_path)
    assert written == [
        *("shop.py", "visits.py", "events.py", "arrivals.py", "prices.py"),
        *("board.py", "orders.py", "alerts.py", *MADE),
    ]
    (table,) = read_blocks(PAGE, "sql")
    (tmp_path / "conftest.py").write_text(CONFTEST.format(table=table))
    (tmp_path / "pyproject.toml").write_text(SETTINGS)
    output = run_pytest(tmp_path, postgres_server.url)
    assert re.search(r"^=+ 2 passed in ", output, re.MULTILINE), output


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


def test_every_argument_of_a_consumer_and_a_read_model_stands_in_the_page():
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    for declare in (App.consumer, App.read_model):
        for name in list(inspect.signature(declare).parameters)[1:]:
            assert f"`{name}`" in page, name
