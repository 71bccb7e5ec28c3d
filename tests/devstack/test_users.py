"""Who runs the servers: root, an ordinary user, folders closed to others."""

from __future__ import annotations

import os
import pwd
import shutil
from pathlib import Path

import psycopg
import pytest

from jobs_lib.devstack import PostgresServer, postgres
from jobs_lib.devstack.places import shared_folder

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def owner(pid):
    return pwd.getpwuid(Path(f"/proc/{pid}").stat().st_uid).pw_name


def answers(server):
    with psycopg.connect(server.url) as conn:
        return conn.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.slow
def test_an_ordinary_user_has_everything_in_their_own_folders(ordinary_user):
    project = ordinary_user.home / "project"
    made = ordinary_user.run("project", code="import os; os.mkdir('project')", cwd="/")
    assert made.returncode == 1, "the root folder is not theirs"
    made = ordinary_user.run(code="import os; os.mkdir('project')", cwd=project.parent)
    assert made.returncode == 0, made.stderr
    try:
        up = ordinary_user.run("up", cwd=project)
        assert (up.returncode, up.stderr) == (0, "")
        status = ordinary_user.run("status", "--json", cwd=project)
        assert status.stdout.count('"running"') == 2
        owners = {path.owner() for path in (project / ".jobs-lib").iterdir()}
        assert owners == {ordinary_user.name}
    finally:
        down = ordinary_user.run("down", cwd=project)
    assert down.stdout.count("stopped") == 2


@as_root
def test_root_runs_postgres_as_another_user():
    with PostgresServer.ephemeral() as server:
        assert owner(server.pid) == "nobody"


@as_root
def test_root_with_a_closed_project_keeps_data_where_postgres_can_enter(tmp_path):
    closed = tmp_path / "home"
    closed.mkdir(mode=0o700)
    before = {path: path.stat().st_mode for path in (closed, *closed.parents)}
    server = PostgresServer(closed / "project" / "postgres")
    try:
        with server:
            folder = server.folder
            assert folder.is_relative_to(shared_folder())
            with psycopg.connect(server.url) as conn:
                conn.execute("CREATE TABLE kept (value int)")
        with PostgresServer(closed / "project" / "postgres") as again:
            assert again.folder == folder
            with psycopg.connect(again.url) as conn:
                conn.execute("SELECT value FROM kept")
        assert {path: path.stat().st_mode for path in before} == before
    finally:
        shutil.rmtree(folder)


@as_root
def test_root_with_closed_binaries_runs_a_copy_of_them(tmp_path, monkeypatch):
    package = postgres.wheel_bin().parents[1]
    closed = tmp_path / "home"
    closed.mkdir(mode=0o700)
    for folder in (package, package.with_name(f"{package.name}.libs")):
        if folder.exists():
            shutil.copytree(folder, closed / folder.name)
    closed_bin = closed / package.name / "pginstall" / "bin"
    monkeypatch.setattr(postgres, "wheel_bin", lambda: closed_bin)
    known = set(shared_folder().iterdir())
    try:
        for _ in range(2):
            with PostgresServer.ephemeral() as server:
                program = Path(f"/proc/{server.pid}/exe").readlink()
                assert program.is_relative_to(shared_folder())
                assert answers(server)
        assert len(set(shared_folder().iterdir()) - known - {_data()}) == 1
    finally:
        for copy in set(shared_folder().iterdir()) - known - {_data()}:
            shutil.rmtree(copy)


@as_root
def test_a_closed_temporary_folder_is_passed_over(tmp_path, monkeypatch):
    closed = tmp_path / "tmp"
    closed.mkdir(mode=0o700)
    monkeypatch.setattr("tempfile.tempdir", str(closed))
    with PostgresServer.ephemeral() as server:
        assert answers(server)
        assert not list(closed.iterdir())


def _data():
    return shared_folder() / "data"
