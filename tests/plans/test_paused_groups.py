"""Very many groups are paused: looks and claims cost what they did before."""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest

from jobs_lib.executor.courier import Courier
from jobs_lib.executor.survey import Survey
from jobs_lib.jobs.claim import Claimer
from tests.plans.test_old_snapshots import count_pages
from tests.support.apps import HOME, make_app

PAUSED = 10_000
ADD = (
    'insert into jobs_lib.jobs (origin, type, "group", payload)'
    " select 'local/3', 'work', name, '{}' from unnest(%s::text[]) as g(name)"
)


class Owner:
    """An executor that owns all origins, and looks and claims when it is told to."""

    def __init__(self, connection, queries, admin) -> None:
        owner = uuid4()
        admin.execute(
            "insert into jobs_lib.origins (role, origin, owner, epoch)"
            " select 'execute', unnest(%s::text[]), %s, 1",
            (HOME, owner),
        )
        types = {"work": make_app("").job(name="work")(lambda job: None)}
        self.claimer = Claimer(owner, UUID(int=1), types)
        self.claimer.add(dict.fromkeys(HOME, 1))
        for position in self.claimer.positions.values():
            # Or a claim of the plain kind would come first.
            position.plain = False
        self.survey = Survey(self.claimer, 0.01)
        self.connection, self.queries = connection, queries
        self.courier = Courier(connection, queries, prepare=True)

    def look(self) -> int:
        """Look once; returns how many rows the look has found."""
        self.survey._next_at = 0.0
        batches = self.survey.prepare(busy=False, hinted=False)
        answers, failure = self.courier.exchange(*batches)
        assert failure is None
        rows = 0
        for batch, answer in zip(batches, answers, strict=True):
            assert answer is not None
            self.survey.read(batch, answer)
            if batch[0][0] == "look":
                rows = len(answer[0])
        return rows

    def claim(self) -> list[str]:
        """Claim once; returns the groups of the jobs."""
        asked = self.claimer.prepare(100)
        return [] if asked is None else self.take(asked)

    def take(self, asked) -> list[str]:
        """Send a claim; returns the groups of the jobs."""
        before = {*self.claimer.flight.jobs}
        (answer,), failure = self.courier.exchange([asked])
        assert failure is None
        assert answer is not None
        self.claimer.read(answer[0])
        jobs = self.claimer.flight.jobs
        return sorted(str(jobs[one].group) for one in jobs.keys() - before)


@pytest.fixture
def owner(database, admin):
    """An executor of its own, on a connection as executors have it."""
    with database.connect("test", impatient=True) as connection:
        yield Owner(connection, database.queries, admin)


@pytest.mark.guarantee("FP25")
def test_a_look_and_a_claim_do_not_grow_with_the_groups_that_are_paused(owner, admin):
    admin.execute(
        "insert into jobs_lib.pauses select 'group', 'paused' || n"
        " from generate_series(1, %s) n",
        (PAUSED,),
    )
    admin.execute("analyze jobs_lib.pauses")
    admin.execute(ADD, (["a", "paused1", "b"],))
    assert owner.look() < 50
    query, parameters = owner.claimer.prepare(100)
    assert len(str(parameters)) < 5_000
    with owner.connection.transaction(force_rollback=True):
        pages = count_pages(owner.connection, owner.queries[query], parameters)
    assert pages < 100
    assert owner.take((query, parameters)) == ["a", "b"]


def test_a_group_is_paused_as_soon_as_that_is_committed(owner, admin):
    owner.look()
    admin.execute(ADD, (["a", "b"],))
    owner.claimer.windows.hint("local/3")
    admin.execute("insert into jobs_lib.pauses values ('group', 'a')")
    assert owner.claim() == ["b"]


def test_a_pause_between_two_looks_loses_no_job(owner, admin):
    owner.look()
    admin.execute(ADD, (["a", "b"],))
    owner.claimer.windows.hint("local/3")
    admin.execute("insert into jobs_lib.pauses values ('group', 'a')")
    assert owner.claim() == ["b"]
    admin.execute("delete from jobs_lib.pauses")
    admin.execute(ADD, (["c"],))
    owner.look()
    assert owner.claim() == ["a", "c"]


def test_a_lane_that_ended_takes_no_more_of_its_group_while_that_is_paused(
    owner, admin
):
    admin.execute(ADD, (["a"] * 3,))
    owner.look()
    claimer = owner.claimer
    assert owner.claim() == ["a"] * 3
    admin.execute("insert into jobs_lib.pauses values ('group', 'a')")
    admin.execute(ADD, (["a"] * 2,))
    owner.look()
    assert owner.claim() == []
    for job in list(claimer.flight.jobs.values()):
        claimer.flight.land(job)
    for lane in list(claimer.flight.lanes.values()):
        claimer.flight.end_lane(lane)
    admin.execute(
        "delete from jobs_lib.jobs where id in"
        " (select id from jobs_lib.jobs order by id limit 3)"
    )
    assert claimer.flight.behind
    assert owner.claim() == []
    admin.execute("delete from jobs_lib.pauses")
    owner.look()
    assert owner.claim() == ["a"] * 2
