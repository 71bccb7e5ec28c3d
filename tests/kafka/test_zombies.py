"""A pod that others believe dead continues later, and does no harm."""

from __future__ import annotations

import pytest

from tests.support.apps import make_app
from tests.support.processes.pods import MAY_END
from tests.support.records import produce

pytestmark = pytest.mark.expects("fenced")

PARTITIONS = 6
KEYS = [f"key-{n}" for n in range(8)]


@pytest.fixture
def home(topic):
    """A topic of six partitions."""
    return topic(PARTITIONS)


@pytest.fixture
def tables(admin):
    """Make the tables that handlers write to and wait for."""
    admin.execute("create table effects (job bigint, pod text)")
    admin.execute(
        "create table keys as select key, 0 as seen from unnest(%s::text[]) as key",
        (KEYS,),
    )
    admin.execute("create table read (value text, pod text)")
    admin.execute(MAY_END)


@pytest.fixture
def start(database_url, bootstrap_servers, home, tables, start_process):
    """A function that starts a pod."""

    def start(pod: str):
        return start_process(
            "zombie",
            database_url,
            kafka_bootstrap_servers=bootstrap_servers,
            home=home,
            pod=pod,
        )

    return start


@pytest.fixture
def enqueue(database_url, home, connect):
    """A function that enqueues a job of each key, and returns their ids in order."""
    app = make_app(database_url, home=home)

    @app.job(group="key")
    def work(job, key: str) -> None: ...

    def enqueue() -> list[int]:
        with connect() as connection:
            return [work.enqueue(connection, key=key) for key in KEYS]

    return enqueue


@pytest.fixture
def await_owners(admin, home, wait_for):
    """A function that waits until each pod owns its number of origins in both roles."""

    def await_owners(expected: dict[str, int]) -> None:
        def found() -> list[tuple[str, str, int]]:
            return admin.execute(
                "select split_part(o.role, ':', 1), p.pod, count(*)"
                " from jobs_lib.origins o join jobs_lib.processes p on p.id = o.owner"
                " group by 1, 2"
            ).fetchall()

        both = [
            (r, pod, n) for r in ("consume", "execute") for pod, n in expected.items()
        ]
        wait_for(
            lambda: sorted(found()) == sorted(both),
            timeout=60,
            what=lambda: f"{expected}: {found()}",
        )

    return await_owners


@pytest.mark.expects("jobs.fenced", "loop.failed", "origins.lost")
@pytest.mark.guarantee("FP16", "I12", "S14", "I11")
def test_a_pod_that_was_stopped_for_longer_than_its_session_commits_nothing(
    start, admin, enqueue, await_owners, bootstrap_servers, home, wait_for
):
    def effects() -> list[tuple[int, str]]:
        return sorted(admin.execute("select job, pod from effects").fetchall())

    first = start("pod-a")
    await_owners({"pod-a": PARTITIONS})
    ids = enqueue()
    wait_for(lambda: len(first.lines) == 2, timeout=60, what="two jobs run")
    running = {int(line.split()[1]) for line in first.lines}
    first.pause()
    admin.execute("insert into may_end values ('pod-b')")
    second = start("pod-b")
    # The other pod waits for the session timeout. It waits for no transaction of the
    # pod that stands still, which has locked rows that these jobs need.
    wait_for(
        lambda: effects() == [(job, "pod-b") for job in ids],
        timeout=60,
        what=lambda: f"the other has run all jobs: {effects()}\n{second.output}",
    )
    produce(bootstrap_servers, home, [(key, key) for key in KEYS])
    wait_for(
        lambda: admin.execute("select count(*) from read").fetchone()[0] == len(KEYS),
        timeout=60,
        what="the other reads all records",
    )
    admin.execute("insert into may_end values ('pod-a')")
    first.resume()
    await_owners({"pod-a": 3, "pod-b": 3})
    refused = {f"ended {job}" for job in running} & {*first.lines}
    assert not refused
    assert effects() == [(job, "pod-b") for job in ids]
    assert first.running
    # It is again a pod like any other.
    more = enqueue()
    wait_for(
        lambda: sorted(job for job, _ in effects()) == ids + more,
        timeout=60,
        what=lambda: f"both run jobs: {effects()}\n{first.output}",
    )
    produce(bootstrap_servers, home, [(key, key) for key in KEYS])
    wait_for(
        lambda: (
            admin.execute("select count(*) from read").fetchone()[0] == 2 * len(KEYS)
        ),
        timeout=60,
        what="both read records",
    )
    assert {pod for job, pod in effects() if job in more} == {"pod-a", "pod-b"}
