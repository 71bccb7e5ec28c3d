"""An unavailable database is reported with the whole reason and a way out."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from jobs_lib.callers import pools as transaction
from jobs_lib.cli.main import cli
from jobs_lib.errors import UnavailableError
from jobs_lib.postgres.database import Database
from jobs_lib.postgres.migrate import migrate
from tests.support.apps import make_app

if TYPE_CHECKING:
    from collections.abc import Callable

AWAY = "postgresql://me:hunter2@127.0.0.1:1,127.0.0.1:2/orders"
"""Two addresses without a server."""


def told_by(way: Callable[[], object]) -> str:
    """Return the error of a call that opens a database."""
    with pytest.raises(UnavailableError) as told:
        way()
    assert "\n" not in str(told.value)
    assert "hunter2" not in str(told.value)
    return str(told.value)


def begin(url: str) -> None:
    """Begin a transaction, as an application does."""
    app = make_app(url)
    try:
        with app.transaction():
            pass
    finally:
        app.close()


def begin_async(url: str) -> None:
    """Do the same on an event loop."""

    async def run() -> None:
        app = make_app(url)
        try:
            async with app.transaction():
                pass
        finally:
            await app.aclose()

    asyncio.run(run())


def test_the_reason_comes_first_and_the_hint_below_it_is_left_out():
    url = "postgresql://me:hunter2@127.0.0.1:1/orders"
    expected = (
        "the database at postgresql://me@127.0.0.1:1/orders does not answer: "
        "Connection refused (127.0.0.1, port 1). Is it running, and is "
        "JOBS_LIB_DATABASE_URL right?"
    )
    assert told_by(lambda: Database(url).connect("test")) == expected
    assert told_by(lambda: migrate(url)) == expected


@pytest.mark.parametrize(
    "way",
    [lambda url: Database(url).connect("test"), migrate, begin, begin_async],
    ids=["connect", "migrate", "transaction", "async transaction"],
)
def test_the_error_names_each_address_that_refused(way, monkeypatch):
    monkeypatch.setattr(transaction, "_WAIT", 2.0)
    told = told_by(lambda: way(AWAY))
    assert "Connection refused (127.0.0.1, port 1); Connection refused" in told
    assert "Connection refused (127.0.0.1, port 2)" in told
    assert "JOBS_LIB_DATABASE_URL" in told


def test_the_migrate_command_names_each_address_that_refused(monkeypatch):
    monkeypatch.setenv("JOBS_LIB_DATABASE_URL", AWAY)
    failure = CliRunner().invoke(cli, ["migrate"]).exception
    assert isinstance(failure, UnavailableError)
    assert "Connection refused (127.0.0.1, port 2)" in str(failure)


def test_a_pool_with_all_connections_in_use_names_only_that_reason(
    database_url, monkeypatch
):
    monkeypatch.setattr(transaction, "_WAIT", 0.2)
    app = make_app(database_url, transactions=1)
    with app.transaction():
        told = told_by(app.transaction().__enter__)
    app.close()
    assert "are 1 transactions at once enough (JOBS_LIB_TRANSACTIONS)?" in told
    assert "Is it running" not in told


def test_the_error_of_the_driver_is_not_kept():
    with pytest.raises(UnavailableError) as told:
        Database("postgresql://me@127.0.0.1:1/orders").connect("test")
    error = told.value.__context__
    assert error is not None
    kept = weakref.ref(error)
    del told, error
    gc.collect()
    assert kept() is None
