"""What an operator can mend is one line of a command, and its exit code is 2."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import psycopg
import pytest
from sqlalchemy.engine import make_url

from jobs_lib import operating
from jobs_lib.postgres.migrate import MIGRATE_LOCK
from jobs_lib.settings import default_settings
from tests.support.commands import fail_command
from tests.support.roles import as_role

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[..., str]

TOO_LARGE = str(2**63)


@pytest.fixture
def run(jobs_database_url, monkeypatch, capsys, tmp_path) -> Run:
    """`run("jobs", "list")` returns the one line with which the command fails."""
    monkeypatch.setenv("JOBS_LIB_DATABASE_URL", jobs_database_url)
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        output, told = fail_command(monkeypatch, capsys, *words)
        assert not output
        assert "Traceback" not in told
        return told.splitlines()[-1]

    return run


@pytest.fixture(autouse=True)
def fresh_settings():
    """No settings of this test are those of another one."""
    yield
    default_settings.cache_clear()


@pytest.mark.parametrize(
    "words",
    [
        "jobs show",
        "jobs explain",
        "jobs cancel",
        "jobs retry",
        "jobs delete",
        "jobs list --after",
        "outbox show",
        "outbox drop --yes",
    ],
)
def test_an_id_that_no_row_can_have_is_refused(run, words):
    assert f"{TOO_LARGE} is not in the range" in run(*words.split(), TOO_LARGE)


@pytest.mark.parametrize(
    "words",
    [
        "readmodel replay a:b t --partition 2147483647",
        f"readmodel replay a:b t --partition 0 --from-offset {TOO_LARGE}",
        "where a:b t k --partition 2147483647",
        "topics declare a:b t --partitions 2147483648",
        "topics grow a:b t --partitions 2147483648",
        "topics repartition a:b 2147483648",
    ],
)
def test_numbers_that_kafka_has_not_are_refused(run, words):
    assert "is not in the range" in run(*words.split())


def test_an_argument_that_is_not_utf8_is_named(run):
    assert run("jobs", "list", "--type", "caf\udce9") == (
        r"error: the argument 'caf\udce9' is not UTF-8: write it so"
    )


@pytest.mark.parametrize(
    ("kind", "words"), [("read", "jobs maintain"), ("service", "migrate")]
)
def test_a_role_that_may_not_do_it_is_told_so(
    run, jobs_database_url, monkeypatch, kind, words
):
    url = as_role(jobs_database_url, kind)
    monkeypatch.setenv("JOBS_LIB_DATABASE_URL", url)
    if words == "migrate":
        # Tables that are there and of the latest version need no right.
        monkeypatch.setenv("JOBS_LIB_SCHEMA", "elsewhere")
    line = run(*words.split())
    assert line.startswith("error: the database does not let this role do that: perm")
    assert line.endswith("or see `jobs-lib grants -h`")


def test_a_role_that_may_not_migrate_is_told_so(run, empty_url, monkeypatch):
    bare = make_url(empty_url).set(username="suite_bare", password="bare")
    with psycopg.connect(empty_url, autocommit=True) as admin:
        admin.execute("drop role if exists suite_bare")
        admin.execute("create role suite_bare login password 'bare'")
        monkeypatch.setenv(
            "JOBS_LIB_DATABASE_URL", bare.render_as_string(hide_password=False)
        )
        line = run("migrate")
        admin.execute("drop role suite_bare")
    assert line.startswith("error: the database does not let this role do that: perm")


@pytest.mark.parametrize(
    ("set_up", "lock", "told"),
    [
        (
            "set default_transaction_read_only = on",
            MIGRATE_LOCK + 1,
            "the database refuses a statement: cannot execute ",
        ),
        (
            "set statement_timeout = '300ms'",
            MIGRATE_LOCK,
            "the database has failed during the command: canceling statement due to ",
        ),
    ],
    ids=["read only", "timeout"],
)
def test_what_the_server_refuses_a_migration_is_told(
    run, empty_url, monkeypatch, set_up, lock, told
):
    name = empty_url.rpartition("/")[2]
    with psycopg.connect(empty_url, autocommit=True) as admin:
        admin.execute(f"alter database {name} {set_up}")
        # In one case another migration is under way.
        admin.execute("select pg_advisory_lock_shared(%s)", (lock,))
        monkeypatch.setenv("JOBS_LIB_DATABASE_URL", empty_url)
        assert run("migrate").startswith(f"error: {told}")


def test_a_direct_url_that_leads_nowhere_is_named(run, monkeypatch):
    monkeypatch.setenv("JOBS_LIB_DIRECT_URL", "postgresql://127.0.0.1:1/orders")
    line = run("migrate")
    assert line.endswith("Is it running, and is JOBS_LIB_DIRECT_URL right?")


def test_a_file_that_cannot_be_written_is_refused_before_the_table_is_read(
    run, tmp_path
):
    # There is no such table, which would be told if it were read.
    line = run(*f"readmodel keys {tmp_path}/no/keys.gz --table t --key id".split())
    assert line.startswith(f"error: {tmp_path}/no/keys.gz cannot be written: No such ")


@pytest.mark.skipif(sys.platform != "linux", reason="writes to /dev/full")
def test_a_file_without_room_is_told(run, jobs_database_url):
    words = "readmodel keys /dev/full --table jobs_lib.jobs --key id --version id"
    line = run(*words.split())
    assert line.startswith("error: /dev/full cannot be written: No space left on dev")


def test_a_connection_that_is_lost_during_a_command_is_told(run, monkeypatch, caplog):
    def lose(database, *_: object, **__: object) -> None:
        with database.connect("test") as connection:
            connection.execute("select pg_terminate_backend(pg_backend_pid())")

    monkeypatch.setattr(operating, "list_jobs", lose)
    caplog.set_level(logging.DEBUG, logger="jobs_lib")
    line = run("--log-level", "debug", "jobs", "list")
    assert line.startswith("error: the database has failed during the command: term")
    # Its place can be looked at.
    assert "in lose" in caplog.text


def test_tables_that_are_not_there_are_told(run, empty_url, monkeypatch):
    monkeypatch.setenv("JOBS_LIB_DATABASE_URL", empty_url)
    line = run("jobs", "list")
    assert line.startswith("error: the database refuses a statement: ")
    assert "`jobs-lib check` looks whether the tables fit" in line


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b'pod = "M\xfcller"\n', "its byte 9 is not UTF-8. Save it as UTF-8"),
        (b"pod = " + b"[" * 100_000, "its values are nested too deeply"),
    ],
    ids=["latin-1", "nested"],
)
def test_a_settings_file_that_cannot_be_read_is_named(run, tmp_path, content, told):
    (tmp_path / "jobs_lib.toml").write_bytes(content)
    assert run("jobs", "list") == f"error: jobs_lib.toml cannot be read: {told}"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_settings_file_that_the_system_does_not_read_is_named(run, monkeypatch):
    monkeypatch.setenv("JOBS_LIB_CONFIG_FILE", "/proc/self/mem")
    line = run("jobs", "list")
    assert line == "error: /proc/self/mem cannot be read: Input/output error"


def test_json_in_the_environment_that_is_nested_too_deeply_is_told(run, monkeypatch):
    monkeypatch.setenv("JOBS_LIB_KAFKA", "[" * 100_000)
    assert "in the environment is nested too deeply" in run("jobs", "list")
