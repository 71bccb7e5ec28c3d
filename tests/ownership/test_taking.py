"""What is taken and given is what the database says, whatever fails on the way."""

from __future__ import annotations

import threading

import pytest

from jobs_lib.ownership import Ownership, Process, Source

FAIL_RELEASES = """
create function fail() returns trigger language plpgsql as $$
begin
    if new.owner is null then raise exception 'made to fail'; end if;
    return new;
end $$;
create trigger fail before update on jobs_lib.origins
for each row execute function fail()
"""


class Recorder:
    """A holder that notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, frozenset[str]]] = []
        self.changed = threading.Event()

    def acquire(self, origins):
        self.calls.append(("acquire", frozenset(origins)))

    def release(self, origins, timeout):
        self.calls.append(("release", origins))


@pytest.fixture
def holder():
    return Recorder()


@pytest.fixture
def own(database, holder):
    """Start an ownership over a source; stopped at the end."""
    started: list[Ownership | Process] = []

    def start(source: Source) -> Ownership:
        process = Process(database, "pod", ["execute"], 0.2)
        ownership = Ownership(
            database,
            process,
            "execute",
            source,
            holder,
            interval=0.05,
            stale_after=5.0,
            handover_timeout=1.0,
        )
        process.start()
        ownership.start()
        started.extend([ownership, process])
        return ownership

    yield start
    for one in started:
        one.stop()


def owners(connection):
    query = "select origin, epoch from jobs_lib.origins where owner is not null"
    return dict(connection.execute(query).fetchall())


@pytest.mark.parametrize("again", [True, False], ids=["wanted again", "not wanted"])
def test_what_could_not_be_given_back_is_not_forgotten(
    own, holder, connect, wait_for, again
):
    admin = connect(autocommit=True)
    source = Source()
    own(source)
    source.assign(["t/1", "t/2"])
    wait_for(lambda: owners(admin) == {"t/1": 1, "t/2": 1}, what="both are taken")
    admin.execute(FAIL_RELEASES)
    source.revoke(["t/1"])
    gone = ("release", frozenset({"t/1"}))
    wait_for(lambda: gone in holder.calls, what="the holder has let go")
    if again:
        source.assign(["t/1"])
        # The holder works on it again, under an epoch of its own.
        wait_for(lambda: owners(admin) == {"t/1": 2, "t/2": 1}, what="it is taken")
        assert holder.calls[-1] == ("acquire", frozenset({"t/1"}))
    admin.execute("drop trigger fail on jobs_lib.origins")
    source.revoke(["t/1"])
    wait_for(lambda: owners(admin) == {"t/2": 1}, what="the row is free")
    # Told once each time: its jobs were handed over at the first.
    assert holder.calls.count(gone) == 1 + again
