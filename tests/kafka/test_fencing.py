"""A relay wakes up after others have sent newer states, and overwrites none of them.

FENCING_ROUNDS=100 sets how many rounds the slow runs make.
"""

from __future__ import annotations

import os
import signal
from itertools import product
from typing import TYPE_CHECKING

import psycopg
import pytest
from confluent_kafka import Producer

from jobs_lib.outbox.relay import SENDERS
from tests.support.apps import running
from tests.support.outbox.stage import Stage, count_struck
from tests.support.proxy import Proxy
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from tests.support import Worker

KEYS = 24
PARTITIONS = 4
MANY = int(os.environ.get("FENCING_ROUNDS", "100"))
ROUNDS = [1, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
QUICK = {"stale_after": 1.0, "heartbeat_interval": 0.2, "session_timeout": 60.0}


@pytest.fixture
def stage(database_url, make_stage):
    """A stage whose broker has a proxied listener."""
    return make_stage(database_url, PARTITIONS, **QUICK)


def write(stage: Stage, number: int, *versions: int) -> None:
    """Change each entity of a round in one transaction; no other round touches these.

    Rows of one transaction leave in one block, where the last state of a key counts.
    """
    with psycopg.connect(stage.url) as connection:
        for version, n in product(versions, range(KEYS)):
            key, value = f"{number}-{n}", {"version": version}
            for topic in (stage.states, stage.events):
                topic.send(connection, key=key, value=value, version=version)


def write_until_struck(stage: Stage, worker: Worker, number: int) -> int:
    """Let a signal strike a relay; write until it does.

    Returns the last version written. The signal strikes when the relay's queue is full.
    That may be at once, with rows that were written before.
    """
    struck = count_struck(worker)
    worker.signal(signal.SIGUSR2)
    version = 1

    def is_struck() -> bool:
        nonlocal version
        version += 1
        write(stage, number, version)
        return count_struck(worker) > struck

    wait_for(is_struck, timeout=30, what=lambda: f"it is struck\n{stage.output}")
    return version


def await_replaced(stage: Stage, pod: str, number: int, version: int) -> None:
    """Wait until others have its shards, and have sent newer states of all entities."""
    stage.await_replaced(pod)
    for newer in range(version + 1, version + 4):
        write(stage, number, newer)
    write(stage, number, version + 4, version + 5)
    stage.await_empty()


def assert_nothing_is_older(stage: Stage, rounds: int) -> None:
    verdict = stage.judge()
    print(verdict)
    assert not verdict.violations, str(verdict)
    assert verdict.merged > 0
    assert stage.count_lines("^fenced by kafka") >= rounds


@pytest.mark.expects("loop.failed", "origins.lost")
@pytest.mark.guarantee("FK13")
@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_relay_that_was_paused_with_a_full_queue_is_fenced(stage, rounds):
    pods = ["r0", "r1"]
    for pod in pods:
        stage.start_relay(pod)
    for number in range(rounds):
        stage.await_owners(*pods)
        write(stage, number, 1)
        fenced = stage.count_lines("^fenced by kafka")
        pod = pods[number % 2]
        worker = stage.relays[pod]
        version = write_until_struck(stage, worker, number)
        stage.explain("pauses", 2 * SENDERS)
        await_replaced(stage, pod, number, version)
        worker.resume()
        stage.await_fenced(fenced)
    stage.await_owners(*pods)
    assert_nothing_is_older(stage, rounds)


@pytest.mark.expects("loop.failed", "origins.lost")
@pytest.mark.guarantee("FK13")
@pytest.mark.parametrize("rounds", ROUNDS)
def test_records_that_a_frozen_network_delivers_late_are_refused(
    stage, own_broker, rounds
):
    with Proxy.before(stage.url) as database:
        away = stage.start_relay(
            "away",
            at_full="SIGCONT",  # the signal has no effect
            kafka_bootstrap_servers=own_broker.proxied,
            database_url=database.url(stage.url),
        )
        stage.start_relay("here")
        for number in range(rounds):
            stage.await_owners("away", "here")
            # After this it has a producer for each of its shards.
            write(stage, number, 1)
            stage.await_empty()
            fenced = stage.count_lines("^fenced by kafka")
            own_broker.proxy.freeze()
            version = write_until_struck(stage, away, number)
            # It would keep its shards as long as its heartbeats reach PostgreSQL.
            database.freeze()
            stage.explain("silences", 2 * SENDERS)
            await_replaced(stage, "away", number, version)
            own_broker.proxy.thaw()
            database.thaw()
            stage.await_fenced(fenced)
        stage.await_owners("away", "here")
        assert_nothing_is_older(stage, rounds)


@pytest.mark.expects("loop.failed")
def test_a_relay_makes_new_producers_when_its_own_are_fenced(stage):
    with psycopg.connect(stage.url) as connection:
        row = connection.execute("select id from jobs_lib.installation").fetchone()
    assert row is not None
    write(stage, 0, 1)
    with running(stage.app, "relay"):
        stage.await_empty()
        for shard in range(0, 16, 4):
            other = Producer(
                {
                    "bootstrap.servers": stage.bootstrap_servers,
                    "transactional.id": f"jobs_lib-{row[0]}-{shard}",
                }
            )
            other.init_transactions(60)
        write(stage, 0, 2)
        stage.await_empty()
    verdict = stage.judge()
    assert not verdict.violations, str(verdict)
    assert verdict.records == 4 * KEYS
