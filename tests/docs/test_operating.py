"""The commands of docs/operating.md run, and print what the page says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from click.testing import CliRunner

from jobs_lib.cli.main import cli
from jobs_lib.operating.checks import CHECKS
from jobs_lib.operating.listing import STATES
from jobs_lib.settings import default_settings
from tests.operating.helpers import add_discarded, add_job

PAGE = (Path(__file__).parents[2] / "docs/operating.md").read_text(encoding="utf-8")


def test_every_command_of_the_page_runs_and_says_what_the_page_shows(
    database_url, connect, monkeypatch
):
    admin = connect(autocommit=True)
    failed = '[{"attempt": 3, "at": "2026-01-01", "error": "HTTP 503"}]'
    backoff = {"state": "scheduled", "run_at": "2999-01-01", "attempt": 3}
    add_job(admin, group="customer-12", errors=failed, **backoff)
    add_job(admin, group="customer-12")
    for _ in range(2):
        add_discarded(admin, type="send_invoice", error="HTTP 503")
    add_job(admin)
    add_job(admin)
    admin.execute("create role orders_app")
    monkeypatch.setenv("JOBS_LIB_DATABASE_URL", database_url)
    default_settings.cache_clear()
    said = {}
    try:
        for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL):
            for line in block.splitlines():
                words = shlex.split(line, comments=True)
                assert words[0] == "jobs-lib"
                result = CliRunner().invoke(cli, words[1:])
                # A check may end with 1: no process owns the origins of these jobs.
                expected = {0, 1} if words[1] == "check" else {0}
                assert result.exit_code in expected, (line, result.output)
                assert result.exception is None or words[1] == "check", line
                said[" ".join(words[1:])] = result.stdout
    finally:
        default_settings.cache_clear()
        admin.execute("drop role orders_app")
    (shown,) = re.findall(r"explain 2\n```\n\n```\n(.*?)```", PAGE, re.DOTALL)
    assert shapes(said["jobs explain 2"]) == shapes(shown)
    assert said["jobs retry 3"] == "retried: 1\n"
    assert "cancelled" in said["jobs cancel 5 6"]
    assert "customer-12" in said["jobs pauses"]
    for name in CHECKS:
        assert name in said["check"]


def test_the_tables_of_the_page_are_complete():
    rows = re.findall(r"^\| (.*?) \|", PAGE, re.MULTILINE)
    states = {state for row in rows for state in re.findall("`([a-z]+)`", row)}
    assert states == set(STATES)
    assert {"schema", *CHECKS} <= set(rows)


def shapes(text: str) -> list[str]:
    """The lines without the seconds, which change."""
    return [re.sub(r"in [\d,]+ s", "in … s", line) for line in text.splitlines()]
