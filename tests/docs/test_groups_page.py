"""The page on groups does what it says."""

from __future__ import annotations

import importlib
import sys

import pytest

from tests.support.apps import HOME, count, executing
from tests.support.pages import write_modules

MODULES = ["shop", "books", "mail"]


@pytest.fixture
def page(tmp_path, database_url, monkeypatch):
    """The modules of the page, by name."""
    assert write_modules("docs/groups.md", tmp_path) == [f"{m}.py" for m in MODULES]
    monkeypatch.setenv("JOBS_LIB_DATABASE_URL", database_url)
    monkeypatch.setenv("JOBS_LIB_POLL_INTERVAL", "0.01")
    monkeypatch.syspath_prepend(tmp_path)
    yield {name: importlib.import_module(name) for name in MODULES}
    for name in MODULES:
        del sys.modules[name]


def test_types_share_a_line_unless_a_prefix_keeps_them_apart(
    page, admin, connect, wait_for
):
    shop, mail = page["shop"], page["mail"]
    with connect() as connection:
        shop.charge.enqueue(connection, customer="ada", order=7)
        shop.send_receipt.enqueue(connection, customer="ada", order=7)
        mail.send_news.enqueue(connection, customer="ada", text="hello")
    lines = admin.execute('select type, "group" from jobs_lib.jobs order by id')
    assert lines.fetchall() == [
        ("charge", "ada"),
        ("send_receipt", "ada"),
        ("send_news", "news/ada"),
    ]
    with executing(shop.app, HOME):
        wait_for(lambda: count(admin, "jobs") == 0, what="all of them run")


def test_a_function_of_the_payload_chooses_the_group(page, admin, connect, wait_for):
    shop, books = page["shop"], page["books"]
    with connect() as connection:
        books.book.enqueue(connection, account=7)
        books.book.enqueue(connection, account=8, test=True)
    with executing(shop.app, HOME):
        wait_for(lambda: count(admin, "jobs") == 0, what="both of them run")
    assert sorted(books.booked) == ["None 8", "account 7 7"]
