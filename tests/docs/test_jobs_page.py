"""The page on handlers does what it says."""

from __future__ import annotations

import importlib
import sys

import pytest

from tests.support.apps import HOME, QUICK, executing
from tests.support.pages import write_modules

MODULES = [
    "shop",
    "mail",
    "partner",
    "books",
    "publish",
    "report",
    "sms",
    "sync",
    "reports",
    "search",
    "tenants",
    "history",
]


@pytest.fixture
def page(tmp_path, database_url, monkeypatch):
    """The modules of the page, by name."""
    assert write_modules("docs/jobs.md", tmp_path) == [f"{m}.py" for m in MODULES]
    monkeypatch.setenv("JOBS_LIB_DATABASE_URL", database_url)
    monkeypatch.setenv("JOBS_LIB_POLL_INTERVAL", str(QUICK["poll_interval"]))
    monkeypatch.syspath_prepend(tmp_path)
    yield {name: importlib.import_module(name) for name in MODULES}
    for name in MODULES:
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


def test_the_handlers_of_the_page_have_the_outcomes_it_promises(
    page, connect, wait_for
):
    admin = connect(autocommit=True)
    admin.execute("create table charges (customer text, n int)")
    admin.execute("create table mails (address text)")
    app = page["shop"].app

    with connect() as connection:
        tenant = page["shop"].charge.options(headers={"tenant": "acme"})
        tenant.enqueue(connection, customer="ada", order=7)
        page["mail"].send_mail.enqueue(connection, address="ada@example.org")
        page["books"].book.enqueue(connection, account=7)
        page["books"].book.enqueue(connection, account=8, test=True)
        for state in ("a", "b", "c"):
            page["publish"].publish.enqueue(connection, entity="e", state=state)
        page["report"].write_report.enqueue(connection, count=3)
        page["sms"].send_text.enqueue(connection, number="555-0100")
        page["sync"].sync.enqueue(connection, tenant="acme")
        page["reports"].write_daily.enqueue(connection, day="2026-11-24")
        page["reports"].write_yearly.enqueue(connection, year=2026)
        page["search"].index.enqueue(connection, "ada")
        page["search"].index.enqueue(connection, "")
        page["history"].settle.enqueue(connection, order=7)
        page["history"].ping.enqueue(connection)
    with executing(app, HOME):
        wait_for(
            lambda: (
                admin.execute("select count(*) from jobs_lib.jobs").fetchone() == (1,)
                and page["publish"].published
            ),
            what="only what waits for its time is left",
        )
    ends = admin.execute(
        "select type, outcome, count(*)::int, max(keep_until) - min(finished_at)::date"
        " from jobs_lib.history group by 1, 2 order by 1, 2"
    ).fetchall()
    assert [end[:3] for end in ends] == [
        ("book", "completed", 2),
        ("charge", "completed", 1),
        ("index", "completed", 1),
        ("publish", "completed", 1),
        ("publish", "superseded", 2),
        ("send_mail", "completed", 1),
        ("send_text", "completed", 1),
        ("settle", "completed", 1),
        ("sync", "completed", 1),
        ("write_daily", "completed", 1),
        ("write_report", "completed", 1),
        ("write_yearly", "completed", 1),
    ]
    assert {name: days for name, _, _, days in ends}["settle"] >= 29
    assert admin.execute("select * from charges").fetchall() == [("ada", 7)]
    assert admin.execute("select * from mails").fetchall() == [("ada@example.org",)]
    assert list(page["mail"].sent.values()) == ["ada@example.org"]
    assert page["publish"].published == ["c"]
    assert sorted(page["books"].booked) == ["None 8", "account 7 7"]
    assert page["sms"].texts == ["555-0100"]
    assert page["report"].pages == [0, 1, 2]
    assert page["sync"].synced == ["acme"]
    assert sorted(page["reports"].written) == ["2026", "2026-11-24"]
    # The middleware ran around each run that happened: all but the superseded jobs.
    assert sorted(map(str, page["tenants"].tenants)) == ["None"] * 11 + ["acme"]
