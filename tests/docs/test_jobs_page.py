"""The pages on handlers and on workers do what they say."""

from __future__ import annotations

import importlib
import sys

import pytest

from tests.support.apps import HOME, QUICK, count, executing
from tests.support.pages import write_modules

MODULES = [
    "shop",
    "mail",
    "partner",
    "publish",
    "report",
    "search",
    "tenants",
    "history",
]
WORKERS_MODULES = ["sms", "sync", "reports"]


@pytest.fixture
def page(tmp_path, database_url, monkeypatch):
    """The modules of the pages, by name."""
    assert write_modules("docs/jobs.md", tmp_path) == [f"{m}.py" for m in MODULES]
    written = write_modules("docs/workers.md", tmp_path)
    assert written == [f"{m}.py" for m in WORKERS_MODULES]
    monkeypatch.setenv("JOBS_LIB_DATABASE_URL", database_url)
    monkeypatch.setenv("JOBS_LIB_POLL_INTERVAL", str(QUICK["poll_interval"]))
    monkeypatch.syspath_prepend(tmp_path)
    names = [*MODULES, *WORKERS_MODULES]
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        del sys.modules[name]


def test_each_answer_of_the_partner_has_the_outcome_of_the_page(
    page, connect, wait_for
):
    admin = connect(autocommit=True)
    answers = ("not yet", "slow down", "busy", "unknown", "nonsense", "well")
    with connect() as connection:
        for answer in answers:
            page["partner"].notify_partner.enqueue(
                connection, customer=answer, answer=answer
            )
    attempted = "select count(*) from jobs_lib.jobs where state = 'scheduled'"
    with executing(page["shop"].app, HOME):
        wait_for(
            lambda: (
                admin.execute("select count(*) from jobs_lib.history").fetchone()
                == (3,)
                and admin.execute(attempted).fetchone() == (3,)
            ),
            what="three have ended, and three wait",
        )
    waiting = admin.execute(
        "select payload->>'answer', attempt, run_at > now() + interval '100 s'"
        " from jobs_lib.jobs where type = 'notify_partner' order by 1"
    ).fetchall()
    assert waiting[0][:2] == ("busy", 1)
    assert waiting[1:] == [("not yet", 0, True), ("slow down", 1, True)]
    given_up = admin.execute("select payload->>'answer' from jobs_lib.discarded")
    assert given_up.fetchall() == [("nonsense",)]
    ends = admin.execute("select outcome from jobs_lib.history order by 1").fetchall()
    assert ends == [("cancelled",), ("completed",), ("discarded",)]
    # The middleware ran around each run that happened.
    assert [*map(str, page["tenants"].tenants)] == ["None"] * len(answers)


@pytest.fixture
def run(page, connect, wait_for):
    """A function that runs the jobs until only this many are left, which have failed.

    It returns how many jobs of each type have ended with each outcome, and the tenants
    that the middleware saw: one around each run.
    """
    admin = connect(autocommit=True)

    def run(left: int = 0) -> tuple[list[tuple[str, str, int]], list[str]]:
        with executing(page["shop"].app, HOME):
            wait_for(
                lambda: (
                    count(admin, "jobs") == left
                    and not admin.execute(
                        "select from jobs_lib.jobs where attempt = 0"
                    ).rowcount
                ),
                what="only what waits for another attempt is left",
            )
        ends = admin.execute(
            "select type, outcome, count(*)::int from jobs_lib.history"
            " group by 1, 2 order by 1, 2"
        ).fetchall()
        return ends, sorted(map(str, page["tenants"].tenants))

    return run


def test_plain_and_async_handlers_have_their_effects_once(page, connect, run):
    with connect() as connection:
        connection.execute("create table charges (customer text, n int)")
        connection.execute("create table mails (address text)")
        tenant = page["shop"].charge.options(headers={"tenant": "acme"})
        tenant.enqueue(connection, customer="ada", order=7)
        page["mail"].send_mail.enqueue(connection, address="ada@example.org")
    assert run() == (
        [("charge", "completed", 1), ("send_mail", "completed", 1)],
        ["None", "acme"],
    )
    with connect() as connection:
        charges = connection.execute("select * from charges").fetchall()
        mails = connection.execute("select * from mails").fetchall()
    assert charges == [("ada", 7)]
    assert mails == [("ada@example.org",)]
    assert list(page["mail"].sent.values()) == ["ada@example.org"]


def test_only_the_last_state_is_published(page, connect, run):
    with connect() as connection:
        for state in ("a", "b", "c"):
            page["publish"].publish.enqueue(connection, entity="e", state=state)
    ends = [("publish", "completed", 1), ("publish", "superseded", 2)]
    assert run() == (ends, ["None"])
    assert page["publish"].published == ["c"]


def test_jobs_with_limits_and_with_workers_of_their_own_run(page, connect, run):
    with connect() as connection:
        page["report"].write_report.enqueue(connection, count=3)
        page["sms"].send_text.enqueue(connection, number="555-0100")
        page["sync"].sync.enqueue(connection, tenant="acme")
        page["reports"].write_daily.enqueue(connection, day="2026-11-24")
        page["reports"].write_yearly.enqueue(connection, year=2026)
    types = ["send_text", "sync", "write_daily", "write_report", "write_yearly"]
    assert run() == ([(one, "completed", 1) for one in types], ["None"] * 5)
    assert page["report"].pages == [0, 1, 2]
    assert page["sms"].texts == ["555-0100"]
    assert page["sync"].synced == ["acme"]
    assert sorted(page["reports"].written) == ["2026", "2026-11-24"]


def test_an_item_of_a_batch_fails_alone(page, connect, run):
    with connect() as connection:
        page["search"].index.enqueue(connection, "ada")
        page["search"].index.enqueue(connection, "")
    ends, tenants = run(left=1)
    assert ends == [("index", "completed", 1)]
    # The middleware ran around each job of the call; the failed one may have run again.
    assert len(tenants) >= 2
    assert set(tenants) == {"None"}


def test_the_history_has_each_job_for_as_long_as_its_type_says(page, connect, run):
    with connect() as connection:
        page["history"].settle.enqueue(connection, order=7)
        page["history"].ping.enqueue(connection)
    assert run() == ([("settle", "completed", 1)], ["None"] * 2)
    with connect() as connection:
        (days,) = connection.execute(
            "select keep_until - finished_at::date from jobs_lib.history"
        ).fetchone()
    assert days >= 29
