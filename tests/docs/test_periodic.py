"""The code of docs/periodic.md runs, and does what the page says."""

from __future__ import annotations

import importlib
import sys
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from jobs_lib.service.scheduler import Scheduler
from jobs_lib.settings import default_settings
from tests.support.apps import HOME, executing
from tests.support.clock import FakeClock
from tests.support.pages import write_modules

ZURICH = ZoneInfo("Europe/Zurich")


@pytest.fixture
def reports(tmp_path, monkeypatch, database_url):
    """The module of the page."""
    assert write_modules("docs/periodic.md", tmp_path) == ["reports.py"]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("JOBS_LIB_DATABASE_URL", database_url)
    default_settings.cache_clear()
    module: Any = importlib.import_module("reports")
    yield module
    del sys.modules["reports"]
    default_settings.cache_clear()


def test_the_page_says_what_happens(reports, connect, wait_for, capsys):
    clock = FakeClock(datetime(2025, 6, 2, 3, 29, 50, tzinfo=ZURICH))
    app = reports.app
    scheduler = Scheduler(app.database(), app.schedules.values(), clock=clock)
    scheduler.start()
    clock.settle(1)
    clock.set(datetime(2025, 6, 2, 3, 30, 0, tzinfo=ZURICH))
    clock.settle(1)
    scheduler.stop()
    admin = connect(autocommit=True)
    with executing(app, HOME):
        wait_for(
            lambda: admin.execute("select from jobs_lib.history").rowcount == 3,
            what="all three ran",
        )
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "closing the day before 02 June 2025, 03:30",
        "refreshing eu",
        "refreshing us",
    ]
