"""The command line answers bad input with one clear line and exit code 2."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from signal import SIGTERM

import pytest

CANARY = "c4n4ry"
ROOT = Path(__file__).parents[2]


def run(*args: str, cwd, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command in an empty folder, as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "jobs_lib.cli", *args],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", "HOME": str(cwd), "PYTHONPATH": str(ROOT), **env},
    )


SERVICE = """
from jobs_lib import App, Job
app = App("shop")
@app.job()
def work(job: Job) -> None: ...
not_an_app = 7
"""
AWAY = {"JOBS_LIB_DATABASE_URL": "postgresql://127.0.0.1:1/x"}


@pytest.fixture
def folder(tmp_path):
    """A working folder with a small service in it."""
    (tmp_path / "shop.py").write_text(SERVICE)
    (tmp_path / "empty.py").write_text("from jobs_lib import App\napp = App('empty')")
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    return tmp_path


@pytest.mark.guarantee("U4")
@pytest.mark.parametrize(
    ("args", "env", "expected"),
    [
        (["migrate"], {}, "no database is set.*JOBS_LIB_DATABASE_URL.*dev up"),
        (
            ["migrate"],
            {"JOBS_LIB_DATABASE_URL": f"postgresql://me:{CANARY}@127.0.0.1:1/x"},
            r"x does not answer: Connection refused \(127.0.0.1, port 1\)\. Is it",
        ),
        (
            ["migrate"],
            {"JOBS_LIB_DATABASE_URL": f"mysql://me:{CANARY}@127.0.0.1/x"},
            "database_url.*postgresql://",
        ),
        (["run", "shop"], {}, "'shop' names no app.*module:attribute"),
        (["run", "nowhere:app"], {}, "cannot be imported.*nowhere"),
        (["run", "broken:app"], {}, "broken.py, line 1 imports 'nothing_of_this_name'"),
        (["run", "shop:missing"], {}, "missing"),
        (["run", "shop:not_an_app"], {}, "no App"),
        (["run", "shop:app"], {}, "no database is set"),
        (["run", "shop:app"], {"JOBS_LIB_WORKERS": "0"}, "workers.*JOBS_LIB_<NAME>"),
        (
            ["run", "shop:app"],
            {"JOBS_LIB_WORKER": "3"},
            "no setting JOBS_LIB_WORKER: is it JOBS_LIB_WORKERS?",
        ),
        (["run", "shop:app"], {"JOBS_LIB_KAFKA": "{"}, "kafka|JOBS_LIB_KAFKA"),
        (["owners"], {}, "no database is set"),
        (
            ["owners"],
            {"JOBS_LIB_DATABASE_URL": f"postgresql://me:{CANARY}@127.0.0.1:1/x"},
            r"x does not answer: Connection refused \(127.0.0.1, port 1\)\. Is it",
        ),
        (["topics", "apply", "shop:app"], {}, "no Kafka broker is set.*dev up"),
        (
            ["relay", "shop:app"],
            AWAY,
            r"'shop' declares no topic \(`app\.topic`\), .* to do for relay\. Is it",
        ),
        (
            ["executor", "empty:app", "--processes", "2"],
            AWAY,
            (
                r"'empty' declares no job type \(`@app\.job`\), "
                r".* import the modules that declare"
            ),
        ),
        (
            ["run", "empty:app"],
            AWAY,
            "no consumer or read model .* and no job type .* and no topic .*MODULE:APP",
        ),
        (
            ["run", "shop:app", "--without", "executor", "--without", "relay"],
            AWAY,
            "'shop' declares no consumer or read model .* to do for consumers",
        ),
    ],
)
def test_bad_input_is_one_line_with_the_way_out(folder, args, env, expected):
    result = run(*args, cwd=folder, **env)
    assert result.returncode == 2, result
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: ")
    assert CANARY not in result.stderr
    assert re.search(expected, result.stderr), result.stderr


def test_a_service_without_tables_says_what_to_run(folder, postgres_server):
    result = run(
        "run", "shop:app", cwd=folder, JOBS_LIB_DATABASE_URL=postgres_server.url
    )
    assert result.returncode == 2
    assert "run `jobs-lib migrate`" in result.stderr


def test_owners_are_listed(folder, database_url, database):
    with database.connect("test") as connection:
        connection.execute(
            "insert into jobs_lib.origins (role, origin) values ('relay', 'shard/3')"
        )
    listed = run("owners", "--json", cwd=folder, JOBS_LIB_DATABASE_URL=database_url)
    assert listed.returncode == 0, listed
    (row,) = json.loads(listed.stdout)
    assert (row["role"], row["origin"], row["pod"]) == ("relay", "shard/3", None)
    table = run("owners", cwd=folder, JOBS_LIB_DATABASE_URL=database_url)
    assert "shard/3" in table.stdout


def test_a_service_stops_on_sigterm(folder, database_url, run_process, wait_for):
    worker = run_process(
        "-m",
        "jobs_lib.cli",
        "executor",
        "shop:app",
        env={"JOBS_LIB_DATABASE_URL": database_url, "PYTHONPATH": f".:{folder}"},
    )
    wait_for(
        lambda: any("origins.taken" in line for line in worker.errors),
        timeout=60,
        what=lambda: f"it owns its origins\n{worker.output}",
    )
    worker.signal(SIGTERM)
    assert worker.wait() == 0
    assert any("origins.released" in line for line in worker.errors)
