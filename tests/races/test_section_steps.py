"""Sections of one executor, whose dispatchers the test moves step by step."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
import pytest

from jobs_lib.executor.claiming.late_commits import LateCommits
from jobs_lib.executor.executor import Executor
from tests.operating.helpers import add_owner
from tests.races.conftest import ORIGIN
from tests.support.apps import make_app
from tests.support.stepping import HeldRoundTrip, nothing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from jobs_lib import Job
    from jobs_lib.executor.claiming.rows import JumpRow
    from jobs_lib.executor.dispatcher import Dispatcher


class Section:
    """The dispatcher of one section for the origin; it never sleeps."""

    def __init__(self, dispatcher: Dispatcher, round_trip: HeldRoundTrip) -> None:
        self.dispatcher = dispatcher
        self.round_trip = round_trip

    def lose_answer(self) -> None:
        """Lose the connection before the answer of the next round comes."""

        def lose() -> None:
            raise psycopg.OperationalError("the connection is lost")

        self.round_trip.after = lose
        with pytest.raises(psycopg.OperationalError):
            self.rounds(1)
        self.round_trip.after = nothing
        self.dispatcher._doubt(psycopg.OperationalError())
        self.dispatcher._recover(self.round_trip)

    def end(self, job_id: int) -> None:
        """Let a job end well, and its lane with it."""
        job = self.dispatcher._claimer.in_flight.jobs[job_id]
        job.lane.finished.add(job, None)
        job.lane.finished.add_lane(job.lane)
        self.rounds(1)

    def rounds(self, count: int = 4) -> list[int]:
        """Make some rounds; return the jobs that they have claimed."""
        flying = self.dispatcher._claimer.in_flight.jobs
        before = {*flying}
        poller = self.dispatcher._poller
        for _ in range(count):
            poller._next_at = poller._due_at = poller._late_commits._next_at = 0.0
            self.dispatcher._round(self.round_trip)
        return sorted(flying.keys() - before)


@pytest.fixture
def executor(database, admin) -> Iterator[Executor]:
    """An executor with a section for ``book``, and one for ``send``."""
    app = make_app(database.url, notify=False)

    @app.job(group="key")
    def book(job: Job, key: str | None = None) -> None: ...

    @app.job(group="key", workers=8)
    def send(job: Job, key: str | None = None) -> None: ...

    owner = add_owner(admin, origin=ORIGIN)
    executor = Executor(database, app.jobs, owner, UUID(int=1), app.settings)
    yield executor
    for dispatcher in executor._dispatchers:
        dispatcher._wakeup.close()


@pytest.fixture
def sections(database, executor, monkeypatch) -> Iterator[tuple[Section, Section]]:
    """The sections of ``book`` and of ``send``; no sweep finds jobs by chance."""
    monkeypatch.setattr(LateCommits, "note_horizon", lambda *_: None)
    made = []
    for dispatchers in executor._sections:
        dispatcher = dispatchers[1]
        connection = database.connect("section")
        made.append(
            Section(
                dispatcher, HeldRoundTrip(connection, database.queries, prepare=True)
            )
        )
        dispatcher.take({ORIGIN: 7})
    yield made[0], made[1]
    for one in made:
        one.round_trip._connection.close()


@pytest.mark.guarantee("S17")
def test_a_due_job_runs_though_the_section_that_has_found_it_hears_no_answer(
    sections, admin, connect
):
    booking, sending = sections
    with connect() as caller:
        later = datetime.now(UTC) + timedelta(hours=1)
        send = sending.dispatcher._claimer.early_ends._types["send"]
        job = send.options(origin=ORIGIN, run_at=later).enqueue(caller)
    assert booking.rounds() == sending.rounds() == []
    admin.execute("update jobs_lib.jobs set run_at = clock_timestamp()")
    # The other section makes the job available, and loses its connection.
    booking.lose_answer()
    states = admin.execute("select state from jobs_lib.jobs").fetchall()
    assert states == [("available",)]
    assert sending.rounds() == [job]


@pytest.mark.parametrize(
    ("hint", "hinted"),
    [
        ("local/2", ["local/2"]),
        ("local/3", ["local/3"]),
        ("", ["local/2", "local/3"]),
        # Anybody may send these, and perhaps a later release does.
        ("local/4", []),
        ("local/2 and more", []),
        ("something else", []),
    ],
)
def test_a_hint_reaches_each_section(executor, hint, hinted):
    executor.take({"local/2": 7, "local/3": 7})
    for dispatcher in executor._dispatchers:
        dispatcher._commands.run()
    listener = executor._dispatchers[0]
    listener._hear(hint)
    told = []
    for dispatcher in executor._dispatchers:
        dispatcher._commands.run()
        cursors = dispatcher._claimer.cursors
        told += [name for name, one in cursors.items() if one.may_have_more]
    assert sorted(told) == sorted(hinted * 2)


@pytest.mark.guarantee("S10")
def test_a_job_that_a_jump_has_passed_runs_though_its_head_has_ended_since(
    sections, connect, monkeypatch
):
    booking, sending = sections
    types = sending.dispatcher._claimer.early_ends._types

    def enqueue(type_: str, *keys: str) -> list[int]:
        options = types[type_].options(origin=ORIGIN)
        with connect() as caller:
            return [options.enqueue(caller, key=key) for key in keys]

    heads = enqueue("send", "slow", "quick")
    assert sending.rounds() == heads
    # They come when the lanes before them have been claimed already.
    waiting = enqueue("book", *["slow"] * 200)
    (behind,) = enqueue("book", "quick")

    claimer = booking.dispatcher._claimer
    read_jump = claimer.read_jump

    def read_late(asked: Mapping[str, Any], row: JumpRow) -> None:
        # Before this section tells the other one, the head that it has met is gone.
        assert row.furthest == behind
        sending.end(heads[1])
        read_jump(asked, row)

    monkeypatch.setattr(claimer, "read_jump", read_late)
    assert booking.rounds(5) == []
    assert claimer.cursors[ORIGIN].at == behind
    for _ in range(3):
        sending.rounds(1)
        booking.rounds(1)
    assert [*claimer.in_flight.jobs] == [behind]
    assert waiting[0] < behind
