"""The migrations as SQL: psql makes the same tables of it as `migrate`."""

from __future__ import annotations

import re
import shutil
import subprocess

import psycopg
import pytest
from alembic import command
from alembic.config import Config
from click.testing import CliRunner
from sqlalchemy import create_engine

from jobs_lib.cli.main import cli
from jobs_lib.devstack.postgres import wheel_bin
from jobs_lib.errors import ConfigurationError, SchemaVersionError
from jobs_lib.postgres.migrate import (
    migrate,
    upgrade,
    write_sql,
)
from jobs_lib.postgres.revisions import known_versions, migrations_path
from jobs_lib.settings import default_settings, load_settings
from tests.support.engines import sqlalchemy_url
from tests.support.releases import NextRelease

# The server's wheel has no psql.
PSQL = shutil.which("psql")
OLDER = "0012_enqueue"
"""A version before the latest: some tables exist, and some do not."""
VALUES = "select shards, environment, topic_template from {}.installation"


def dump(url):
    """All that a database has except its rows, and the rows of the first table."""
    text = subprocess.run(
        [str(wheel_bin() / "pg_dump"), "--schema-only", url],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    # Each dump has a key of its own.
    return re.sub(r"(?m)^\\(un)?restrict .*\n", "", text)


class Refused(Exception):
    """The server does not accept a script; the text says why."""


def run_by_psql(url, text):
    """Run a script by psql."""
    assert PSQL is not None
    options = ("--no-psqlrc", "--quiet", "--set", "ON_ERROR_STOP=1")
    done = subprocess.run(
        [PSQL, *options, url],
        input=text.encode(),
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise Refused(done.stderr.decode())


def run_by_driver(url, text):
    """Run a script as psql does."""
    with psycopg.connect(url, autocommit=True) as connection:
        try:
            connection.execute(text.encode())
        except psycopg.Error as error:
            raise Refused(str(error)) from None


@pytest.fixture(
    params=[
        pytest.param(
            run_by_psql,
            marks=pytest.mark.skipif(PSQL is None, reason="psql is not installed"),
        ),
        run_by_driver,
    ],
    ids=["psql", "driver"],
)
def execute(request):
    """A function that runs a script in the database of a URL."""
    return request.param


def install(url, version):
    """Bring the tables to a version before the latest."""
    engine = create_engine(sqlalchemy_url(url))
    with engine.begin() as connection:
        config = Config()
        config.set_main_option("script_location", str(migrations_path()))
        config.attributes |= {"connection": connection, "schema": "jobs_lib"}
        command.upgrade(config, version)
    engine.dispose()


@pytest.fixture
def other_url(postgres_server):
    """The URL of another empty database."""
    with psycopg.connect(postgres_server.url, autocommit=True) as connection:
        connection.execute("create database other_schema")
        yield postgres_server.url_of("other_schema")
        connection.execute("drop database other_schema with (force)")


@pytest.mark.guarantee("O7")
@pytest.mark.parametrize("schema", ["jobs_lib", "we\"ird; 'Ünï"])
def test_printed_sql_makes_what_migrate_makes(
    empty_url, other_url, execute, schema, monkeypatch
):
    monkeypatch.setenv("JOBS_LIB_SCHEMA", schema)
    monkeypatch.setenv("JOBS_LIB_ENVIRONMENT", "dev")
    default_settings.cache_clear()
    settings = load_settings()
    printed = CliRunner().invoke(cli, ["migrate", "--sql", "--shards", "4"])
    assert printed.exit_code == 0
    execute(empty_url, printed.output)
    migrate(other_url, schema, settings, shards=4)
    assert dump(empty_url) == dump(other_url)
    with psycopg.connect(empty_url) as one, psycopg.connect(other_url) as other:
        query = psycopg.sql.SQL(VALUES).format(psycopg.sql.Identifier(schema))
        expected = other.execute(query).fetchone()
        assert one.execute(query).fetchone() == expected == (4, "dev", "dev.{name}")
    # The tables are found as they are.
    assert migrate(empty_url, schema, settings) == known_versions()[-1]


@pytest.mark.guarantee("O7")
def test_every_way_to_the_latest_version_ends_in_the_same_schema(
    empty_url, other_url, execute
):
    execute(other_url, write_sql())
    expected = dump(other_url)
    engine = create_engine(sqlalchemy_url(empty_url))
    with engine.begin() as connection:
        upgrade(connection)
    assert dump(empty_url) == expected
    execute(empty_url, "drop schema jobs_lib cascade")
    install(empty_url, OLDER)
    assert dump(empty_url) != expected
    execute(empty_url, write_sql(since=OLDER))
    assert dump(empty_url) == expected
    execute(empty_url, "drop schema jobs_lib cascade")
    install(empty_url, OLDER)
    migrate(empty_url)
    assert dump(empty_url) == expected
    engine.dispose()


@pytest.mark.guarantee("O7")
def test_every_way_to_the_next_release_ends_in_the_same_schema(
    empty_url, other_url, execute, tmp_path
):
    before = migrate(other_url)
    migrate(empty_url)
    # The release changes existing objects, and does not only add new ones.
    later = NextRelease(
        tmp_path,
        [
            "alter table jobs add column of_next_release text default 'x'",
            """
            create or replace function count_resumes() returns trigger
            language plpgsql as $function$ begin return null; end $function$;
            """,
            "alter table holds replica identity default",
        ],
    )
    with later.installed():
        execute(empty_url, write_sql(since=before))
        assert migrate(other_url) == migrate(empty_url) == later.version
    assert dump(empty_url) == dump(other_url)


def test_a_script_of_another_version_changes_nothing(empty_url, execute, tmp_path):
    version = migrate(empty_url)
    before = dump(empty_url)
    with pytest.raises(Refused, match="already exists"):
        execute(empty_url, write_sql())
    with pytest.raises(Refused, match="not the version that"):
        execute(empty_url, write_sql(since=OLDER))
    assert dump(empty_url) == before
    # It changes only functions, which nothing else would refuse.
    replace = """
    create or replace function count_resumes() returns trigger
    language plpgsql as $function$ begin return null; end $function$;
    """
    with NextRelease(tmp_path, [replace, replace]).installed():
        text = write_sql(since=version)
        execute(empty_url, text)
        after = dump(empty_url)
        with pytest.raises(Refused, match="not the version that"):
            execute(empty_url, text)
    assert dump(empty_url) == after != before


def test_alembic_prints_the_same_sql_as_the_library(monkeypatch, capsys):
    config = Config("alembic.ini")
    command.upgrade(config, "head", sql=True)
    assert capsys.readouterr().out.strip() == write_sql().strip()


def test_invalid_options_of_printed_sql_are_refused(monkeypatch):
    with pytest.raises(SchemaVersionError, match=r"no version '9999' .* 0001_\w+ to"):
        write_sql(since="9999")
    # Alembic alone would take it for the short form of `0012_enqueue`.
    with pytest.raises(SchemaVersionError, match="no version '0012'"):
        write_sql(since="0012")
    with pytest.raises(ConfigurationError, match="fixed when the tables are installed"):
        write_sql(since=OLDER, shards=3)
    with pytest.raises(ConfigurationError, match="cannot have 0 shards"):
        write_sql(shards=0)
    run = CliRunner().invoke
    refused = run(cli, ["migrate", "--sql", "--copied-from", "live"])
    assert "leave --sql out" in refused.output
    assert refused.exit_code == 2
    assert "--since needs --sql" in run(cli, ["migrate", "--since", OLDER]).output
