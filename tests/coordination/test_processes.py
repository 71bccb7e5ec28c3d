"""Members as processes: shared partitions, kills and stalls, and what each delivers."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter, defaultdict

import pytest
from confluent_kafka import Producer

from jobs_lib.coordination.messages import ClaimingMessages, ClaimingPartition, Shared
from jobs_lib.coordination.world import Outcome
from tests.coordination.checker import count_repeats, judge_at_least_once, replay
from tests.coordination.fleet import find_owners, read_time
from tests.coordination.journals import read_log, read_run

INTERVAL = 0.5
WAIT = 60.0
GROUP = "shop.mailer"
HANDLED = re.compile(r"handled (\d+) (\d+) (\d+) \d+")


@pytest.fixture
def consume(run_process, bootstrap_servers):
    """A function that starts a process: `consume(log, topic, "a", batch=10)`."""

    def start(log, topic, client_id, **options):
        given = {
            "servers": bootstrap_servers,
            "log": log,
            "group": GROUP,
            "client_id": client_id,
            "topics": [topic],
            "interval": INTERVAL,
        }
        return run_process(
            "-m", "tests.support.coordinated", json.dumps(given | options)
        )

    return start


WITHOUT_DRIVERS = """
import sys

DRIVERS = {"psycopg", "psycopg_pool", "psycopg_binary", "sqlalchemy", "alembic"}


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in DRIVERS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Missing())

from jobs_lib import Settings
from jobs_lib.coordination import Consumer


def handle(records):
    print("handled", records[0].partition, records[0].offset, flush=True)


