"""The page on waiting for other services does what it says."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

import pytest

from jobs_lib.consuming import gated
from jobs_lib.kafka import dependencies
from jobs_lib.kafka.dependencies import Dependency
from tests.support.apps import running
from tests.support.groups import Group
from tests.support.pages import ROOT, write_modules
from tests.support.records import produce, read_topic
from tests.support.topics import create_topic, delete_topics

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = "docs/gates.md"
MODULES = ["detection", "transfers", "notices"]


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The modules of the page, by name."""
    assert write_modules(PAGE, tmp_path) == [f"{name}.py" for name in MODULES]
    monkeypatch.syspath_prepend(tmp_path)
    yield {name: importlib.import_module(name) for name in MODULES}
    for name in MODULES:
        del sys.modules[name]


def test_the_consumers_of_the_page_wait_for_what_it_says(page):
    (detect,) = page["detection"].app.consumers
    assert detect.after == (
        Dependency("payments", "relations"),
        Dependency("payments", "profiles"),
    )
    _, audit = page["transfers"].app.consumers
    assert (audit.topic, audit.after) == (
        "transfers",
        (Dependency("payments", "profiles"),),
    )
    assert page["notices"].notify.after == detect.after


@pytest.fixture
def topics(kafka_admin) -> Iterator[None]:
    """The topics of the page."""
    names = ["payments", "transfers"]
    for name in names:
        create_topic(kafka_admin, name, 1)
    yield
    delete_topics(kafka_admin, names)


@pytest.mark.guarantee("K5")
@pytest.mark.usefixtures("topics")
def test_a_record_that_the_outbox_has_sent_waits_for_the_one_it_was_made_of(
    page, database_url, bootstrap_servers, monkeypatch, admin, wait_for
):
    monkeypatch.setenv("JOBS_LIB_DATABASE_URL", database_url)
    monkeypatch.setenv("JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS", bootstrap_servers)
    monkeypatch.setenv("JOBS_LIB_GATE_REFRESH", "0.05")
    admin.execute("create table audited (key text)")
    profiles = Group(bootstrap_servers, "profiles")
    profiles.commit("payments", 1)

    def read_audited() -> int:
        return admin.execute("select from audited").rowcount

    # The outbox keeps the order of one key.
    payments = [("a", {"amount": 1}), ("a", {"amount": 2})]
    produce(bootstrap_servers, "payments", payments)
    with running(page["transfers"].app, "consumers", "relay"):
        wait_for(lambda: read_audited() == 1, timeout=30, what="the first is in")
        wait_for(
            lambda: len(read_topic(bootstrap_servers, "transfers")) == 2,
            timeout=30,
            what="both are sent",
        )
        assert read_audited() == 1
        profiles.commit("payments", 2)
        wait_for(lambda: read_audited() == 2, timeout=30, what="both are in")
    profiles.close()


def test_the_page_names_the_limits_that_the_code_has():
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    assert dependencies.REFRESHES == 3
    assert "older than three times `JOBS_LIB_GATE_REFRESH`" in text
    assert gated._TELL_SECONDS == 5
    assert "waits for more than five seconds" in text
