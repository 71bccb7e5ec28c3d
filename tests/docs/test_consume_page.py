"""The services of docs/consume.md and their tests, in a project of their own."""

from __future__ import annotations

import inspect
import re

from jobs_lib import App
from tests.docs.test_testing import run_pytest
from tests.support.pages import ROOT, read_blocks, write_modules

PAGE = "docs/consume.md"
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
        *("board.py", "test_shop.py"),
    ]
    (table,) = read_blocks(PAGE, "sql")
    (tmp_path / "conftest.py").write_text(CONFTEST.format(table=table))
    (tmp_path / "pyproject.toml").write_text(SETTINGS)
    output = run_pytest(tmp_path, postgres_server.url)
    assert re.search(r"^=+ 2 passed in ", output, re.MULTILINE), output


def test_every_argument_of_a_consumer_and_a_read_model_stands_in_the_page():
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    for declare in (App.consumer, App.read_model):
        for name in list(inspect.signature(declare).parameters)[1:]:
            assert f"`{name}`" in text, name