servers, log, topic, delivery = sys.argv[1:]
consumer = Consumer(
    Settings(kafka_bootstrap_servers=servers),
    log=log,
    group="shop.mailer",
    client_id="a",
    topics=[topic],
    handle=handle,
    delivery=delivery,
    interval=0.5,
)
consumer.run()
assert not DRIVERS & {one.partition(".")[0] for one in sys.modules}
print("ended", flush=True)
"""


def publish(servers: str, topic: str, count: int, partitions: int) -> None:
    """Write so many records to each partition."""
    producer = Producer({"bootstrap.servers": servers})
    for number, partition in itertools.product(range(count), range(partitions)):
        producer.produce(topic, str(number), partition=partition)
    producer.flush(WAIT)


def count_handled(*workers) -> Counter[tuple[int, int]]:
    """How often each record was given to a handler, by partition and offset."""
    found: Counter[tuple[int, int]] = Counter()
    for worker in workers:
        for line in list(worker.lines):
            if match := HANDLED.fullmatch(line):
                partition, first, end = map(int, match.groups())
                found.update((partition, one) for one in range(first, end))
    return found


def count_lines(worker, word: str) -> int:
    """How many lines of a process begin with a word."""
    return sum(line.startswith(f"{word} ") for line in list(worker.lines))


def find_claims(log) -> dict[Shared, int]:
    """The claim by which each partition is held."""
    with log.lock:
        return {
            shared: entry.holding.claim
            for world in log.get_worlds()
            for shared, entry in world.entries.items()
            if entry.holding is not None
        }


class Watched:
    """A log that keeps every record that it folds, with its outcome and time."""

    def __init__(self, log) -> None:
        self.log = log
        self.records: list[tuple[int, int, object, Outcome]] = []
        for place in log._places:
            place.fold = self._wrap(place, place.fold)

    def _wrap(self, place, real):
        def fold(offset, time_ms, partitions, said, own):
            outcome = real(offset, time_ms, partitions, said, own)
            self.records.append((place.number, time_ms, said, outcome))
            return outcome

        return fold

    def owners(self) -> dict[int, str]:
        """The client that holds each partition."""
        return find_owners(self.log)


@pytest.mark.guarantee("M1")
def test_five_processes_share_twenty_partitions_with_one_owner_each(
    log_topic, topic, consume, open_log, wait_for, bootstrap_servers
):
    log, data = log_topic(4), topic(20)
    watched = Watched(open_log(log, "watch", only_reads=True))
    publish(bootstrap_servers, data, 10, 20)
    names = [f"m-{number}" for number in range(5)]
    workers = [consume(log, data, one) for one in names]
    wait_for(
        lambda: [*Counter(watched.owners().values()).values()] == [4] * 5,
        timeout=WAIT,
        what=lambda: f"each holds four: {watched.owners()}",
    )
    wait_for(
        lambda: len(count_handled(*workers)) == 200,
        timeout=WAIT,
        what=lambda: "all are handled:\n" + "\n".join(one.output for one in workers),
    )
    for worker in workers:
        worker.signal(15)
    assert [worker.wait() for worker in workers] == [0] * 5
    watched.log.read_to_end()
    assert not watched.owners()
    # Nobody was killed. But a busy machine may let a process stand still for two
    # intervals, and the log then says so.
    runs = [read_run(*one) for one in zip(workers, names, strict=True)]
    history = replay(read_log(bootstrap_servers, log))
    ends = dict.fromkeys(range(20), 10)
    assert judge_at_least_once(history, runs, data, ends, most=10) == []


@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
def test_a_consumer_works_where_no_database_driver_can_be_imported(
    log_topic, topic, run_process, bootstrap_servers, delivery
):
    log, data = log_topic(1), topic(1)
    publish(bootstrap_servers, data, 1, 1)
    given = [bootstrap_servers, log, data, delivery]
    worker = run_process("-c", WITHOUT_DRIVERS, *given)
    worker.wait_for_line("handled 0 0", timeout=WAIT)
    worker.signal(15)
    assert worker.wait() == 0, worker.output
    assert "ended" in worker.lines


KILLED = [
    *("taken", "fetched", "claiming", "claim sent", "claim read back"),
    *("handling", "handled", "processed"),
]


@pytest.mark.guarantee("M14")
@pytest.mark.expects("loop.failed")
@pytest.mark.parametrize("by", ["kill", "stop"])
@pytest.mark.parametrize("step", KILLED)
@pytest.mark.slow
def test_at_most_once_nothing_is_handled_twice_wherever_a_process_stops(
    log_topic, topic, consume, wait_for, bootstrap_servers, step, by
):
    handle_at_most_once(
        log_topic, topic, consume, wait_for, bootstrap_servers, step, by
    )


@pytest.mark.guarantee("M14", "I32")
@pytest.mark.expects("loop.failed")
@pytest.mark.parametrize("step", ["claiming", "claim sent", "claim read back"])
def test_at_most_once_nothing_is_handled_twice_where_a_claim_stalls(
    log_topic, topic, consume, wait_for, bootstrap_servers, step
):
    handle_at_most_once(
        log_topic, topic, consume, wait_for, bootstrap_servers, step, "stop"
    )


def handle_at_most_once(log_topic, topic, consume, wait_for, servers, step, by):
    """Stop a process at a step, and let another one go on, and then the first."""
    log, data = log_topic(1), topic(1)
    publish(servers, data, 40, 1)
    more = {"delivery": "at_most_once", "batch": 10}
    times = 1 if step == "taken" else 2
    first = consume(log, data, "a", at={step: times}, by=by, **more)
    first.wait_for_line(f"at {step}")
    second = consume(log, data, "b", **more)
    # The takeover comes after two intervals, and the last batch ends at 40.
    second.wait_for_line(r"handled 0 \d+ 40", timeout=WAIT)
    if by == "stop":
        first.resume()
        first.wait_for_line(r"lost 0", timeout=WAIT)
        publish(servers, data, 5, 1)
        wait_for(
            lambda: sum(one[1] >= 40 for one in count_handled(first, second)) == 5,
            timeout=WAIT,
            what="what comes later is handled",
        )
    found = count_handled(first, second)
    assert max(found.values()) == 1
    # It may have lost the batch that it had claimed, and no more.
    missing = [one for one in range(40) if (0, one) not in found]
    assert len(missing) <= 10


@pytest.mark.guarantee("M17")
@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
def test_a_process_that_stalls_before_its_first_heartbeat_gets_nothing(
    log_topic, topic, consume, wait_for, bootstrap_servers, delivery
):
    log, data = log_topic(1), topic(1)
    publish(bootstrap_servers, data, 20, 1)
    more = {"delivery": delivery, "batch": 10}
    first = consume(log, data, "a", at={"claimed": 1}, by="stop", **more)
    first.wait_for_line("at claimed", timeout=WAIT)
    second = consume(log, data, "b", **more)
    second.wait_for_line(r"handled 0 10 20", timeout=WAIT)
    first.resume()
    # It goes on as a member that holds nothing, until the other one ends.
    second.signal(15)
    assert second.wait(timeout=WAIT) == 0, second.output
    publish(bootstrap_servers, data, 5, 1)
    first.wait_for_line(r"handled 0 20 \d+", timeout=WAIT)
    wait_for(lambda: len(count_handled(first, second)) == 25, timeout=WAIT)
    assert set(count_handled(first, second).values()) == {1}


def test_a_process_ends_whichever_of_its_threads_gets_the_signal(
    log_topic, topic, consume, bootstrap_servers
):
    log, data = log_topic(1), topic(1)
    publish(bootstrap_servers, data, 1, 1)
    worker = consume(log, data, "a", at={"handling": 1}, by="end")
    worker.wait_for_line("at handling", timeout=WAIT)
    assert worker.wait(timeout=15) == 0, worker.output


@pytest.mark.guarantee("M15")
@pytest.mark.parametrize("batch", [1, 7])
def test_at_most_once_a_kill_loses_one_batch_at_most(
    log_topic, topic, consume, wait_for, bootstrap_servers, batch
):
    log, data = log_topic(1), topic(1)
    publish(bootstrap_servers, data, 30, 1)
    more = {"delivery": "at_most_once", "batch": batch}
    first = consume(log, data, "a", at={"claim read back": 2}, **more)
    first.wait_for_line("at claim read back")
    second = consume(log, data, "b", **more)
    second.wait_for_line(r"handled 0 \d+ 30", timeout=WAIT)
    found = count_handled(first, second)
    assert max(found.values()) == 1
    assert sorted(set(range(30)) - {one for _, one in found}) == [
        *range(batch, 2 * batch)
    ]


@pytest.mark.guarantee("M16")
def test_at_least_once_a_kill_repeats_what_one_interval_did_and_loses_nothing(
    log_topic, topic, consume, open_log, wait_for, bootstrap_servers
):
    log, data = log_topic(1), topic(1)
    publish(bootstrap_servers, data, 200, 1)
    shared = Shared(GROUP, data, 0)
    watching = open_log(log, "watch", only_reads=True)
    first = consume(log, data, "a", batch=1, seconds=0.02)
    wait_for(lambda: (watching.find(shared).position or 0) > 20, timeout=WAIT)
    first.kill()
    done = len(count_handled(first))
    watching.read_to_end()
    told = watching.find(shared).position
    assert told is not None
    assert done - told <= count_repeats(1, INTERVAL, 0.02)
    second = consume(log, data, "b", batch=50)
    second.wait_for_line(r"handled 0 \d+ 200", timeout=WAIT)
    found = count_handled(first, second)
    assert set(found) == {(0, number) for number in range(200)}
    assert sum(found.values()) - 200 == done - told


@pytest.mark.guarantee("M18", "I32")
@pytest.mark.expects("loop.failed")
def test_at_least_once_a_process_that_wakes_finishes_one_batch_at_most(
    log_topic, topic, consume, wait_for, bootstrap_servers
):
    log, data = log_topic(1), topic(1)
    publish(bootstrap_servers, data, 60, 1)
    first = consume(log, data, "a", batch=10, at={"handled": 2}, by="stop")
    first.wait_for_line("at handled")
    before = len(count_handled(first))
    second = consume(log, data, "b", batch=10)
    second.wait_for_line(r"handled 0 \d+ 60", timeout=WAIT)
    first.resume()
    first.wait_for_line("lost 0", timeout=WAIT)
    found = count_handled(first, second)
    assert set(found) == {(0, number) for number in range(60)}
    # It was inside the handler, and no other batch was begun when it woke.
    assert len(count_handled(first)) == before


@pytest.mark.guarantee("I31")
def test_a_process_whose_time_of_day_leaps_keeps_what_it_holds(
    log_topic, topic, consume, open_log, wait_for, bootstrap_servers, tmp_path
):
    log, data = log_topic(2), topic(4)
    watched = Watched(open_log(log, "watch", only_reads=True))
    clock = tmp_path / "clock"
    clock.write_text("3600", encoding="ascii")
    worker = consume(log, data, "a", clock=str(clock))
    wait_for(lambda: count_lines(worker, "taken") == 4, timeout=WAIT)
    # The log is read here, too.
    wait_for(lambda: len(find_claims(watched.log)) == 4, timeout=WAIT)
    claims = find_claims(watched.log)
    for number, shift in enumerate([86_400, -86_400, 0], 1):
        clock.write_text(str(shift), encoding="ascii")
        # Long enough for a holding to become stale, by the brokers' clock.
        until = read_time(watched.log) + 2.5 * INTERVAL * 1_000
        wait_for(lambda at=until: read_time(watched.log) > at, timeout=WAIT)
        publish(bootstrap_servers, data, 5, 4)
        wait_for(
            lambda count=number: len(count_handled(worker)) == 20 * count,
            timeout=WAIT,
            what=lambda: f"all are handled\n{worker.output}",
        )
    assert set(count_handled(worker).values()) == {1}
    assert find_claims(watched.log) == claims


@pytest.mark.expects("loop.failed")
def test_a_process_that_stood_still_joins_again(
    log_topic, topic, consume, open_log, wait_for
):
    log, data = log_topic(2), topic(4)
    watched = Watched(open_log(log, "watch", only_reads=True))
    first, second = consume(log, data, "a"), consume(log, data, "b")
    del second
    wait_for(
        lambda: Counter(watched.owners().values()) == {"a": 2, "b": 2}, timeout=WAIT
    )
    first.pause()
    wait_for(
        lambda: Counter(watched.owners().values()) == {"b": 4},
        timeout=WAIT,
        what="the other one has all",
    )
    first.resume()
    wait_for(
        lambda: Counter(watched.owners().values()) == {"a": 2, "b": 2},
        timeout=WAIT,
        what=lambda: f"both share again: {watched.owners()}\n{first.output}",
    )


@pytest.mark.guarantee("M11", "FK18")
@pytest.mark.expects("loop.failed")
@pytest.mark.parametrize(
    "successor", ["its restart", pytest.param("another member", marks=pytest.mark.slow)]
)
def test_a_process_that_wakes_beside_its_restart_ends_and_its_restart_goes_on(
    log_topic, topic, consume, open_log, wait_for, successor
):
    log, data = log_topic(1), topic(2)
    watched = Watched(open_log(log, "watch", only_reads=True))
    first = consume(log, data, "a")
    wait_for(lambda: Counter(watched.owners().values()) == {"a": 2}, timeout=WAIT)
    first.pause()
    if successor == "another member":
        consume(log, data, "b")
        wait_for(lambda: Counter(watched.owners().values()) == {"b": 2}, timeout=WAIT)
    again = consume(log, data, "a")
    again.wait_for_line(r"taken \d", timeout=WAIT)
    instance = read_run(again, "a").instance_id
    # It has begun: what an earlier run says from now on is too late.
    begun = read_time(watched.log)
    wait_for(lambda: read_time(watched.log) > begun + 1_000 * INTERVAL, timeout=WAIT)
    first.resume()
    assert first.wait(timeout=WAIT) != 0
    assert "has taken its partitions over" in first.output
    woken = read_time(watched.log)
    wait_for(lambda: read_time(watched.log) > woken + 3_000 * INTERVAL, timeout=WAIT)
    runs = {
        entry.holding.instance_id
        for entry in watched.log.get_world(0).entries.values()
        if entry.holding is not None and entry.holding.client_id == "a"
    }
    assert runs == {instance}, again.output


@pytest.mark.guarantee("M22", "M23")
@pytest.mark.expects("loop.failed")
@pytest.mark.slow
def test_random_kills_and_stalls_leave_one_holder_and_no_claimed_record_twice(
    log_topic, topic, consume, open_log, wait_for, bootstrap_servers
):
    log, data = log_topic(3), topic(6)
    watched = Watched(open_log(log, "watch", only_reads=True))
    more = {"delivery": "at_most_once", "batch": 5, "seconds": 0.01}
    workers = {name: consume(log, data, name, **more) for name in "abc"}
    ended = []
    for round_, name in enumerate("abcabcabc"):
        publish(bootstrap_servers, data, 20, 6)
        count = len(watched.records)
        wait_for(lambda so_far=count: len(watched.records) > so_far + 60, timeout=WAIT)
        if round_ % 2:
            workers[name].pause()
            wait_for(
                lambda one=name: one not in watched.owners().values(), timeout=WAIT
            )
            workers[name].resume()
        else:
            ended.append(workers[name])
            workers[name].kill()
            workers[name] = consume(log, data, name, **more)
    watched.log.read_to_end()
    found = count_handled(*ended, *workers.values())
    assert max(found.values()) == 1
    claimed: defaultdict[int, int] = defaultdict(int)
    for _, _, said, outcome in watched.records:
        if isinstance(said, ClaimingMessages) and outcome is Outcome.VALID:
            assert (said.first or 0) == claimed[said.shared.partition]
            claimed[said.shared.partition] = said.end
    assert sum(
        isinstance(said, ClaimingPartition) and outcome is Outcome.VALID
        for _, _, said, outcome in watched.records
    )
