"""No command line holds a password, since every user of the machine can read it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from signal import SIGTERM

import click
import pytest
from psycopg.conninfo import conninfo_to_dict

from jobs_lib.cli.main import cli
from jobs_lib.postgres.database import Database
from jobs_lib.settings import load_settings
from tests.security.helpers import CANARY, PASSWORDS

SECRET = re.compile("url|dsn|password|secret|credential|conn", re.IGNORECASE)


def parameters(command: click.Command) -> set[str]:
    """The names of all options and arguments of a command and its subcommands."""
    found = {
        word for one in command.params for word in (one.name or "", *one.opts) if word
    }
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            found |= parameters(inner)
    return found


def read_line(pid: int) -> str:
    """Return what `ps` shows of a process; empty if it has ended."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()


def descend(pid: int) -> set[int]:
    """A process and all processes that it has started."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name may hold any text; state and parent follow it.
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    found = {pid}
    while more := {one for one, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def test_no_command_takes_a_password():
    names = parameters(cli)
    assert {"--home", "app", "--processes"} <= names
    assert not {name for name in names if SECRET.search(name)}


@pytest.mark.guarantee("FS3")
def test_the_processes_of_an_executor_are_given_no_password(
    run_process, secret_url, wait_for
):
    process = run_process(
        *("-m", "jobs_lib.cli", "executor", "tests.security.service:plain"),
        *("--processes", "2"),
        env={"JOBS_LIB_DATABASE_URL": secret_url, "JOBS_LIB_DIRECT_URL": secret_url},
    )

    def lines() -> list[str]:
        return [line for one in descend(process.pid) if (line := read_line(one))]

    def executors() -> list[str]:
        return [line for line in lines() if line.startswith(sys.executable)]

    wait_for(
        lambda: sum("process.started" in line for line in process.errors) == 2,
        timeout=60,
        what=lambda: f"both have started: {process.output}",
    )
    assert len(executors()) == 3
    assert not [line for line in lines() if CANARY in line]
    process.signal(SIGTERM)
    assert process.wait(timeout=60) == 0
    assert CANARY not in process.output


@pytest.mark.guarantee("FS3")
@pytest.mark.parametrize("way", ["PGPASSWORD", "PGPASSFILE", "PGSERVICEFILE"])
def test_the_password_may_stand_where_libpq_looks(
    way, secret_url, monkeypatch, tmp_path
):
    parts = conninfo_to_dict(secret_url)
    place = "{user}@{host}:{port}/{dbname}".format(**parts)
    if way == "PGPASSWORD":
        monkeypatch.setenv(way, CANARY)
    else:
        file = tmp_path / "secret"
        file.touch(mode=0o600)
        if way == "PGPASSFILE":
            file.write_text(f"*:*:*:*:{CANARY}\n")
        else:
            place = "/?service=orders"
            lines = "\n".join(f"{key}={value}" for key, value in parts.items())
            file.write_text(f"[orders]\n{lines}\n")
        monkeypatch.setenv(way, str(file))
    settings = load_settings(database_url=f"postgresql://{place}")
    with Database(settings.database_url).connect("test") as connection:
        row = connection.execute("select current_user").fetchone()
    assert row == ("keeper",)


def test_servers_are_given_no_password(secured, postgres_server):
    broker = read_line(secured.pid)
    assert "kafka.Kafka" in broker
    assert not [word for word in PASSWORDS.values() if word in broker]
    assert "postgres" in read_line(postgres_server.pid)


@pytest.mark.slow
@pytest.mark.spark
def test_spark_is_given_no_password(run_process, secret_url, admin, wait_for):
    admin.execute("create table things (id text primary key)")
    admin.execute("insert into things select 'k' || n from generate_series(1, 2000) n")
    process = run_process(
        *("-m", "jobs_lib.cli", "reexport", "start", "things", "--rate", "600"),
        *("--app", "tests.security.service:app", "--engine", "spark"),
        *("--ranges", "4"),
        env={"JOBS_LIB_DATABASE_URL": secret_url},
    )
    seen: set[str] = set()

    def ended() -> bool:
        seen.update(read_line(one) for one in descend(process.pid))
        return not process.running

    wait_for(ended, timeout=150, what=lambda: f"it has loaded: {process.output}")
    assert process.wait() == 0, process.output
    assert any("SparkSubmit" in line for line in seen), seen
    assert any("pyspark.daemon" in line for line in seen), seen
    assert not [line for line in seen if CANARY in line]
    assert CANARY not in process.output
