"""A running command logs lines of the library and of the application."""

from __future__ import annotations

import json
import re
from os import pathsep
from signal import SIGTERM

import pytest

from jobs_lib import Job  # noqa: TC001  (read at the declaration)
from tests.support.apps import count, make_app
from tests.support.worker import ROOT

APP = """
import logging
from jobs_lib import App, Job

app = App("shop")
logger = logging.getLogger("shop")

@app.job(retry=1)
def work(job: Job, n: int) -> None:
    logger.info("worked on %s", n, extra={"customer": "ada"})
    logger.debug("in detail")
    if n == 2:
        raise LookupError("no partner")
"""


@pytest.fixture
def run(tmp_path, database_url, admin, connect, run_process, wait_for):
    """Run two jobs by a command, one of which fails; return its log."""
    (tmp_path / "shop_of_logs.py").write_text(APP)
    app = make_app(database_url)

    @app.job()
    def work(job: Job, n: int) -> None: ...

    def run(*options: str, part: str = "executor", **env: str) -> list[str]:
        with connect() as connection:
            work.enqueue_many(connection, [{"n": 1}, {"n": 2}])
        env |= {
            "JOBS_LIB_DATABASE_URL": database_url,
            "PYTHONPATH": f"{tmp_path}{pathsep}{ROOT}",
        }
        worker = run_process(
            "-m", "jobs_lib.cli", *options, part, "shop_of_logs:app", env=env
        )
        wait_for(
            lambda: count(admin, "jobs") == 0,
            timeout=60,
            what=lambda: worker.output,
        )
        worker.signal(SIGTERM)
        worker.wait()
        return worker.errors

    return run


def test_the_applications_lines_stand_beside_those_of_the_library(run):
    errors = run()
    assert any(line.endswith(" INFO shop worked on 1") for line in errors)
    (failed,) = [line for line in errors if "job.failed" in line]
    assert " WARNING jobs_lib job.failed type=work id=" in failed
    assert "    LookupError: no partner" in errors
    assert not [line for line in errors if "in detail" in line or "job.ran" in line]


@pytest.mark.guarantee("O5")
def test_json_lines_hold_the_fields_of_text_lines(run):
    lines = [json.loads(line) for line in run(JOBS_LIB_LOG_FORMAT="json")]
    (worked,) = [line for line in lines if line.get("message") == "worked on 2"]
    assert (worked["logger"], worked["customer"]) == ("shop", "ada")
    (failed,) = [line for line in lines if line.get("event") == "job.failed"]
    assert failed["error"] == "LookupError: no partner"
    assert "raise LookupError" in failed["trace"]


def test_a_verbose_command_logs_each_start_and_end(run):
    errors = run("--verbose")
    ends = [line for line in errors if " DEBUG jobs_lib job.ran " in line]
    assert sum(" job.started " in line for line in errors) == len(ends) == 2
    # A busy machine may take seconds for one.
    assert all(re.search(r" seconds=\d+\.\d", line) for line in ends)


def test_the_log_level_applies_to_all_loggers(run):
    assert any("in detail" in line for line in run("--log-level", "debug"))
    errors = run("--log-level", "error")
    assert not [line for line in errors if "worked on" in line or "job.failed" in line]
