"""Sections claim separately, and tell each other where a group continues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from jobs_lib.executor.claiming.claimer import Claimer
from jobs_lib.executor.round_trip import RoundTrip
from jobs_lib.executor.section import divide
from tests.operating.helpers import add_owner
from tests.support.apps import HOME

if TYPE_CHECKING:
    from jobs_lib import Job

ORIGIN, EPOCH = HOME[0], 7


class Side:
    """The claims of one section, sent when the test says so."""

    def __init__(self, claimer: Claimer, round_trip: RoundTrip) -> None:
        self.claimer = claimer
        self._round_trip = round_trip
        claimer.take({ORIGIN: EPOCH})
        position = claimer.cursors[ORIGIN]
        position.seen, position.all_plain = True, False

    def claim(self, *, looks: bool = False) -> list[int]:
        """Claim once and return the ids; with `looks`, look behind the cursor too."""
        self.claimer.cursors[ORIGIN].may_have_more = looks
        asked = self.claimer.prepare(100)
        if asked is None:
            return []
        before = {*self.claimer.in_flight.jobs}
        (answer,), failure = self._round_trip.exchange([asked])
        assert failure is None
        assert answer is not None
        self.claimer.read(answer[0])
        return sorted(self.claimer.in_flight.jobs.keys() - before)

    def end(self, admin: Any) -> None:
        """End all jobs that it has in flight."""
        flight = self.claimer.in_flight
        admin.execute("delete from jobs_lib.jobs where id = any (%s)", [[*flight.jobs]])
        for job in [*flight.jobs.values()]:
            flight.remove(job)
        for lane in [*flight.lanes.values()]:
            lane.jobs.clear()
            flight.end_lane(lane)

    def take_shared(self) -> list[tuple[str, str | None]]:
        """Return the groups reported to other sections, with the next type of each."""
        shared = self.claimer.next_groups.take_shared()
        return [(group, type_) for _, group, type_ in shared]


@pytest.fixture
def sides(app, admin, connect):
    """The sections of ``book`` and of ``send``, and a function that enqueues jobs."""

    @app.job(group="key")
    def book(job: Job, key: str) -> None: ...

    @app.job(group="key", workers=1)
    def send(job: Job, key: str) -> None: ...

    owner = add_owner(admin, origin=ORIGIN)
    database = app.database()
    connection = database.connect("test")
    round_trip = RoundTrip(connection, database.queries, prepare=True)
    sides = [
        Side(
            Claimer(owner, UUID(int=1), app.jobs, first, 2, section=section), round_trip
        )
        for first, section in enumerate(divide(app.jobs))
    ]

    def enqueue(*types: Any) -> list[int]:
        with connect() as caller:
            return [
                one.options(origin=ORIGIN).enqueue(caller, key="g") for one in types
            ]

    yield *sides, enqueue, (book, send)
    connection.close()


def test_a_section_reports_a_group_to_the_section_that_has_its_next_job(sides, admin):
    booking, sending, enqueue, (book, send) = sides
    first, second, third = enqueue(book, send, book)
    assert booking.claim(looks=True) == [first]
    # The head belongs to the other section.
    assert sending.claim(looks=True) == []
    booking.end(admin)
    assert booking.claim() == []
    assert ("g", "send") in booking.take_shared()
    sending.claimer.follow(ORIGIN, "g")
    assert sending.claim() == [second]
    sending.end(admin)
    assert sending.claim() == []
    assert ("g", "book") in sending.take_shared()
    booking.claimer.follow(ORIGIN, "g")
    assert booking.claim() == [third]


def test_a_section_reports_a_job_behind_anothers_head_when_that_head_ends(sides, admin):
    booking, sending, enqueue, (book, send) = sides
    (first,) = enqueue(send)
    assert sending.claim(looks=True) == [first]
    # The job comes when the lane before it has been claimed already.
    (second,) = enqueue(book)
    assert booking.claim(looks=True) == []
    assert ("g", None) in booking.take_shared()
    sending.claimer.follow(ORIGIN, "g")
    sending.end(admin)
    assert sending.claim() == []
    assert ("g", "book") in sending.take_shared()
    booking.claimer.follow(ORIGIN, "g")
    assert booking.claim() == [second]


@pytest.mark.guarantee("S10")
def test_a_job_behind_anothers_head_is_found_if_that_head_has_ended_since(sides, admin):
    booking, sending, enqueue, (book, send) = sides
    (first,) = enqueue(send)
    assert sending.claim(looks=True) == [first]
    (second,) = enqueue(book)
    assert booking.claim(looks=True) == []
    # The head ends before the other section hears of the job behind it.
    sending.end(admin)
    assert ("g", None) in booking.take_shared()
    sending.claimer.follow(ORIGIN, "g")
    assert sending.claim() == []
    assert ("g", "book") in sending.take_shared()
    booking.claimer.follow(ORIGIN, "g")
    assert booking.claim() == [second]


@pytest.mark.guarantee("S10")
def test_a_section_reports_a_late_job_between_two_of_its_own(sides, admin, connect):
    booking, sending, _, types = sides
    book, send = (one.options(origin=ORIGIN, ordered=False) for one in types)
    with connect() as caller:
        first = book.enqueue(caller, key="g")
    slow = connect()
    late = send.enqueue(slow, key="g")
    with connect() as caller:
        third = book.enqueue(caller, key="g")
    assert booking.claim(looks=True) == [first, third]
    # The first one takes long, so that the lane is shortened.
    lane = booking.claimer.in_flight.lanes[ORIGIN, "g"]
    lane.jobs.popleft()
    booking.claimer.in_flight.shorten(lane)
    slow.commit()
    assert sending.claim(looks=True) == []
    assert ("g", None) in sending.take_shared()
    booking.claimer.follow(ORIGIN, "g")
    booking.end(admin)
    assert booking.claim() == []
    assert ("g", "send") in booking.take_shared()
    sending.claimer.follow(ORIGIN, "g")
    assert sending.claim() == [late]


def test_a_claim_asks_for_more_when_jobs_it_passed_over_have_ended(app, admin):
    @app.job(limit=(1, "tenant"))
    def call(job: Job, tenant: str) -> None: ...

    owner = add_owner(admin, origin=ORIGIN)
    (section,) = divide(app.jobs)
    database = app.database()
    with database.connect("test") as connection:
        round_trip = RoundTrip(connection, database.queries, prepare=True)
        side = Side(Claimer(owner, UUID(int=1), app.jobs, section=section), round_trip)
        passed = side.claimer.passed
        passed.room = lambda value: 2
        for job_id in range(1, 6):
            passed.add(ORIGIN, "t", job_id)
        lengths = []
        for _ in range(4):
            assert side.claim() == []
            lengths.append(len(passed))
    assert lengths == [3, 1, 0, 0]
