"""Jobs that wait until other groups have handled their records, on a real Kafka."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import pytest

from jobs_lib import PlaceError
from jobs_lib.executor.limiting import gate as module
from jobs_lib.executor.round_trip import RoundTrip
from jobs_lib.operating import cancel, explain, retry
from jobs_lib.service.maintenance import Maintenance
from tests.support.apps import count, heard, make_app, running
from tests.support.groups import Group
from tests.support.job_gates import Records, find_gate, find_waiting
from tests.support.records import key_of, produce, read_committed

if TYPE_CHECKING:
    from jobs_lib.operating.explanation import Reason

pytestmark = pytest.mark.usefixtures("patient_gates")
REFRESH = 0.05
MANY = 10_000
RECORDS = [("k", n) for n in range(100)]
"""Those of which jobs say that they come from them."""


@pytest.fixture
def ran() -> list[Any]:
    """What has run, in order."""
    return []


def read_attempts(admin: Any) -> list[tuple[str, int]]:
    """The types and failed attempts of the jobs that are left, in order."""
    rows: list[tuple[str, int]] = admin.execute(
        "select type, attempt + crashes from jobs_lib.jobs order by id"
    ).fetchall()
    return rows


def find_reasons(app: Any, job_id: int) -> list[Reason]:
    """The reasons why a job does not run."""
    return explain(app.database(), job_id, settings=app.settings).reasons


@pytest.mark.guarantee("K2", "I29")
def test_a_closed_gate_holds_a_job_and_its_group_and_nothing_else(
    make, admin, bootstrap_servers, topic, group, ran, wait_for
):
    name, other = topic(2), group()
    app = make(gate_refresh=REFRESH, home=name)

    @app.job(group="key", after=[(name, other.name)])
    def work(job, key: str, partition: int, n: int) -> None:
        assert other.read(name, partition) > n
        ran.append((partition, n))

    @app.job(group="key")
    def free(job, key: str, n: int) -> None:
        ran.append(n)

    # It keeps places for the gate, though it does not tell how far jobs are done.
    @app.consumer(name, group=f"{name}-own")
    def handle(record, conn) -> None:
        at = {"key": record.key, "n": record.offset}
        if record.value == "work":
            work.enqueue(conn, partition=record.partition, **at)
        free.enqueue(conn, **at)

    slow, quick = key_of(0, 2), key_of(1, 2)
    produce(
        bootstrap_servers,
        name,
        [(slow, "free"), (slow, "work"), (quick, "work"), (slow, "work")],
    )
    with running(app, "consumers", "executor") as service:
        wait_for(
            lambda: find_waiting(service) == {f"{name}/0": 2, f"{name}/1": 0},
            timeout=30,
            what="three wait",
        )
        # The group's jobs of another type wait behind.
        wait_for(lambda: ran == [0], timeout=30, what="what is before them has run")
        other.commit_soon(name, {0: 0, 1: 1})
        wait_for(
            lambda: ran == [0, (1, 0), 0],
            timeout=30,
            what="the other partition goes on",
        )
        # A job runs before its row is gone.
        left = [(one, 0) for one in ("work", "free") * 2]
        wait_for(
            lambda: read_attempts(admin) == left,
            timeout=30,
            what="those of 0 are left",
        )
        other.commit_soon(name, {0: 2})
        wait_for(
            lambda: ran[3:] == [(0, 1), 1], timeout=30, what="the first one goes on"
        )
        other.commit_soon(name, {0: 3})
        wait_for(lambda: ran[5:] == [(0, 2), 2], timeout=30, what="all have run")
    wait_for(
        lambda: read_committed(bootstrap_servers, f"{name}-own.done", name) == {},
        timeout=30,
        what="Kafka has no offset of it",
    )


@pytest.mark.guarantee("K11", "K20")
def test_it_is_told_for_whom_a_job_waits_and_how_far_that_is(
    make, admin, connect, topic, group, bootstrap_servers, ran, wait_for, monkeypatch
):
    monkeypatch.setattr(module, "_TELL_SECONDS", 0.2)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.05)
    name, ahead, other = topic(1), group(), group()
    produce(bootstrap_servers, name, RECORDS)
    app = make(gate_refresh=REFRESH, heartbeat_interval=0.1)

    @app.job(group="key", after=[(name, ahead.name), (name, other.name)])
    def work(job, key: str) -> None:
        ran.append(key)

    ahead.commit_soon(name, {0: 100})
    records = Records(admin, name)

    def read(job_id: int) -> str:
        reasons = {one.code: one.text for one in find_reasons(app, job_id)}
        return reasons.get("gated", "")

    with (
        heard("jobs.waiting", "jobs.waited") as told,
        running(app, "executor") as service,
    ):
        # Before that the reason is that Kafka says nothing.
        wait_for(
            lambda: name in find_gate(service).find_ends(),
            timeout=60,
            what="Kafka has answered",
        )
        with connect() as connection, records.handling(7):
            first, second = (work.enqueue(connection, "a") for _ in range(2))
        wait_for(lambda: told, timeout=30, what="it is told")
        wait_for(
            lambda: (
                f"{other.name!r} has committed nothing of {name!r}"
                in (text := read(first))
                and f"{name}/0 offset 7" in text
            ),
            timeout=30,
            what="a heartbeat says so",
        )
        other.commit_soon(name, {0: 4})
        wait_for(
            lambda: (
                f"the group {other.name!r} is at offset 4 of {name}/0, and has to pass "
                "7" in read(first)
            ),
            timeout=30,
            what="the group is there",
        )
        wait_for(
            lambda: find_gate(service).find_waits()[0].wait.committed == 4,
            timeout=30,
            what="the gate knows it, too",
        )
        assert [one.code for one in find_reasons(app, second)] == ["behind"]
        # Without Kafka the group is named.
        alone = explain(app.database(), first).reasons
        assert other.name in alone[-1].text
        other.commit_soon(name, {0: 8})
        wait_for(lambda: ran == ["a", "a"], timeout=30, what="both have run")
        wait_for(lambda: len(told) > 1, timeout=30, what="it is told again")
    (event, fields), (last, opened) = told
    assert (event, last) == ("jobs.waiting", "jobs.waited")
    assert fields["types"] == opened["types"] == ["work"]
    assert (fields["origin"], fields["after"]) == (f"{name}/0", other.name)
    assert fields["count"] == 1
    assert "has committed nothing" in fields["reason"]


@pytest.mark.guarantee("K20")
def test_jobs_that_are_cancelled_while_they_wait_are_waited_for_no_longer(
    make, connect, admin, topic, bootstrap_servers, wait_for, monkeypatch
):
    monkeypatch.setattr(module, "_TELL_SECONDS", 0.2)
    monkeypatch.setattr(module, "_SEEN_SECONDS", 0.2)
    name = topic(2)
    produce(bootstrap_servers, name, RECORDS)
    app = make(gate_refresh=REFRESH, heartbeat_interval=0.1)

    @app.job(after=[(name, "nobody")])
    def work(job) -> None: ...

    records = Records(admin, name, 2)

    def enqueue(offset: int, partition: int = 0) -> int:
        with connect() as connection, records.handling(offset, partition):
            return work.enqueue(connection)

    def await_waits(expected: dict[str, int]) -> None:
        wait_for(
            lambda: find_waiting(service) == expected,
            timeout=30,
            what=lambda: f"these wait: {find_waiting(service)}",
        )

    with (
        heard("jobs.waiting", "jobs.waited") as told,
        running(app, "executor") as service,
    ):
        first, second, other = enqueue(7), enqueue(9), enqueue(8, partition=1)
        await_waits({f"{name}/0": 9, f"{name}/1": 8})
        wait_for(lambda: told, timeout=30, what="it is told")
        assert cancel(app.database(), [other]) == {other: "cancelled"}
        await_waits({f"{name}/0": 9})
        # The others still wait.
        assert cancel(app.database(), [second]) == {second: "cancelled"}
        assert [event for event, _ in told if event == "jobs.waited"] == []
        assert cancel(app.database(), [first]) == {first: "cancelled"}
        await_waits({})
        wait_for(
            lambda: told[-1][0] == "jobs.waited", timeout=30, what="none waits any more"
        )


@pytest.mark.guarantee("K12")
def test_a_group_that_is_set_back_holds_what_has_not_started(
    make, admin, connect, topic, group, bootstrap_servers, ran, gate, wait_for
):
    name, other = topic(1), group()
    produce(bootstrap_servers, name, RECORDS)
    app = make(gate_refresh=REFRESH, workers=1)

    @app.job(after=[(name, other.name)])
    def work(job, n: int) -> None:
        ran.append(n)
        if len(ran) == 1:
            gate.wait(60)

    other.commit_soon(name, {0: 100})
    records = Records(admin, name)
    with running(app, "executor") as service:
        with connect() as connection, records.handling(5):
            for n in range(3):
                work.enqueue(connection, n)
        wait_for(lambda: len(ran) == 1, timeout=30, what="one runs")
        other.commit_soon(name, {0: 0})
        wait_for(
            lambda: find_gate(service).find_ends().get(name) == {0: 0},
            timeout=30,
            what="the answer has come",
        )
        gate.set()
        # Whether they were claimed before or not.
        wait_for(
            lambda: find_waiting(service) == {f"{name}/0": 5},
            timeout=30,
            what="two wait",
        )
        assert len(ran) == 1
        wait_for(
            lambda: read_attempts(admin) == [("work", 0)] * 2,
            timeout=30,
            what="one is done",
        )
        other.commit_soon(name, {0: 5})
        other.commit_soon(name, {0: 6})
        wait_for(lambda: sorted(ran) == [0, 1, 2], timeout=30, what="all have run")


@pytest.mark.guarantee("K3", "K20")
def test_a_job_waits_for_a_group_whose_offset_is_above_the_end_and_says_so(
    make, admin, connect, topic, group, bootstrap_servers, ran, wait_for
):
    name, other = topic(1), group()
    app = make(gate_refresh=REFRESH, heartbeat_interval=0.1)

    @app.job(after=[(name, other.name)])
    def work(job) -> None:
        ran.append(1)

    produce(bootstrap_servers, name, RECORDS)
    other.commit_soon(name, {0: 1_000})
    with connect() as connection, Records(admin, name).handling(5):
        job_id = work.enqueue(connection)
    told = f"the offset 1000 of {name}/0, which is above its end"
    with running(app, "executor") as service:
        wait_for(lambda: find_waiting(service), timeout=30, what="it waits")
        wait_for(
            lambda: any(told in one.text for one in find_reasons(app, job_id)),
            timeout=30,
            what=lambda: f"it says so: {find_reasons(app, job_id)}",
        )
        assert ran == []
        other.commit_soon(name, {0: 6})
        wait_for(lambda: ran == [1], timeout=30, what="it has run")


@pytest.mark.slow
@pytest.mark.guarantee("K18")
@pytest.mark.expects("loop.failed")
def test_nothing_starts_on_answers_from_before_the_broker_went(
    own_broker, database_url, admin, connect, ran, wait_for, monkeypatch
):
    # Here answers become too old.
    monkeypatch.setattr(module, "REFRESHES", 3)
    name, other = own_broker.create(), Group(own_broker.bootstrap_servers)
    produce(own_broker.bootstrap_servers, name, RECORDS)
    app = make_app(
        database_url,
        gate_refresh=REFRESH,
        kafka_bootstrap_servers=own_broker.bootstrap_servers,
    )

    @app.job(after=[(name, other.name)])
    def work(job, n: int) -> None:
        ran.append(n)

    other.commit_soon(name, {0: 100})
    records = Records(admin, name)

    def add(n: int) -> int:
        with connect() as connection, records.handling(5):
            return work.enqueue(connection, n)

    with running(app, "executor") as service:
        add(0)
        wait_for(lambda: ran == [0], timeout=60, what="the gate is open")
        wait_for(lambda: not read_attempts(admin), timeout=30, what="its row is gone")
        with own_broker.down():
            wait_for(
                lambda: not find_gate(service).find_ends(),
                timeout=30,
                what="it is too old",
            )
            held = add(1)
            wait_for(lambda: find_waiting(service), timeout=30, what="it waits")
            told = f"how far the group {other.name!r} is"
            wait_for(
                lambda: (
                    [
                        told in one.text
                        for one in find_reasons(app, held)
                        if one.code == "gated"
                    ]
                    == [True]
                ),
                timeout=60,
                what="a heartbeat says so",
            )
            assert read_attempts(admin) == [("work", 0)]
            assert ran == [0]
        wait_for(lambda: ran == [0, 1], timeout=60, what="it goes on by itself")
    other.close()


@pytest.mark.guarantee("K2")
def test_a_job_that_waits_survives_its_executor_and_waits_at_the_next(
    make, admin, connect, topic, group, ran, database_url, bootstrap_servers,
    start_process, wait_for,
):  # fmt: skip
    name, other = topic(1), group()
    produce(bootstrap_servers, name, RECORDS)
    worker = start_process(
        *("gated_jobs", database_url),
        topic=name,
        after=other.name,
        kafka_bootstrap_servers=bootstrap_servers,
        stale_after=1.0,
    )
    app = make(gate_refresh=REFRESH)

    @app.job(name="work", group="key", after=[(name, other.name)])
    def work(job, key: str) -> None:
        ran.append(job.attempt)

    records = Records(admin, name)
    with connect() as connection, records.handling(1):
        for _ in range(3):
            work.enqueue(connection, "a")
    wait_for(lambda: "waits 1" in worker.lines, timeout=60, what=lambda: worker.output)
    worker.kill()
    with running(app, "executor") as service:
        wait_for(
            lambda: find_waiting(service) == {f"{name}/0": 1},
            timeout=30,
            what="they wait",
        )
        assert read_attempts(admin) == [("work", 0)] * 3
        other.commit_soon(name, {0: 2})
        wait_for(lambda: ran == [1, 1, 1], timeout=30, what="all have run")
    assert "ran" not in worker.lines


@pytest.mark.guarantee("K22")
@pytest.mark.parametrize("tells", [True, False], ids=["told", "not told"])
def test_a_job_that_supersedes_others_waits_for_its_own_record(
    make, admin, database, bootstrap_servers, topic, group, ran, wait_for, tells
):
    name, other = topic(1), group()
    app = make(gate_refresh=REFRESH, home=name)

    @app.job(group="key", last_only=True, after=[(name, other.name)])
    def last(job, key: str, n: int) -> None:
        ran.append(n)

    @app.consumer(name, group=f"{name}-own", done=tells)
    def handle(record, conn) -> None:
        last.enqueue(conn, record.key, record.offset)

    def is_done(offset: int) -> bool:
        found = read_committed(bootstrap_servers, f"{name}-own.done", name)
        return found == {0: offset} or not tells

    with running(app, "consumers", "executor") as service:
        produce(bootstrap_servers, name, [("a", n) for n in range(4)])
        wait_for(
            lambda: find_waiting(service) == {f"{name}/0": 3},
            timeout=30,
            what="all wait",
        )
        # Two may run: the later one does, and the last one waits for its own record.
        other.commit_soon(name, {0: 2})
        wait_for(lambda: ran == [1], timeout=30, what="the second one has run")
        wait_for(lambda: is_done(2), timeout=30, what="two are done")
        other.commit_soon(name, {0: 4})
        wait_for(lambda: ran == [1, 3], timeout=30, what="the last one has run")
        wait_for(lambda: is_done(4), timeout=30, what="all are done")
    maintenance = Maintenance(database, {1})
    maintenance.start()
    wait_for(lambda: count(admin, "kept_places") == 0, what="no place is left")
    maintenance.stop()


def test_a_job_without_such_a_record_is_refused_or_put_off(
    make, admin, connect, topic, group, bootstrap_servers, ran, wait_for
):
    name, elsewhere, other = topic(1), topic(1), group()
    produce(bootstrap_servers, name, RECORDS)
    app = make(gate_refresh=REFRESH)
    other.commit_soon(name, {0: 100})

    @app.job(group="key", after=[(name, other.name), (name, "own.done")])
    def work(job, key: str) -> None:
        ran.append(key)

    comes_from: dict[str, AbstractContextManager[None]] = {
        f"comes from no record of '{name}'": nullcontext(),
        f"comes from a record of '{elsewhere}'": Records(
            admin, elsewhere, group="x"
        ).handling(1),
        "would wait for itself: 'own.done'": Records(admin, name).handling(1),
    }
    with connect() as connection:
        for text, handling in comes_from.items():
            with handling:
                with pytest.raises(PlaceError, match=text):
                    work.enqueue(connection, "a")
                with pytest.raises(PlaceError, match=text):
                    work.enqueue_many(connection, [{"key": "a"}])
        # The caller's transaction is intact.
        (found,) = connection.execute(
            "select jobs_lib.enqueue('work', '{\"key\": \"a\"}', \"group\" => 'a')"
        ).fetchone()
    with running(app, "executor"):
        told = "it comes from no record of"
        # It is tried again and again.
        wait_for(
            lambda: (
                [(one.code, told in one.text) for one in find_reasons(app, found)]
                == [("scheduled", True)]
            ),
            timeout=30,
            what="it is put off",
        )
    assert read_attempts(admin) == [("work", 0)]
    assert ran == []


def test_a_job_that_would_wait_for_itself_by_others_is_refused_by_the_enqueue(
    make, admin, connect, topic, ran
):
    name = topic(1)
    app = make(gate_refresh=REFRESH)
    app.consumer(name, group="own", done=True)(lambda record, conn: None)
    app.consumer(name, group="far", after=[(name, "own.done")])(
        lambda record, conn: None
    )
    app.consumer(name, group="free")(lambda record, conn: None)

    @app.job(after=[(name, "far")])
    def work(job) -> None: ...

    app.names_in_kafka()
    with connect() as connection:
        with (
            Records(admin, name).handling(1),
            pytest.raises(PlaceError, match=r"for itself: 'far' on .* for 'own\.done'"),
        ):
            work.enqueue(connection)
        with Records(admin, name, group="free").handling(1):
            work.enqueue(connection)


def test_a_discarded_job_that_is_retried_waits_for_its_own_record(
    make, admin, connect, topic, group, bootstrap_servers, ran, wait_for
):
    name, other = topic(1), group()
    produce(bootstrap_servers, name, RECORDS)
    app = make(gate_refresh=REFRESH)

    @app.job(retry=1, after=[(name, other.name)])
    def work(job) -> None:
        ran.append(job.id)
        if len(ran) == 1:
            raise RuntimeError("not yet")

    records = Records(admin, name)
    with connect() as connection, records.handling(5):
        job_id = work.enqueue(connection)
        # It stands in for a job of an earlier record, too.
        connection.execute(
            "insert into jobs_lib.kept_places values (%s, 2, %s, 'local/0')",
            (records.numbers[0], job_id),
        )
    other.commit_soon(name, {0: 6})
    with (
        heard("jobs.discarded", "job.failed") as told,
        running(app, "executor") as service,
    ):
        wait_for(lambda: len(told) == 2, timeout=30, what="it is discarded")
        other.commit_soon(name, {0: 4})
        wait_for(
            lambda: find_gate(service).find_ends().get(name) == {0: 4},
            timeout=30,
            what="the answer has come",
        )
        assert retry(app.database(), [job_id]).retried == 1
        wait_for(
            lambda: find_waiting(service) == {f"{name}/0": 5},
            timeout=30,
            what="it waits",
        )
        other.commit_soon(name, {0: 6})
        wait_for(lambda: ran == [job_id] * 2, timeout=30, what="it has run again")


def test_ten_thousand_jobs_that_wait_cost_the_others_nothing(
    make, admin, connect, topic, group, bootstrap_servers, wait_for, monkeypatch
):
    name, other = topic(1), group()
    produce(bootstrap_servers, name, [("k", n) for n in range(MANY)])
    app = make(gate_refresh=0.5, workers=4)
    done: list[str] = []

    @app.job(after=[(name, other.name)])
    def work(job) -> None:
        done.append("work")

    @app.job()
    def free(job) -> None:
        done.append("free")

    sent: list[tuple[str, int]] = []
    exchange = RoundTrip.exchange

    def count(self: Any, *batches: Any, **options: Any) -> Any:
        answers, failure = exchange(self, *batches, **options)
        for batch, answer in zip(batches, answers, strict=False):
            sent.extend(
                (query, len(rows))
                for (query, _), rows in zip(batch, answer or (), strict=False)
                if "gated" in query or query == "find_opened"
            )
        return answers, failure

    monkeypatch.setattr(RoundTrip, "exchange", count)
    records = Records(admin, name)
    admin.execute(
        "insert into jobs_lib.jobs (origin, type, payload, source, record_offset)"
        " select 'local/' || n %% 16, 'work', '{}', %s, n"
        " from generate_series(0, %s) n",
        (records.numbers[0], MANY - 1),
    )
    with running(app, "executor") as service:
        wait_for(
            lambda: find_waiting(service) == {f"{name}/0": MANY - 1},
            timeout=30,
            what="all are passed over",
        )
        # Each claim says that it has passed over some; it returns none of them.
        assert sum(rows for _, rows in sent) < MANY / 10
        before = len(sent)
        answers = find_gate(service)._asked_at
        with connect() as connection:
            free.enqueue_many(connection, [{} for _ in range(500)])
        wait_for(lambda: done.count("free") == 500, timeout=30, what="others run")
        wait_for(
            lambda: find_gate(service)._asked_at > answers + 2,
            timeout=30,
            what="Kafka has answered several times",
        )
        new = sent[before:]
        assert [query for query, _ in new if query == "find_opened"] == []
        # As few as there would be if none waited: windows that meet the new jobs.
        assert sum(rows for _, rows in new) < 500
        assert done.count("work") == 0
        for leap in (1, MANY // 2, MANY):
            other.commit_soon(name, {0: leap})
            wait_for(
                lambda leap=leap: done.count("work") == leap,
                timeout=60,
                what=lambda: f"{done.count('work')} have run",
            )
        # Each job was found about once.
        found = sum(rows for query, rows in sent if query == "find_opened")
        assert found < 2 * MANY
        wait_for(lambda: read_attempts(admin) == [], timeout=30, what="no row is left")
