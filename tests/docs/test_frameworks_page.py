"""Each framework of docs/frameworks.md really enqueues in its own transaction."""

from __future__ import annotations

import asyncio
import importlib
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.djangos import describe_database, on_database
from tests.support.pages import write_modules

if TYPE_CHECKING:
    from pathlib import Path

PAGE = "docs/frameworks.md"
MODULES = [
    *("shop.py", "fast.py", "alchemy.py", "pooled.py", "flasked.py"),
    *("views.py", "worker.py", "settings_tasks.py", "worker_of_tasks.py"),
]


@pytest.fixture
def load(tmp_path, database_url, admin, monkeypatch):
    """A function that imports a module of the page, in a project of its own."""
    assert write_modules(PAGE, tmp_path) == MODULES
    admin.execute("create table orders (id int); create table invoices (id int)")
    monkeypatch.setenv("JOBS_LIB_DATABASE_URL", database_url)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name.removesuffix(".py"), None)


def place_by_fastapi(load, _: str) -> None:
    from fastapi.testclient import TestClient

    with TestClient(load("fast").web) as client:
        assert client.post("/orders/7?customer=ada").status_code == 201
        assert client.get("/readyz").status_code == 200


def place_by_sqlalchemy(load, _: str) -> None:
    alchemy = load("alchemy")

    async def place() -> None:
        await alchemy.place(7, "ada")
        await alchemy.engine.dispose()

    asyncio.run(place())


def place_by_psycopg_pool(load, _: str) -> None:
    pooled = load("pooled")
    with pooled.pool:
        pooled.place(7, "ada")


def place_by_flask(load, _: str) -> None:
    client = load("flasked").web.test_client()
    assert client.post("/orders/7?customer=ada").status_code == 201
    load("shop").app.close()


def place_by_django(load, url: str) -> None:
    with on_database(url):
        from django.test import RequestFactory

        request = RequestFactory().post("/orders/7?customer=ada")
        assert load("views").place(request, 7).status_code == 201


def write_settings(url: str, folder: Path, more: str = "") -> dict[str, str]:
    """Write a project's settings; return the environment that finds them."""
    databases = {"default": describe_database(url)}
    lines = f"USE_TZ = True\nDATABASES = {databases!r}\n{more}"
    (folder / "settings.py").write_text(lines)
    return {"PYTHONPATH": f".:{folder}", "DJANGO_SETTINGS_MODULE": "settings"}


@pytest.mark.parametrize(
    "place",
    [
        place_by_fastapi,
        place_by_sqlalchemy,
        place_by_psycopg_pool,
        place_by_flask,
        place_by_django,
    ],
    ids=lambda place: place.__name__.removeprefix("place_by_"),
)
def test_an_order_and_its_job_are_one_transaction(place, load, database_url, admin):
    place(load, database_url)
    (written,) = admin.execute("select xmin::text, id from orders").fetchall()
    assert written[1] == 7
    # FastAPI's service runs in the web server, and may have ended already.
    found = admin.execute(
        "select xmin::text from jobs_lib.jobs where type = 'send_invoice'"
    ).fetchall()
    assert found == [(written[0],)] or (place is place_by_fastapi and not found)


@pytest.mark.guarantee("J38")
def test_the_jobs_run_in_the_web_server_of_fastapi(load, admin, wait_for):
    from fastapi.testclient import TestClient

    with TestClient(load("fast").web) as client:
        client.post("/orders/7?customer=ada")
        wait_for(
            lambda: admin.execute("select id from invoices").fetchall() == [(7,)],
            timeout=60,
            what="the invoice is written",
        )
    # The service has stopped with the server, and its row is deleted.
    assert admin.execute("select count(*) from jobs_lib.processes").fetchone() == (0,)


def test_the_worker_runs_jobs_with_django_set_up(
    load, tmp_path, database_url, admin, run_process, wait_for
):
    place_by_psycopg_pool(load, database_url)
    given = write_settings(database_url, tmp_path)
    run_process(*("-m", "jobs_lib.cli", "run", "worker:app"), env=given)
    wait_for(
        lambda: admin.execute("select id from invoices").fetchall() == [(7,)],
        timeout=60,
        what="the invoice is written",
    )


@pytest.mark.guarantee("J38")
def test_a_worker_runs_djangos_tasks(
    load, tmp_path, database_url, admin, run_process, wait_for
):
    tasks = (tmp_path / "settings_tasks.py").read_text()
    given = write_settings(database_url, tmp_path, tasks)
    (tmp_path / "invoices.py").write_text(_TASK)
    sent = run_process("-c", _ENQUEUE, env=given)
    assert sent.wait() == 0
    run_process(*("-m", "jobs_lib.cli", "run", "worker_of_tasks:app"), env=given)
    wait_for(
        lambda: admin.execute("select id from invoices").fetchall() == [(7,)],
        timeout=60,
        what="the invoice is written",
    )


_TASK = """
from django.db import connection

try:
    from django.tasks import task
except ImportError:
    from django_tasks import task


@task
def write_invoice(order):
    with connection.cursor() as cursor:
        cursor.execute("insert into invoices values (%s)", [order])
"""

_ENQUEUE = """
import django

django.setup()

from django.core.management import call_command
from invoices import write_invoice

call_command("check")
write_invoice.enqueue(7)
"""
