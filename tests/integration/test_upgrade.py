"""Upgrades: two releases run side by side, and tables change under load."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import psycopg
import pytest
from sqlalchemy import create_engine, text

from jobs_lib.errors import OperatingError, SchemaVersionError
from jobs_lib.postgres import migrate as schema
from jobs_lib.postgres.migrate import migrate, upgrade
from jobs_lib.postgres.revisions import check_version, known_versions
from tests.support.apps import heard, make_app, running
from tests.support.beside import Threads
from tests.support.engines import sqlalchemy_url
from tests.support.releases import NextRelease

if TYPE_CHECKING:
    from jobs_lib import Job

pytestmark = pytest.mark.expects("fenced")

TABLES = ["jobs", "claims", "discarded", "history", "origins", "processes", "outbox"]
LONGEST_STALL = 2.0


@pytest.fixture
def next_release(tmp_path):
    """A release that adds something to every table, as releases may."""
    add = "alter table {} add column of_next_release text default 'x'"
    return NextRelease(tmp_path, [add.format(table) for table in TABLES])


def make_release(url, name, *, knows_fresh):
    """An app; its jobs note in the table ``fx`` which release has run them."""
    app = make_app(url, stale_after=20.0)

    def note(job: Job) -> None:
        with job.transaction() as connection:
            connection.execute(
                "insert into fx values (%s, %s, %s, %s)",
                (job.id, job.type, name, job.attempt),
            )

    # There are so many groups that every origin has some.
    @app.job(group=lambda n: f"g{n % 64}")
    def known(job: Job, n: int) -> None:
        note(job)

    if knows_fresh:

        @app.job()
        def fresh(job: Job) -> None:
            note(job)

    return app


class Writers(Threads):
    """Connections that enqueue all the time, each from a thread of its own."""

    def __init__(self, connect, app) -> None:
        self.ids: list[int] = []
        self.stalled: list[Exception] = []
        """The waits for a lock that were too long."""
        self._numbers = count()
        super().__init__(partial(self._write, connect(), app) for _ in range(3))

    def _write(self, connection, app) -> None:
        known, fresh = app.jobs["known"], app.jobs["fresh"]
        # The server measures the wait for a lock alone, on a busy machine, too.
        connection.execute(f"set lock_timeout = '{LONGEST_STALL:g}s'")
        connection.commit()
        while not self.stopping.wait(0.02):
            try:
                with connection.transaction():
                    ids = [
                        known.enqueue(connection, n=next(self._numbers)),
                        fresh.enqueue(connection),
                    ]
            except psycopg.errors.LockNotAvailable as error:
                self.stalled.append(error)
                continue
            self.ids += ids


@pytest.mark.guarantee("J27", "FJ2")
def test_both_releases_and_the_writers_work_on_while_the_tables_are_upgraded(
    database_url, connect, wait_for, next_release
):
    admin = connect(autocommit=True)
    admin.execute("create table fx (job bigint, type text, release text, attempt int)")
    old = make_release(database_url, "old", knows_fresh=False)
    new = make_release(database_url, "new", knows_fresh=True)

    def ran(release) -> int:
        query = "select count(*) from fx where release = %s"
        return admin.execute(query, (release,)).fetchone()[0]

    def upgrade_tables() -> None:
        with next_release.installed():
            versions.append(migrate(database_url))

    versions: list[str] = []
    with heard("tables.busy", "jobs.unknown") as told, contextlib.ExitStack() as pods:
        with Writers(connect, new) as writers:
            with running(old, "executor"):
                wait_for(
                    lambda: ran("old") > 20,
                    timeout=60,
                    what="the old release runs jobs",
                )
                upgrading = threading.Thread(target=upgrade_tables)
                with connect() as slow:
                    held = new.jobs["fresh"].enqueue(slow)
                    upgrading.start()
                    wait_for(
                        lambda: [event for event, _ in told].count("tables.busy") > 1,
                        what="the migration gives way to a transaction left open",
                    )
                upgrading.join()
                assert versions == [next_release.version]
                before = ran("old")
                wait_for(
                    lambda: ran("old") > before + 20,
                    timeout=60,
                    what="the old one works on",
                )
                pods.enter_context(running(new, "executor"))
                wait_for(
                    lambda: ran("new") > 20,
                    timeout=60,
                    what="the new one works beside it",
                )
            # A pod of the old release that starts again finds its place, too.
            with running(old, "executor"):
                before = ran("old")
                wait_for(
                    lambda: ran("old") > before + 20, timeout=60, what="it works again"
                )
        wait_for(
            lambda: not admin.execute("select 1 from jobs_lib.jobs").fetchone(),
            timeout=60,
            what="all have run",
        )
    assert writers.stalled == []
    rows = admin.execute("select job, type, release, attempt from fx").fetchall()
    assert sorted(row[0] for row in rows) == sorted([*writers.ids, held])
    assert {release for _, type_, release, _ in rows if type_ == "fresh"} == {"new"}
    assert {attempt for *_, attempt in rows} == {1}
    unknown = [fields for event, fields in told if event == "jobs.unknown"]
    assert {fields["type"] for fields in unknown} == {"fresh"}


def test_a_migration_inside_a_users_transaction_gives_way_and_keeps_its_work(
    database_url, connect, wait_for, next_release
):
    reader = connect()
    reader.execute("select from jobs_lib.jobs")
    engine = create_engine(sqlalchemy_url(database_url))

    def upgrade_mine() -> None:
        with next_release.installed(), engine.begin() as connection:
            connection.execute(text("create table mine (id int)"))
            connection.execute(text("set local lock_timeout to '7s'"))
            upgrade(connection)
            timeout.append(connection.execute(text("show lock_timeout")).scalar_one())

    timeout: list[str] = []
    with heard("tables.busy") as told:
        upgrading = threading.Thread(target=upgrade_mine)
        upgrading.start()
        wait_for(lambda: told, what="it gives way")
        reader.commit()
        upgrading.join()
    engine.dispose()
    reader.execute("select id from mine")
    reader.execute("select j.of_next_release from jobs_lib.jobs j, jobs_lib.outbox")
    assert timeout == ["7s"]


def test_a_migration_that_is_never_let_in_gives_up_and_names_the_way_out(
    database_url, connect, next_release, monkeypatch
):
    monkeypatch.setattr(schema, "_PATIENCE", 0.0)
    reader = connect()
    reader.execute("select from jobs_lib.jobs")
    with (
        next_release.installed(),
        pytest.raises(OperatingError, match="jobs-lib check"),
    ):
        migrate(database_url)


@pytest.mark.parametrize("serves", [True, False])
def test_newer_tables_serve_the_releases_that_they_say(
    database, database_url, tmp_path, serves
):
    latest = known_versions()[-1]
    oldest = latest if serves else f"{int(latest[:4]) + 1:04}_next"
    later = NextRelease(
        tmp_path, [f"update installation set compatible_from = '{oldest}'"]
    )
    with later.installed():
        migrate(database_url)
    if serves:
        # An init container of the old release may start again.
        assert migrate(database_url) == later.version
        assert check_version(database) == later.version
        return
    for ask in (
        lambda: migrate(database_url),
        lambda: check_version(database),
    ):
        with pytest.raises(
            SchemaVersionError,
            match=f"version {later.version}, which is newer.*install a newer release",
        ):
            ask()
