"""The page about logs, events and metrics does what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from jobs_lib import telemetry
from jobs_lib.telemetry import logs

PAGE = Path(__file__).parents[2] / "docs" / "observe.md"


@pytest.mark.expects("loop.failed")
def test_the_listener_of_the_page_counts_failures_until_it_stops():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    telemetry.emit("job.failed", type="charge", id=1)
    telemetry.emit("jobs.claimed", count=1)
    telemetry.emit("loop.failed", loop="relay", error=ValueError())
    names["stop"]()
    telemetry.emit("job.failed", type="charge", id=2)
    assert names["failures"] == {"job.failed charge": 1, "loop.failed ": 1}


def test_the_line_of_a_failed_job_is_as_the_page_shows_it(caplog):
    shown = re.findall(r"WARNING jobs_lib (job\.failed .*)", PAGE.read_text())
    fields = {"type": "charge", "id": 7, "group": "ada", "attempt": 2}
    told = {"error": "LookupError: no partner", "outcome": "retried", "retry_in": 3.2}
    telemetry.emit("job.failed", **fields, **told, kind="LookupError", trace="x")
    assert [record.getMessage() for record in caplog.records] == shown


def test_the_lines_of_all_pages_have_the_form_of_the_log():
    pages = "\n".join(page.read_text() for page in PAGE.parent.glob("*.md"))
    lines = re.findall(r"^.*\bjobs_lib:? [a-z]+\.[a-z_]+ \w+=.*$", pages, re.MULTILINE)
    assert len(lines) > 3
    given = {"asctime": r"[\d-]{10} [\d:]{8},\d{3}", "levelname": "(ERROR|WARNING)"}
    form = logs._TEXT % {**given, "name": "jobs_lib", "message": r"([a-z]+\.[a-z_]+) "}
    for line in lines:
        found = re.match(form, line)
        assert found is not None, line
        assert found[2] in telemetry.EVENTS
