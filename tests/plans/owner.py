"""An executor of its own that looks and claims when a test asks it to."""

from __future__ import annotations

from uuid import UUID, uuid4

from jobs_lib.executor.claiming.claimer import Claimer
from jobs_lib.executor.claiming.polling import Poller
from jobs_lib.executor.round_trip import RoundTrip
from tests.support.apps import HOME, make_app


class Owner:
    """An executor that owns all origins, and looks and claims on request."""

    def __init__(self, connection, queries, admin) -> None:
        owner = uuid4()
        admin.execute(
            "insert into jobs_lib.origins (role, origin, owner, epoch)"
            " select 'execute', unnest(%s::text[]), %s, 1",
            (HOME, owner),
        )
        types = {"work": make_app("").job(name="work")(lambda job: None)}
        self.claimer = Claimer(owner, UUID(int=1), types)
        self.claimer.take(dict.fromkeys(HOME, 1))
        for position in self.claimer.cursors.values():
            # Without this a claim of the plain kind would come first.
            position.all_plain = False
        self.poller = Poller(self.claimer, 0.01)
        self.connection, self.queries = connection, queries
        self.round_trip = RoundTrip(connection, queries, prepare=True)

    def look(self) -> int:
        """Look once; return how many rows the look has found."""
        self.poller._next_at = 0.0
        batches = self.poller.prepare(busy=False, hinted=False)
        answers, failure = self.round_trip.exchange(*[b.statements for b in batches])
        assert failure is None
        rows = 0
        for batch, answer in zip(batches, answers, strict=True):
            assert answer is not None
            batch.answer = answer
            batch.read()
            if batch.statements[0][0] == "look":
                rows = len(answer[0])
        return rows

    def claim(self) -> list[str]:
        """Claim once; return the groups of the jobs."""
        asked = self.claimer.prepare(100)
        return [] if asked is None else self.take(asked)

    def take(self, asked) -> list[str]:
        """Send a claim; return the groups of the jobs."""
        before = {*self.claimer.in_flight.jobs}
        (answer,), failure = self.round_trip.exchange([asked])
        assert failure is None
        assert answer is not None
        self.claimer.read(answer[0])
        jobs = self.claimer.in_flight.jobs
        return sorted(str(jobs[one].group) for one in jobs.keys() - before)
