"""The servers run for root, for an ordinary user, and with closed folders."""

from __future__ import annotations

import os
import pwd
import shutil
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest

from jobs_lib.devstack import KafkaBroker, PostgresServer, postgres
from jobs_lib.devstack.places import shared_folder
from jobs_lib.testing.databases import embedded_server

from .conftest import PROJECT, User, _can, _python_for

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def owner(pid):
    return pwd.getpwuid(Path(f"/proc/{pid}").stat().st_uid).pw_name


def answers(server):
    with psycopg.connect(server.url) as conn:
        return conn.execute("SELECT 1").fetchone() == (1,)


def asks_everybody(url):
    """Tell whether each role has a SCRAM password and no login works without one."""
    with psycopg.connect(url) as conn:
        passwords = conn.execute(
            "SELECT rolpassword LIKE 'SCRAM-SHA-256$%' FROM pg_authid WHERE rolcanlogin"
        ).fetchall()
        methods = conn.execute(
            "SELECT DISTINCT auth_method FROM pg_hba_file_rules"
        ).fetchall()
    return (passwords, methods) == ([(True,)], [("scram-sha-256",)])


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


OTHER = """
import os, socket, sys
import psycopg

port, folders = int(sys.argv[1]), sys.argv[2:]
for password in ("", "postgres"):
    url = f"postgresql://postgres:{password}@127.0.0.1:{port}/postgres"
    try:
        psycopg.connect(url, connect_timeout=5)
        print("connected", repr(password))
    except psycopg.OperationalError as error:
        assert "password" in str(error), error
for folder in folders:
    try:
        print("listed", folder, os.listdir(folder))
    except PermissionError:
        pass
print("tried all")
"""


@pytest.fixture
def stranger(open_folder):
    """A function that runs code as a user who owns none of the servers."""
    entry = pwd.getpwnam("daemon")
    if not _can("daemon", "test", "-r", str(PROJECT / "pyproject.toml")):
        pytest.skip("another user cannot read this clone")
    python = _python_for("daemon", open_folder)
    home = open_folder / "home-of-daemon"
    home.mkdir()
    os.chown(home, entry.pw_uid, entry.pw_gid)
    return User("daemon", python, home)


@as_root
@pytest.mark.guarantee("FS15")
def test_another_user_of_the_machine_comes_neither_in_nor_to_the_files(
    stack, stranger, ephemeral_servers
):
    by_key = {service.key: service for service in stack.up()}
    assert by_key.keys() == {"postgres", "kafka"}
    folders = [str(service.folder) for service in by_key.values()]
    folders += [str(server.folder) for server in ephemeral_servers]
    ports = [urlsplit(str(by_key["postgres"].address)).port, ephemeral_servers[0].port]
    for port in ports:
        tried = stranger.run(str(port), *folders, code=OTHER, cwd="/")
        assert tried.stdout == "tried all\n", tried.stderr
    # The state file contains the password.
    state = stack.folder / "state.json"
    assert state.stat().st_mode & 0o077 == 0
    assert str(urlsplit(str(by_key["postgres"].address)).password) in state.read_text()


@pytest.fixture
def ephemeral_servers():
    """The servers, started as an application's tests start them."""
    with embedded_server() as postgres_server, KafkaBroker.ephemeral() as broker:
        yield postgres_server, broker


@pytest.mark.guarantee("FS15")
def test_two_servers_have_two_passwords_and_one_keeps_its_own(open_folder):
    with PostgresServer(open_folder / "one") as one, PostgresServer.ephemeral() as two:
        assert urlsplit(one.url).password != urlsplit(two.url).password
        url = one.url
        one.restart()
        assert one.url == url
        wrong = url.replace(str(urlsplit(url).password), "wrong")
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(wrong)
    file = open_folder / "one" / "password"
    with PostgresServer.ephemeral() as server:
        assert asks_everybody(server.url)
    assert file.stat().st_mode & 0o077 == 0
    assert file.parent.stat().st_mode & 0o077 == 0


@pytest.mark.guarantee("FS15")
def test_a_server_that_trusted_everybody_is_closed_at_its_next_start(open_folder):
    folder = open_folder / "postgres"
    with PostgresServer(folder) as server:
        with psycopg.connect(server.url) as conn:
            conn.execute("CREATE TABLE kept (value int)")
        open_url = f"postgresql://postgres@127.0.0.1:{server.port}/jobs_lib"
        hba = server.data / "pg_hba.conf"
    # An earlier release left this line.
    hba.write_text("host all all 127.0.0.1/32 trust\n")
    (folder / "password").unlink()
    folder.chmod(0o755)
    with PostgresServer(folder, port=urlsplit(open_url).port) as server:
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(open_url)
        with psycopg.connect(server.url) as conn:
            conn.execute("SELECT value FROM kept")
        assert folder.stat().st_mode & 0o077 == 0
        assert asks_everybody(server.url)
