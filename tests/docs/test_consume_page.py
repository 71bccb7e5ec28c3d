"""The services of docs/consume.md and their tests, in a project of their own."""

from __future__ import annotations

import inspect
import re
from typing import Any

from jobs_lib import App, Record
from jobs_lib.backoff import RECONNECT
from tests.docs.test_testing import run_pytest
from tests.support.pages import ROOT, read_blocks, write_modules

PAGE = "docs/consume.md"
CONFTEST = """
import psycopg
import pytest


@pytest.fixture(scope="session")
def jobs_database_setup():
    def setup(url):
        with psycopg.connect(url) as conn:
            conn.execute("create table orders (id int, customer text)")

    return setup
"""


SETTINGS = """
[tool.pytest.ini_options]
pythonpath = ["."]
jobs_lib_app = "shop:app"
"""


def test_the_tests_of_the_page_pass(tmp_path, postgres_server):
    assert write_modules(PAGE, tmp_path) == [
        *("shop.py", "visits.py", "events.py", "arrivals.py", "prices.py"),
        "test_shop.py",
    ]
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pyproject.toml").write_text(SETTINGS)
    output = run_pytest(tmp_path, postgres_server.url)
    assert re.search(r"^=+ 1 passed in ", output, re.MULTILINE), output


def test_the_statements_of_the_page_set_offsets(database, admin):
    on, back, anew = read_blocks(PAGE, "sql")
    admin.execute(
        "insert into jobs_lib.offsets (consumer_group, topic, partition, next_offset,"
        " topic_id, failed_offset, failure) select 'shop', 'checkouts', n, 4711,"
        " gen_random_uuid(), 4711, 'why' from generate_series(0, 3) n"
    )

    def set_offset(statement: str) -> list[tuple[Any, ...]]:
        return admin.execute(
            statement.replace(";", "") + " returning partition, next_offset,"
            " failed_offset is null, topic_id is null"
        ).fetchall()

    assert set_offset(on) == [(3, 4712, False, False)]
    assert set_offset(back) == [(3, 4712, True, False)]
    assert sorted(set_offset(anew)) == [
        *((n, 0, False, True) for n in range(3)),
        (3, 0, True, True),
    ]


def test_the_page_names_the_pauses_that_the_code_has():
    text = " ".join((ROOT / PAGE).read_text(encoding="utf-8").split())
    assert (RECONNECT.bound(1), RECONNECT.cap) == (0.1, 5)
    assert "at most 0.1 seconds at first, and at most five seconds in the end" in text


def test_every_argument_of_a_consumer_stands_in_the_page():
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    for name in list(inspect.signature(App.consumer).parameters)[1:]:
        assert f"`{name}`" in page, name


def test_every_part_of_a_record_stands_in_the_page():
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    parts = (name for name in vars(Record) if not name.startswith("_"))
    for name in set(parts) - {"ensure_may_publish"}:
        assert f"`{name}`" in page, name
