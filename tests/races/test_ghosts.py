"""Transactions roll back or commit late beside an executor that looks."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from tests.support.apps import executing, make_app

if TYPE_CHECKING:
    from jobs_lib import Job

TRANSACTIONS = 150


@pytest.mark.guarantee("I2")
def test_no_job_runs_that_is_not_committed_nor_before_its_commit_is_seen(
    database_url, connect, wait_for
):
    admin = connect(autocommit=True)
    admin.execute("create table states (n int); create table effects (n int)")
    app = make_app(database_url)
    ran: list[tuple[int, bool]] = []

    @app.job(group="group")
    def work(job: Job, group: str, n: int) -> None:
        with job.transaction() as connection:
            connection.execute("insert into effects values (%s)", (n,))
            seen = connection.execute("select from states where n = %s", (n,))
            ran.append((n, seen.fetchone() is not None))

    kept: set[int] = set()

    def change(sender: int) -> None:
        connection = connect()
        for n in range(sender, TRANSACTIONS, 3):
            connection.execute("insert into states values (%s)", (n,))
            connection.execute("savepoint part")
            work.enqueue(connection, group=f"g{sender}", n=n + 1_000)  # undone below
            connection.execute("rollback to part")
            work.enqueue(connection, group=f"g{sender}", n=n)
            # The pause lets executors look while the transaction is open.
            connection.execute("select pg_sleep(0.003)")
            if n % 2:
                connection.rollback()
            else:
                connection.commit()
                kept.add(n)

    senders = [threading.Thread(target=change, args=(n,)) for n in range(3)]
    with executing(app, [f"local/{n}" for n in range(16)]):
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
        wait_for(
            lambda: (
                admin.execute("select count(*) from jobs_lib.jobs").fetchone() == (0,)
            ),
            what="all have run",
        )
    assert len(kept) == TRANSACTIONS / 2
    assert sorted(ran) == [(n, True) for n in sorted(kept)]
    effects = admin.execute("select n from effects order by n").fetchall()
    assert effects == [(n,) for n in sorted(kept)]
