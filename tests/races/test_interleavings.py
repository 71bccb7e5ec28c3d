"""Two sessions act on the same jobs: each race step by step, in both orders."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from jobs_lib import Discard
from jobs_lib.errors import FencedError
from jobs_lib.executor.claiming.rows import JOB, ClaimRow
from jobs_lib.executor.lane import Result
from jobs_lib.jobs.job import RetryAfter
from tests.races.conftest import ORIGIN, run

# A take-over against the old owner's remaining actions


def test_a_completion_comes_first_and_the_take_over_waits_for_it(scene):
    job = scene.enqueue()
    pod, heir = scene.pod(ORIGIN), scene.pod()
    pod.round()
    handler = scene.begin()
    assert scene.send(handler, *scene.completion(pod, pod.start())) == [(job,)]
    assert scene.waits(scene.connect(), "lock_origins", scene.taking(heir))
    handler.commit()
    heir.take_over(ORIGIN)
    assert run(heir) == []
    assert scene.ends(job) == ["completed"]


def test_a_take_over_comes_first_and_the_completion_waits_and_changes_nothing(scene):
    job = scene.enqueue()
    pod, heir = scene.pod(ORIGIN), scene.pod()
    pod.round()
    completion = scene.completion(pod, pod.start())
    taker = scene.begin()
    scene.send(taker, "lock_origins", scene.taking(heir))
    scene.send(taker, "take_origins", scene.taking(heir))
    zombie = scene.connect()
    assert scene.waits(zombie, *completion)
    taker.commit()
    assert scene.send(zombie, *completion) == []
    assert scene.state(job) == ("available", 0, 0)
    assert scene.ends(job) == []


def test_a_take_over_waits_for_a_claim_and_counts_its_jobs_as_cut_off(scene):
    job = scene.enqueue()
    pod, heir = scene.pod(ORIGIN), scene.pod()
    pod.claimer.windows.hint(ORIGIN)
    claim = scene.begin()
    assert scene.send(claim, *pod.claimer.prepare(8))[0][2] == job
    assert scene.waits(scene.connect(), "lock_origins", scene.taking(heir))
    claim.commit()
    heir.take_over(ORIGIN)
    assert scene.state(job) == ("available", 0, 1)
    assert run(heir) == [job]


def test_a_take_over_comes_first_and_the_claim_passes_it_by_without_waiting(scene):
    pod, heir = scene.pod(ORIGIN), scene.pod()
    job = scene.enqueue()
    taker = scene.begin()
    scene.send(taker, "lock_origins", scene.taking(heir))
    pod.rounds()  # a wait would fail by its lock_timeout
    scene.send(taker, "take_origins", scene.taking(heir))
    taker.commit()
    pod.rounds()
    assert pod.startable == []
    heir.take_over(ORIGIN)
    assert run(heir) == [job]
    assert scene.state(job) is None


@pytest.mark.guarantee("S12", "I11")
@pytest.mark.parametrize("name", ["claim", "claim_plain"])
@pytest.mark.parametrize("change", ["owner = gen_random_uuid()", "epoch = epoch + 1"])
def test_an_old_owner_claims_nothing_after_the_take_over(scene, name, change):
    pod = scene.pod(ORIGIN)
    job = scene.enqueue()
    pod.claimer.cursors[ORIGIN].all_plain = name == "claim_plain"
    pod.claimer.windows.hint(ORIGIN)
    query, parameters = pod.claimer.prepare(8)
    assert query == name

    def claim() -> list[int]:
        connection = scene.begin()
        rows = [ClaimRow(*row) for row in scene.send(connection, query, parameters)]
        connection.rollback()
        return [row.id for row in rows if row.kind == JOB]

    assert claim() == [job]
    scene.admin.execute(f"update jobs_lib.origins set {change}")
    assert claim() == []


@pytest.mark.guarantee("J12")
def test_within_one_claim_the_highest_priority_starts_first(scene):
    pod = scene.pod(ORIGIN)
    # While one of them is not done, the executor knows that priorities exist.
    scene.enqueue(priority="high")
    pod.rounds()
    first = pod.start()
    levels = ["batch", "normal", "high", "normal", "high"]
    ids = [
        scene.enqueue(priority=level, group=f"g{n}" if n > 2 else None)
        for n, level in enumerate(levels)
    ]
    pod.round()
    started = [job.id for job in pod.start_all()]
    # Of two equal jobs the older one starts first.
    assert started == [ids[n] for n in (2, 4, 1, 3, 0)]
    pod.finish(first)


@pytest.mark.expects("jobs.fenced")
def test_a_retry_comes_after_the_take_over_and_changes_nothing(scene):
    job = scene.enqueue()
    pod, heir = scene.pod(ORIGIN), scene.pod()
    pod.round()
    pod.finish(pod.start(), RetryAfter(3600))
    heir.take_over(ORIGIN)
    pod.rounds()
    assert scene.state(job) == ("available", 0, 1)
    assert run(heir) == [job]


def test_an_old_owner_promotes_nothing_after_the_take_over(scene):
    pod, heir = scene.pod(ORIGIN), scene.pod()
    job = scene.enqueue()
    scene.admin.execute(
        "update jobs_lib.jobs set state = 'scheduled', run_at = clock_timestamp()"
    )
    promotion = pod.dispatcher._poller._prepare_promote() | {"limit": 9}
    taker = scene.begin()
    scene.send(taker, "lock_origins", scene.taking(heir))
    # It does not wait for that job, and finds none of its own after it.
    assert scene.send(scene.connect(), "promote", promotion) == []
    scene.send(taker, "take_origins", scene.taking(heir))
    taker.commit()
    assert scene.send(scene.connect(), "promote", promotion) == []
    assert scene.state(job)[0] == "scheduled"
    heir.take_over(ORIGIN)
    assert run(heir) == [job]


@pytest.mark.expects("jobs.fenced")
@pytest.mark.parametrize("error", [None, RetryAfter(0)], ids=["ends", "fails"])
def test_an_attempt_from_before_a_hand_over_settles_nothing_when_the_origin_is_back(
    scene, error
):
    job = scene.enqueue()
    pod = scene.pod(ORIGIN)
    pod.round()
    old = pod.start()
    pod.leave(ORIGIN, hurried=True)
    pod.take_over(ORIGIN)
    pod.rounds()
    assert pod.startable == []  # not beside itself
    pod.finish(old, error)
    pod.rounds(5)
    assert scene.state(job) == ("available", 0, 0)
    new = pod.start()
    assert (new.id, new.attempt) == (old.id, old.attempt)
    assert list(pod.claimer.in_flight.jobs.values()) == [new]
    pod.finish(new)
    pod.rounds()
    assert scene.ends(job) == ["completed"]
    assert scene.admin.execute("select * from jobs_lib.claims").fetchall() == []


# A handler's own transaction


def effect(connection, pod, job) -> None:
    connection.execute("insert into effects values (%s, %s)", (job.id, pod.id))


@pytest.mark.expects("jobs.fenced")
def test_a_take_over_waits_for_no_handler_and_its_commit_is_refused(scene):
    job = scene.enqueue()
    pod, heir = scene.pod(ORIGIN), scene.pod()
    pod.round()
    running = pod.start()
    effect(pod.begin(running), pod, running)
    heir.take_over(ORIGIN)  # at once, while the handler is in its transaction
    outcome = pod.commit(running)
    assert outcome.result is Result.FENCED
    heir.rounds()
    again = heir.start()
    assert (again.id, again.attempt) == (job, 2)
    effect(heir.begin(again), heir, again)
    heir.commit(again)
    rows = scene.admin.execute("select * from effects").fetchall()
    assert rows == [(job, heir.id)]


@pytest.mark.expects("jobs.fenced")
@pytest.mark.guarantee("I12", "FP16", "J6")
def test_a_handler_that_outlives_a_hand_over_commits_nothing_beside_its_successor(
    scene,
):
    job = scene.enqueue()
    pod, heir = scene.pod(ORIGIN), scene.pod()
    pod.round()
    running = pod.start()
    effect(pod.begin(running), pod, running)
    pod.leave(ORIGIN, hurried=True)
    heir.take_over(ORIGIN)
    heir.rounds()
    again = heir.start()
    # There was no crash, so both attempts have the same number.
    assert again.attempt == running.attempt == 1
    assert pod.commit(running).result is Result.FENCED
    effect(heir.begin(again), heir, again)
    heir.commit(again)
    rows = scene.admin.execute("select * from effects").fetchall()
    assert rows == [(job, heir.id)]


def test_a_take_over_waits_for_a_handler_that_is_committing(scene):
    job = scene.enqueue()
    pod, heir = scene.pod(ORIGIN), scene.pod()
    pod.round()
    running = pod.start()
    handler = scene.begin()
    effect(handler, pod, running)
    completion = pod._connections.completion(handler, running)
    handler.execute(completion.removesuffix(b"commit"))
    assert scene.waits(scene.connect(), "lock_origins", scene.taking(heir))
    handler.commit()
    heir.take_over(ORIGIN)
    assert run(heir) == []
    assert scene.effects() == [job]


def test_two_that_complete_the_same_jobs_wait_for_each_other_in_one_order(
    scene, wait_for
):
    first, second, third = (scene.enqueue(group="g") for _ in range(3))
    other = scene.enqueue()
    # Like a retry, this moves the first row behind all others.
    move = "update jobs_lib.jobs set priority = priority where id = %s"
    scene.admin.execute(move, (first,))
    pod = scene.pod(ORIGIN)
    pod.rounds()
    running = {job.id: job for job in pod.start_all()}
    for before in (first, second):
        pod.finish(running[before])
        running |= {job.id: job for job in pod.start_all()}
    ended = [running[job] for job in (first, second, other)]
    settling, handler = scene.connect(), scene.begin()
    for one in (settling, handler):
        one.execute("set lock_timeout = 0")
    completion = pod._connections.completion(handler, running[third])
    holder = scene.begin()
    holder.execute("select from jobs_lib.jobs where id = %s for update", (other,))

    def await_wait(connection: psycopg.Connection) -> None:
        waits = "select from pg_stat_activity where pid = %s and wait_event_type = %s"
        place = (connection.info.backend_pid, "Lock")
        wait_for(lambda: scene.admin.execute(waits, place).rowcount, what="it waits")

    with ThreadPoolExecutor(2) as threads:
        settled = threads.submit(scene.send, settling, *scene.completion(pod, *ended))
        await_wait(settling)
        completed = threads.submit(handler.execute, completion)
        await_wait(handler)
        holder.rollback()
        assert len(settled.result(30)) == 3
        completed.result(30)
    for job in (first, second, third, other):
        assert scene.ends(job) == ["completed"]


@pytest.mark.guarantee("I12", "FP16")
def test_a_take_over_waits_for_a_consumer_that_is_committing(scene):
    pod, heir = scene.pod(), scene.pod()
    taking = {**scene.taking(pod), "role": "consume:readers"}
    partition = {"group": "readers", "topic": "local", "partition": 1}
    scene.send(scene.admin, "make_origins", taking)
    ((_, epoch),) = scene.send(scene.admin, "take_origins", taking)
    place = {"group": "readers", "topics": ["local"], "partitions": [1]}
    scene.send(scene.admin, "make_offsets", place)
    consumer = scene.begin()
    moved = {"owner": pod.id, "epoch": epoch, "expected": None, "next_offset": 5}
    scene.send(consumer, "begin_block", {"block": "b"})
    block = {"block": "b", "appended_at": None}
    scene.send(consumer, "advance_offset", partition | moved | block)
    taking["owner"] = heir.id
    assert scene.waits(scene.connect(), "lock_origins", taking)
    consumer.commit()
    assert not scene.waits(scene.connect(), "lock_origins", taking)
    assert scene.send(scene.admin, "read_offsets", place) == [("local", 1, 5)]


@pytest.mark.expects("jobs.fenced")
@pytest.mark.parametrize("late", [True, False], ids=["settled", "unsettled"])
def test_a_timed_out_attempt_commits_before_its_time_out_is_written_or_never(
    scene, late
):
    job = scene.enqueue()
    pod = scene.pod(ORIGIN)
    pod.round()
    running = pod.start()
    effect(pod.begin(running), pod, running)
    pod.time_out(running)
    transaction = pod.open_late.pop(running)
    if late:
        pod.round()
        with pytest.raises(FencedError):
            transaction.__exit__(None, None, None)
    else:
        transaction.__exit__(None, None, None)
    again = run(pod)
    assert again == ([job] if late else [])
    assert scene.effects() == ([] if late else [job])
    assert scene.ends(job) == ["completed"]


def test_a_group_goes_on_only_when_the_end_of_a_failed_job_is_written(scene):
    # Without this, a crash would bring the job back behind later jobs' effects.
    first, second = scene.enqueue(group="g"), scene.enqueue(group="g")
    pod, heir = scene.pod(ORIGIN), scene.pod()
    pod.rounds()
    pod.finish(pod.start(), Discard("no"))
    while pod.startable:
        if job := pod.start():
            effect(pod.begin(job), pod, job)
            pod.commit(job)
    heir.take_over(ORIGIN)
    assert run(heir, 8) == [first, second]


def test_a_row_that_a_handler_has_completed_makes_no_second_lane(scene):
    # The head ends between the making of a claim and its run. Then its successor in the
    # group looks like a head, while its lane is in flight.
    first, second = scene.enqueue(group="g"), scene.enqueue(group="g")
    pod = scene.pod(ORIGIN)
    pod.rounds()
    running = pod.start()
    pod.begin(running)
    cursor = pod.claimer.cursors[ORIGIN]
    cursor.rewind()
    cursor.all_plain = False
    claim = pod.claimer.prepare(8)
    pod.commit(running)
    rows = scene.send(pod._connection, *claim)
    assert [row[2] for row in rows if row[0] == 0] == []
    assert [row[2] for row in rows if row[0] == 2] == [second]
    assert run(pod) == [second]
    assert scene.ends(first) == scene.ends(second) == ["completed"]


# Cancelling


def cancelling(job: int) -> dict[str, object]:
    return {
        "role": "execute", "origins": [ORIGIN], "ids": [job], "keep": 1,
        "stale_after": 3600,
    }  # fmt: skip


def test_a_claim_comes_first_and_cancelling_waits_and_then_asks(scene):
    job = scene.enqueue()
    pod = scene.pod(ORIGIN)
    pod.claimer.windows.hint(ORIGIN)
    claim, operator = scene.begin(), scene.connect()
    scene.send(claim, *pod.claimer.prepare(8))
    assert scene.waits(operator, "lock_jobs_origins", cancelling(job))
    claim.commit()
    with operator.transaction():
        scene.send(operator, "lock_jobs_origins", cancelling(job))
        became = scene.send(operator, "cancel_jobs", cancelling(job))
    assert became == [(job, "requested")]


@pytest.mark.parametrize("before", [None, 3, 2**62], ids=["first", "again", "foreign"])
@pytest.mark.parametrize("name", ["claim", "claim_plain"])
def test_cancelling_comes_between_a_claims_snapshot_and_its_lock(
    scene, wait_for, name, before
):
    job, other = scene.enqueue(), scene.enqueue()
    pod, operator = scene.pod(ORIGIN), scene.begin()
    # An earlier cancellation has left this, here or on the server of a dump.
    scene.admin.execute("update jobs_lib.origins set changed_by = %s", (before,))
    pod.claimer.cursors[ORIGIN].all_plain = name == "claim_plain"
    pod.claimer.windows.hint(ORIGIN)
    query, parameters = pod.claimer.prepare(8)
    assert query == name
    # The claim waits in its middle: it has its snapshot, and not yet the origin's row.
    text = scene.database.queries[name].as_string(scene.admin)
    for old, new in (
        (
            "with own as",
            "with held as materialized (select pg_advisory_lock(1)), own as",
        ),
        ("where o.role", "where exists (select from held) and o.role"),
    ):
        assert old in text
        text = text.replace(old, new, 1)
    operator.execute("select pg_advisory_xact_lock(1)")
    claim = scene.connect()
    claim.execute("set lock_timeout = 0")
    with ThreadPoolExecutor(1) as pool:
        claimed = pool.submit(lambda: claim.execute(text, parameters).fetchall())
        wait_for(
            lambda: (
                scene.admin.execute(
                    "select from pg_locks where locktype = 'advisory' and not granted"
                ).fetchone()
                is not None
            ),
            what="the claim has its snapshot",
        )
        scene.send(operator, "lock_jobs_origins", cancelling(job))
        scene.send(operator, "cancel_jobs", cancelling(job))
        operator.commit()
        assert [row[2] for row in claimed.result(10) if row[0] == 0] == []
    assert scene.ends(job) == ["cancelled"]
    assert run(pod) == [other]


def test_cancelling_comes_first_and_the_claim_finds_nothing(scene):
    pod = scene.pod(ORIGIN)
    job = scene.enqueue()
    operator = scene.begin()
    scene.send(operator, "lock_jobs_origins", cancelling(job))
    became = scene.send(operator, "cancel_jobs", cancelling(job))
    assert became == [(job, "cancelled")]
    pod.rounds()
    assert pod.startable == []
    operator.commit()
    assert run(pod) == []
    assert scene.ends(job) == ["cancelled"]


@pytest.mark.parametrize("cancelled_first", [True, False])
def test_a_job_that_is_cancelled_while_it_completes_ends_once(scene, cancelled_first):
    job = scene.enqueue()
    pod = scene.pod(ORIGIN)
    pod.round()
    completion = scene.completion(pod, pod.start())
    operator, settling = scene.begin(), scene.begin()
    if cancelled_first:
        scene.send(operator, "lock_jobs_origins", cancelling(job))
        assert scene.waits(scene.connect(), *completion)
        became = scene.send(operator, "cancel_jobs", cancelling(job))
        assert became == [(job, "requested")]
        operator.commit()
        assert scene.send(settling, *completion) == [(job,)]
        settling.commit()
    else:
        assert scene.send(settling, *completion) == [(job,)]
        assert scene.waits(scene.connect(), "lock_jobs_origins", cancelling(job))
        settling.commit()
        scene.send(operator, "lock_jobs_origins", cancelling(job))
        assert scene.send(operator, "cancel_jobs", cancelling(job)) == []
        operator.commit()
    assert scene.ends(job) == ["completed"]


# Unique keys


@pytest.mark.parametrize("commits", [True, False], ids=["commit", "rollback"])
def test_an_enqueue_of_a_key_waits_for_the_completion_of_its_job(scene, commits):
    job = scene.enqueue(unique="k")
    pod = scene.pod(ORIGIN)
    pod.round()
    completion = scene.completion(pod, pod.start())
    settling, other = scene.begin(), scene.begin()
    scene.send(settling, *completion)
    with pytest.raises(psycopg.errors.LockNotAvailable):
        scene.enqueue(other, unique="k")
    other.rollback()
    settling.commit() if commits else settling.rollback()
    again = scene.enqueue(unique="k")
    assert (again == job) is not commits


def test_an_enqueue_of_a_key_before_the_completion_returns_the_old_job(scene):
    job = scene.enqueue(unique="k")
    pod = scene.pod(ORIGIN)
    pod.round()
    other = scene.begin()
    assert scene.enqueue(other, unique="k") == job
    pod.finish(pod.start())
    pod.round()
    other.commit()
    assert scene.ends(job) == ["completed"]
    assert run(pod) == []
