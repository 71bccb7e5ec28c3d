"""The locks of a silent process do not last."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import psycopg
import pytest

from jobs_lib.ownership import Process
from tests.support.apps import executing, heard, make_app

if TYPE_CHECKING:
    from uuid import UUID

STALE_AFTER = 0.5
LOCK = "select from jobs_lib.origins where origin = 't/1' for update"


@pytest.fixture
def session(connect):
    """A function that opens a session as a process does."""

    def session(process: UUID) -> psycopg.Connection:
        name = f"jobs_lib executor {process.hex[:12]}"
        return connect(application_name=name, autocommit=True)

    return session


@pytest.fixture
def live(database):
    """A process that sends heartbeats."""
    process = Process(database, "pod", ["execute"], 0.1, stale_after=STALE_AFTER)
    process.start()
    yield process
    process.stop()


@pytest.mark.guarantee("FP16")
@pytest.mark.parametrize("stands", ["in a transaction", "in a pipeline"])
def test_a_take_over_does_not_wait_for_a_silent_process(
    silent, session, database_url, admin, wait_for, stands
):
    with contextlib.ExitStack() as standing:
        stopped = session(silent)
        if stands == "in a pipeline":
            # The command has run, and its end is not sent: no setting of the server
            # counts this.
            standing.callback(stopped.close)
            standing.enter_context(contextlib.suppress(psycopg.Error))
            standing.enter_context(stopped.pipeline())
        else:
            stopped.execute("begin")
        stopped.execute(LOCK)
        app = make_app(database_url, stale_after=STALE_AFTER)
        taken = "select from jobs_lib.origins where owner = %s and epoch = 2"
        with executing(app, ["t/1"]) as process:
            wait_for(
                lambda: admin.execute(taken, (process.id,)).rowcount,
                what="it is taken",
            )


def test_no_other_session_is_ended(silent, live, session, wait_for):
    of_dead, idle, of_live = session(silent), session(silent), session(live.id)
    idle.execute("select 1")
    with heard("sessions.ended") as ended:
        of_live.execute("begin; select 1")
        of_dead.execute("begin; select 1")
        wait_for(lambda: ended, what="the one in a transaction is ended")
    assert ended[0][1] == {"process": silent, "sessions": 1}
    with pytest.raises(psycopg.OperationalError):
        of_dead.execute("select 1")
    # The same look would have ended these sessions.
    assert idle.execute("select 1").fetchone() == (1,)
    assert of_live.execute("select 2").fetchone() == (2,)
