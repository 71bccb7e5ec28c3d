"""The code of the page on migrations, run by `alembic` itself in a user's project."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from jobs_lib.postgres.revisions import known_versions

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/migrations.md").read_text(encoding="utf-8")

INI = """
[alembic]
script_location = alembic
"""
ENV = """
import os

from alembic import context
from sqlalchemy import Column, Integer, MetaData, Table, create_engine

from filter import options

metadata = MetaData()
Table("orders", metadata, Column("id", Integer, primary_key=True))
Table("bills", metadata, Column("id", Integer, primary_key=True))
engine = create_engine(os.environ["MY_DATABASE"])
with engine.connect() as connection:
    context.configure(
        connection=connection, target_metadata=metadata, **options
    )
    with context.begin_transaction():
        context.run_migrations()
"""


def code(heading: str) -> str:
    """The first code block of Python below a heading of the page."""
    section = PAGE.split(f"## {heading}\n")[1]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]


@pytest.fixture
def project(tmp_path) -> Path:
    """A user's project with migrations of its own; the second installs our tables."""
    versions = tmp_path / "alembic/versions"
    versions.mkdir(parents=True)
    (tmp_path / "alembic.ini").write_text(INI)
    (tmp_path / "alembic/env.py").write_text(ENV)
    (tmp_path / "alembic/script.py.mako").write_text("# ${message}\n${upgrades}\n")
    filtered = code("Keep `--autogenerate` off our tables")
    (tmp_path / "filter.py").write_text(
        filtered.replace("context.configure(", "options = dict(")
    )
    (versions / "1_install.py").write_text(code("From your own Alembic migration"))
    return tmp_path


@pytest.fixture
def alembic(project, empty_url):
    """A function that runs the command in the project; it returns the output."""

    def run(*arguments: str, **settings: str) -> str:
        command = [sys.executable, "-m", "alembic", *arguments]
        driver = empty_url.replace("postgresql://", "postgresql+psycopg://")
        environment = {
            **os.environ,
            "MY_DATABASE": driver,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{project}",
            **settings,
        }
        done = subprocess.run(
            command,
            cwd=project,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


@pytest.mark.guarantee("O7")
@pytest.mark.parametrize("schema", ["jobs_lib", "work"])
def test_a_migration_of_a_users_project_installs_the_tables_between_its_operations(
    alembic, empty_url, schema
):
    settings = {} if schema == "jobs_lib" else {"JOBS_LIB_SCHEMA": schema}
    alembic("upgrade", "head", **settings)
    with psycopg.connect(empty_url) as connection:
        versions = connection.execute(
            f"select version_num from {schema}.jobs_lib_version"
        ).fetchall()
        tables = connection.execute(
            "select tablename from pg_tables where schemaname = 'public' order by 1"
        ).fetchall()
    assert versions == [(known_versions()[-1],)]
    # One operation of the page stands before ours, and one after it.
    assert tables == [("alembic_version",), ("bills",), ("orders",)]
    # Autogenerate finds nothing of ours to drop.
    assert "No new upgrade operations detected" in alembic("check", **settings)
    # It runs again where the tables exist already.
    alembic("stamp", "base", **settings)
    with psycopg.connect(empty_url) as connection:
        connection.execute("drop table orders, bills")
    alembic("upgrade", "head", **settings)
