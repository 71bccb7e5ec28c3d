"""The page on processing does what it says."""

from __future__ import annotations

import importlib
import sys
from collections import Counter

import pytest

from jobs_lib.operating.topics import apply_topics, plan_topics
from tests.support.apps import QUICK, count, running
from tests.support.pages import write_modules
from tests.support.provider import providing
from tests.support.records import produce
from tests.support.topics import create_topic

PAGE = "docs/processing.md"
MODULES = ["plans", "signup", "totals", "transfers"]
TABLES = """
create table decided (call text primary key, is_paid bool);
create table tenants (id text primary key, plan text);
insert into tenants values ('t1', 'free');
create table contexts (id text primary key, amount int);
create table ledger (id text primary key, amount int);
"""


@pytest.fixture
def page(tmp_path, database_url, own_broker, monkeypatch, admin):
    """The modules of the page, by name."""
    assert sorted(write_modules(PAGE, tmp_path)) == [f"{name}.py" for name in MODULES]
    monkeypatch.setenv("JOBS_LIB_DATABASE_URL", database_url)
    monkeypatch.setenv("JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS", own_broker.bootstrap_servers)
    for name, value in QUICK.items():
        monkeypatch.setenv(f"JOBS_LIB_{name.upper()}", str(value))
    monkeypatch.syspath_prepend(tmp_path)
    admin.execute(TABLES)
    yield {name: importlib.import_module(name) for name in MODULES}
    for name in MODULES:
        sys.modules.pop(name).app.close()


def await_topics(app, wait_for) -> None:
    """Wait until the broker names the topics that were just created."""
    wait_for(lambda: plan_topics(app) == [], timeout=30, what="Kafka names them")


@pytest.mark.expects("fenced")
@pytest.mark.guarantee("S3", "S4", "T21")
def test_jobs_publish_as_the_page_says(page, admin, wait_for, read_log, monkeypatch):
    signup, plans = page["signup"], page["plans"]
    for app in (signup.app, plans.app):
        apply_topics(app)
        await_topics(app, wait_for)
    with providing() as provider, running(signup.app, "consumers", "executor"):
        address = "http://127.0.0.1:8099"
        request = signup.urllib.request.Request
        monkeypatch.setattr(
            signup.urllib.request,
            "Request",
            lambda url, **options: request(
                url.replace(address, provider.address), **options
            ),
        )
        signup.pending.publish("t1", {}, request="r1")
        wait_for(lambda: read_log("tenant-created"), timeout=30, what="it is created")
        assert provider.ledger == ["t1"]
        wait_for(lambda: not count(admin, "jobs"), timeout=60, what="the jobs are done")
    with running(plans.app, "executor"):
        for plan in ("paid", "paid", "free"):
            plans.change_plan.enqueue(plans.app, tenant="t1", plan=plan)
        wait_for(lambda: not count(admin, "jobs"), timeout=60, what="the jobs are done")
    assert [one.json["plan"] for one in read_log("plans")] == ["paid", "free"]


@pytest.mark.expects("fenced")
@pytest.mark.guarantee("T10", "T19")
def test_records_are_processed_as_the_page_says(
    page, own_broker, admin, wait_for, read_log
):
    transfers, totals = page["transfers"], page["totals"]
    apply_topics(totals.app)
    await_topics(totals.app, wait_for)
    for name in ("transfers", "orders"):
        create_topic(own_broker.admin, name, 1)
    servers = own_broker.bootstrap_servers
    parts = [("x", {"part": 1, "amount": 7}), ("x", {"part": 2})]
    produce(servers, "transfers", parts)
    produce(servers, "orders", [("o1", {"prices": [1, 2]}), ("o2", {"prices": [3]})])
    with running(transfers.app, "consumers"):
        find = "select id, amount from ledger"
        wait_for(
            lambda: admin.execute(find).fetchall() == [("x", 7)],
            timeout=30,
            what="both parts are taken",
        )
    with running(totals.app, "consumers"):
        wait_for(
            lambda: len(read_log("order-totals")) == 2, timeout=30, what="all are made"
        )
    made = Counter((one.key, one.json["total"]) for one in read_log("order-totals"))
    assert made == {("o1", 3): 1, ("o2", 3): 1}
