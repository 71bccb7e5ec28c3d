"""`jobs-lib owners` lists the owner of each origin and its waiting work."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys

import pytest

from jobs_lib.operating.owners import COUNTED, list_owners
from tests.support.apps import make_app, running
from tests.support.records import produce

COMMAND = [sys.executable, "-m", "jobs_lib.cli", "owners"]


@pytest.fixture
def app(database_url, bootstrap_servers, topic):
    """A service of two partitions; its records and jobs wait for the test."""
    home = topic(2)
    app = make_app(
        database_url, home=home, pod="pod-a", kafka_bootstrap_servers=bootstrap_servers
    )

    @app.consumer(home, group=f"{home}-g")
    def handle(record, connection) -> None:
        connection.execute("select pg_advisory_xact_lock_shared(1)")

    @app.job()
    def work(job) -> None:
        with app.database().connect("test") as connection:
            connection.execute("select pg_advisory_lock_shared(1)")

    return app


def environment(app) -> dict[str, str]:
    return os.environ | {
        "JOBS_LIB_DATABASE_URL": app.settings.database_url,
        "JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS": app.settings.kafka_bootstrap_servers,
        "COLUMNS": "200",
    }


def test_owners_show_waiting_and_claimed_jobs_and_the_lag_of_records(
    app, admin, connect, wait_for, bootstrap_servers
):
    database, settings, home = app.database(), app.settings, app.home
    admin.execute("select pg_advisory_lock(1)")

    def found(role: str, number: int):
        """Return the row of a partition; None before any process has wanted it."""
        wanted = (role, f"{home}/{number}")
        rows = [
            one
            for one in list_owners(database, settings)
            if (one.role, one.origin) == wanted
        ]
        return rows[0] if rows else None

    with running(app, "consumers", "executor"):
        wait_for(
            lambda: (one := found("execute", 1)) and one.pod == "pod-a",
            timeout=60,
            what="it owns its partitions",
        )
        work = app.jobs["work"].options(origin=f"{home}/1")
        with connect() as connection:
            work.enqueue_many(connection, [{}] * 3)
        group = f"consume:{home}-g"
        produce(bootstrap_servers, home, [("a", "1")] * 2)
        wait_for(
            lambda: (
                found("execute", 1).claimed == 3
                and sorted(found(group, n).lag for n in (0, 1)) == [0, 2]
            ),
            timeout=60,
            what="three jobs run, and two records wait",
        )
        one = found("execute", 1)
        assert (one.waiting, one.claimed, one.lag, one.epoch) == (3, 3, None, 1)
        wait_for(
            lambda: found("execute", 1).heartbeat > one.since,
            timeout=60,
            what="the next heartbeat is shown",
        )
        other = found("execute", 0)
        assert (other.waiting, other.claimed) == (0, 0)
        assert found(group, 1).waiting is None
        shown = subprocess.run(
            [*COMMAND, "--json"], env=environment(app), capture_output=True, check=True
        )
        rows = json.loads(shown.stdout)
        assert [(r["role"], r["origin"]) for r in rows] == [
            (role, f"{home}/{n}") for role in (group, "execute") for n in (0, 1)
        ]
        admin.execute("select pg_advisory_unlock(1)")
    wait_for(
        lambda: found("execute", 1).pod is None, timeout=60, what="they are given back"
    )
    assert found("execute", 1).owner is None


def test_owners_show_a_capped_count_and_the_origins_of_a_deleted_topic(app, admin):
    admin.execute(
        "insert into jobs_lib.origins (role, origin) values ('execute', 'gone/0')"
    )
    admin.execute(
        "insert into jobs_lib.origins (role, origin) values ('consume:g', 'gone/0')"
    )
    admin.execute(
        "insert into jobs_lib.offsets (consumer_group, topic, partition, next_offset)"
        " values ('g', 'gone', 0, 7)"
    )
    admin.execute(
        "insert into jobs_lib.jobs (origin, type, payload)"
        " select 'gone/0', 'x', '{}' from generate_series(1, %s)",
        (COUNTED + 1,),
    )
    consumed, executed = list_owners(app.database(), app.settings)
    assert consumed.lag is None
    assert executed.waiting == COUNTED


def test_an_origin_with_a_larger_number_than_any_shard_is_shown(app, admin):
    admin.execute(
        "insert into jobs_lib.origins (role, origin, epoch)"
        " values ('execute', 'local/40000', 1)"
    )
    (found,) = list_owners(app.database(), app.settings)
    assert (found.origin, found.waiting) == ("local/40000", 0)


def test_a_live_view_follows_until_it_is_stopped(app, admin, wait_for):
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "--watch", "0.1"], env=environment(app), stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    os.set_blocking(terminal, False)
    said = bytearray()

    def says(text: bytes) -> bool:
        with contextlib.suppress(OSError):
            said.extend(os.read(terminal, 1 << 16))
        return text in said

    try:
        wait_for(lambda: says(b"origin"), timeout=60, what="it shows an empty table")
        admin.execute(
            "insert into jobs_lib.origins (role, origin) values ('relay', 'shard/3')"
        )
        wait_for(lambda: says(b"shard/3"), timeout=60, what="it shows what is new")
        process.send_signal(signal.SIGINT)

        def has_ended() -> bool:
            # Its last lines only come as fast as the terminal is read.
            says(b"")
            return process.poll() is not None

        wait_for(has_ended, timeout=60, what=lambda: f"it ends: {said[-500:]!r}")
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
