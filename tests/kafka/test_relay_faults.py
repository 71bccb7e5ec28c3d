"""A relay dies or waits in vain; one relay is alone; some rows leave first."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import psycopg
import pytest

from jobs_lib.coordination.log_topic import WANTED
from jobs_lib.partitioner import choose_shard
from jobs_lib.postgres.migrate import migrate
from tests.support.apps import count, heard, make_app, running
from tests.support.outbox.writers import Writers
from tests.support.reexports import SHARDS, add_rows, write_reexport
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from tests.support.outbox.stage import Stage

PARTITIONS = 4
BLOCK = 10
STALE_AFTER = 3.0
QUICK = {
    "relay_block": BLOCK,
    "stale_after": STALE_AFTER,
    "heartbeat_interval": 0.2,
    "session_timeout": 6.0,
}


@pytest.fixture
def single_url(postgres_server):
    """The URL of a database with one shard in its outbox."""
    name = f"single_{time.monotonic_ns()}"
    with psycopg.connect(postgres_server.url, autocommit=True) as admin:
        admin.execute(f"create database {name}")
        migrate(postgres_server.url_of(name), shards=1)
        yield postgres_server.url_of(name)
        admin.execute(f"drop database {name} with (force)")


@pytest.fixture
def stage(single_url, make_stage):
    """A stage with one shard in its outbox."""
    return make_stage(single_url, PARTITIONS, **QUICK)


def write(stage: Stage, count: int, first: int = 1, entities: int = 5) -> None:
    """Make this many changes of some entities, one a transaction, from ``first`` on."""
    with psycopg.connect(stage.url) as connection:
        for n in range(first, first + count):
            key, value = f"k{n % entities}", {"n": n}
            stage.events.send(connection, key=key, value=value, version=n)
            if n % 7 == 0:
                stage.states.tombstone(connection, key=key, version=n)
            else:
                stage.states.send(connection, key=key, value=value, version=n)
            connection.commit()


@pytest.mark.guarantee("FP4")
def test_a_kill_between_the_send_and_the_delete_repeats_one_block_in_order(stage):
    write(stage, 40)
    before = stage.count_left()
    doomed = stage.start_relay("doomed", strikes={"sent": "SIGKILL"})
    assert doomed.wait() == -signal.SIGKILL
    assert stage.count_left() == before
    stage.start_relay("heir")
    stage.await_empty()
    # Records that had been sent come again, and the rest follows.
    verdict = stage.judge(repeats=BLOCK)
    assert not verdict.violations, str(verdict)
    assert 0 < verdict.repeats <= BLOCK


@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("FK14")
def test_rows_without_a_confirmed_delivery_are_sent_again(stage, own_broker):
    write(stage, 40)
    before = stage.count_left()
    # It dies while it waits for the delivery.
    doomed = stage.start_relay("doomed", strikes={"full": "SIGKILL"})
    assert doomed.wait() == -signal.SIGKILL
    assert stage.count_left() == before
    # This relay waits in vain.
    waiting = stage.start_relay(
        "waiting",
        strikes={"full": "SIGSTOP"},
        kafka_bootstrap_servers=own_broker.proxied,
    )
    waiting.wait_for_line("^struck full")
    own_broker.proxy.freeze()
    waiting.resume()
    waiting.wait_for_line("^failed relay shard 0", timeout=30)
    assert stage.count_left() == before
    own_broker.proxy.thaw()
    stage.await_empty()
    # Records without a confirmation were not committed: nothing comes twice, unless
    # the relay fails again, since a busy machine stands still.
    failures = stage.count_lines("^failed relay shard 0|^fenced by")
    verdict = stage.judge(repeats=BLOCK * (failures - 1))
    assert not verdict.violations, str(verdict)


@pytest.mark.expects("loop.failed")
@pytest.mark.guarantee("FK7")
def test_a_relay_that_does_not_reach_kafka_leaves_its_shards_to_others(
    database_url, make_stage, own_broker
):
    # On a busy machine heartbeats and answers of Kafka come late. A relay that is taken
    # for dead, or leaves its shards, before a delete repeats records, and rightly so.
    patient = QUICK | {"stale_after": 60.0, "session_timeout": 10.0}
    stage = make_stage(database_url, PARTITIONS, **patient)
    stage.start_relay("near", session_timeout=60.0)
    stage.start_relay("far", kafka_bootstrap_servers=own_broker.proxied)
    stage.await_owners("near", "far")
    write(stage, 40)
    stage.await_empty()
    own_broker.proxy.hold()
    write(stage, 40, first=41)
    # It reaches PostgreSQL and sends heartbeats: as a process it seems as alive as the
    # other.
    stage.await_owners("near")
    stage.await_empty()
    own_broker.proxy.release()
    stage.await_owners("near", "far")
    write(stage, 40, first=81)
    stage.await_empty()
    verdict = stage.judge(repeats=0)
    assert not verdict.violations, str(verdict)


@pytest.mark.guarantee("M24")
# The broker may take long to abort a transaction that the killed one has left open.
@pytest.mark.expects("loop.failed")
def test_the_log_gives_the_shards_of_a_killed_relay_to_another_one(
    database_url, make_stage, own_broker
):
    over_log = {
        "ownership": "coordination",
        "coordination_topic": own_broker.create(2, WANTED),
        "coordination_interval": 2.0,
        # The database would take it for alive.
        "stale_after": 300.0,
        "session_timeout": 60.0,
    }
    stage = make_stage(database_url, PARTITIONS, **QUICK | over_log)
    stage.start_relay("doomed")
    stage.start_relay("heir")
    stage.await_owners("doomed", "heir")
    # So many that both have some of them in their shards.
    write(stage, 40, entities=40)
    stage.await_empty()
    before = count_sent(stage)
    assert min(before.values()) > 0
    stage.relays["doomed"].kill()
    # Nothing was on its way. So each row is sent once, those of its shards, too.
    write(stage, 40, first=41, entities=40)
    stage.await_owners("heir")
    stage.await_empty()
    verdict = stage.judge(repeats=0)
    assert not verdict.violations, str(verdict)
    assert count_sent(stage)["doomed"] == before["doomed"]


@pytest.mark.slow
@pytest.mark.expects("loop.failed", "origins.lost")
def test_relays_that_all_lose_kafka_go_on_when_it_is_back(
    database_url, make_stage, own_broker
):
    stage = make_stage(database_url, PARTITIONS, **QUICK)
    for pod in ("r0", "r1"):
        stage.start_relay(pod, kafka_bootstrap_servers=own_broker.proxied)
    stage.await_owners("r0", "r1")
    own_broker.proxy.hold()
    write(stage, 40)
    wait_for(lambda: stage.count_lines("^left relay"), timeout=30, what="one leaves")
    own_broker.proxy.release()
    stage.await_empty()
    stage.await_owners("r0", "r1")
    verdict = stage.judge(repeats=0)
    assert not verdict.violations, str(verdict)


def count_sent(stage: Stage) -> dict[str, int]:
    """Count the blocks that each relay has sent."""
    return {
        pod: sum(line.startswith("sent") for line in list(worker.lines))
        for pod, worker in stage.relays.items()
    }


def find_sender(stage: Stage) -> tuple[str, int]:
    """Return the sending relay and its epoch, read while no take-over happens."""
    query = (
        "select p.pod, o.epoch from jobs_lib.origins o"
        " join jobs_lib.processes p on p.id = o.owner where o.role = 'relay'"
    )
    with psycopg.connect(stage.url, autocommit=True) as connection:

        def look() -> tuple[str, int] | None:
            owned, before = connection.execute(query).fetchall(), count_sent(stage)
            wait_for(
                lambda: sum(count_sent(stage).values()) > sum(before.values()) + 5,
                timeout=30,
                what=lambda: f"a relay sends: {stage.output}",
            )
            after = count_sent(stage)
            if not owned or connection.execute(query).fetchall() != owned:
                # A process that has just joined may be the owner.
                return None
            ((pod, epoch),) = owned
            assert [one for one in after if after[one] > before[one]] == [pod]
            return pod, epoch

        found = wait_for(look, timeout=30, what="one sends alone")
        assert found is not None
        return found


@pytest.mark.guarantee("W9")
# The broker may take long to abort the transaction that the killed one has left open.
@pytest.mark.expects("loop.failed")
def test_one_of_several_relays_sends_a_shard_until_it_ends(stage):
    for pod in ("r0", "r1"):
        stage.start_relay(pod)
    with psycopg.connect(stage.url, autocommit=True) as admin:
        ready = "processes where started_at < clock_timestamp() - interval '1 s'"
        wait_for(
            lambda: count(admin, ready) == 2,
            timeout=60,
            what="both have found their share",
        )
    wait_for(stage.owners, timeout=30, what="one has the shard")
    with Writers(stage.url, stage.states, stage.events, seed=1):
        gone, first = find_sender(stage)
        stage.explain("kills", 1)
        stage.relays[gone].kill()
        wait_for(
            lambda: {*stage.owners()} - {gone},
            timeout=30,
            what="the other one takes over",
        )
        # By the server's clock, however late the last heartbeat was.
        with psycopg.connect(stage.url) as admin:
            silent = admin.execute(
                "select extract(epoch from clock_timestamp() - heartbeat_at)::float8"
                " from jobs_lib.processes where pod = %s",
                (gone,),
            ).fetchone()
        assert silent is not None
        assert silent[0] > STALE_AFTER
        heir, epoch = find_sender(stage)
        assert heir != gone
        assert epoch == first + 1
    stage.await_empty()
    verdict = stage.judge()
    assert not verdict.violations, str(verdict)


@pytest.mark.guarantee("W34")
@pytest.mark.parametrize(
    "backlog",
    [
        30_000,
        pytest.param(
            1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)], id="million"
        ),
    ],
)
def test_a_live_row_leaves_in_the_next_block_despite_a_re_export_backlog(
    database_url, own_broker, admin, backlog
):
    app = make_app(database_url, kafka_bootstrap_servers=own_broker.bootstrap_servers)
    things = app.topic(own_broker.create(PARTITIONS), value=int, compacted=True)

    @app.entity(things, source="things", key="id")
    def load(connection, keys: list[str]) -> dict[str, int]:
        return dict.fromkeys(keys, 0)

    reexport = write_reexport(
        admin, things.name, "things", backlog, rate=10_000_000, shards=SHARDS
    )
    admin.execute("analyze jobs_lib.outbox")
    with (
        heard("block.read") as read,
        running(app, "relay"),
        psycopg.connect(database_url) as connection,
    ):

        def send(key: str) -> float:
            """Send a live row, and return the seconds until it is read."""
            shard = choose_shard(things.name, key, SHARDS)

            def blocks(since: int) -> list[list[int]]:
                told = [fields for _, fields in read[since:]]
                return [fields["rows"] for fields in told if fields["shard"] == shard]

            start = len(read)
            # More rows than two blocks hold are before it, however fast they leave.
            add_rows(
                connection,
                reexport,
                things.name,
                "things",
                3_000,
                first=shard,
                keys=key,
            )
            row_id = things.send(connection, key=key, value=1)
            connection.commit()
            since, at = len(read), time.monotonic()
            wait_for(
                lambda: any(row_id in rows for rows in blocks(start)),
                timeout=30,
                what="it is read",
            )
            seconds = time.monotonic() - at
            (block,) = [rows for rows in blocks(start) if row_id in rows]
            # At its commit, one block may have been read without its event.
            later = blocks(since)
            assert block not in later or later.index(block) <= 1
            # It also comes before the other rows of its block.
            assert block[0] == row_id
            wait_for(
                lambda: blocks(start)[-1] != block,
                timeout=30,
                what="rows of the backlog come after it",
            )
            return seconds

        wait_for(lambda: len(read) > 16, timeout=30, what="batch rows are being sent")
        delays = [send(f"live-{n}") for n in range(10)]
        (left,) = admin.execute("select count(*) from jobs_lib.outbox").fetchone()
    print(f"of {backlog} rows {left} left; live ones read after {max(delays):.3f} s")
