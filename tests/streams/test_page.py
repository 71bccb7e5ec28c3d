"""The page on streams does what it says."""

from __future__ import annotations

import asyncio
import importlib
import sys

import pytest

from jobs_lib.operating.topics import apply_topics, plan_topics
from jobs_lib.streams import once
from tests.support.apps import QUICK, running
from tests.support.pages import ROOT, write_modules

PAGE = "docs/source-of-truth.md"
MODULES = ["tenants", "api"]
TABLES = """
create table tenants_rm
    (id text primary key, version bigint, email text, country text, password_hash text);
create table countries (code text primary key);
insert into countries values ('DE');
"""


@pytest.fixture
def page(tmp_path, database_url, own_broker, monkeypatch, admin):
    """The modules of the page, by name."""
    assert write_modules(PAGE, tmp_path) == [f"{name}.py" for name in MODULES]
    monkeypatch.setenv("JOBS_LIB_DATABASE_URL", database_url)
    monkeypatch.setenv("JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS", own_broker.bootstrap_servers)
    for name, value in QUICK.items():
        monkeypatch.setenv(f"JOBS_LIB_{name.upper()}", str(value))
    monkeypatch.syspath_prepend(tmp_path)
    admin.execute(TABLES)
    yield {name: importlib.import_module(name) for name in MODULES}
    sys.modules["tenants"].app.close()
    for name in MODULES:
        del sys.modules[name]


@pytest.mark.expects("fenced")
@pytest.mark.guarantee("T12", "T13", "T18")
def test_a_tenant_is_put_and_deleted_as_the_page_says(page, admin, wait_for):
    api, app = page["api"], page["tenants"].app
    apply_topics(app)
    wait_for(lambda: plan_topics(app) == [], timeout=30, what="Kafka names it")
    find = "select email from tenants_rm"
    with running(app, "consumers"):
        put = api.put_tenant("ada@example.org", "DE", "hash", "r1")
        assert put.content == {
            "id": put.key,
            "email": "ada@example.org",
            "country": "DE",
        }
        assert api.put_tenant("ada@example.org", "DE", "hash", "r1") == put
        wait_for(
            lambda: admin.execute(find).fetchall() == [("ada@example.org",)],
            timeout=30,
            what="the table has the tenant",
        )
        deleted = asyncio.run(api.delete_tenant(put.key, "r2"))
        assert deleted.content is None
        wait_for(
            lambda: not admin.execute(find).fetchall(),
            timeout=30,
            what="the table has no tenant",
        )


def test_the_page_names_the_time_of_a_sender():
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    assert once.SECONDS_BESIDE == 2
    assert "time is over: `JOBS_LIB_PUBLISH_TIMEOUT` and two seconds." in text
