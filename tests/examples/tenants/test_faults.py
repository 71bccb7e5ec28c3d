"""The API of tenants, while its process is killed and Kafka is away."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx
import psycopg
import pytest

from examples.tenants.client import TenantsClient
from examples.tenants.tenants import derive_id
from tests.support.tenants import Stage, make_form, read_place

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.worker import Worker

SENDERS_TIME = "update jobs_lib.requests set sent_until = clock_timestamp()"

END_WAITING = (
    "select pg_terminate_backend(pid) from pg_stat_activity"
    " where datname = current_database() and wait_event_type = 'Lock'"
)


@pytest.fixture(scope="module")
def stage(make_stage) -> Stage:
    """The API alone, which reaches Kafka by the proxy."""
    # Without compression the request's id stands in the bytes on the wire.
    return make_stage(
        proxied=True, publish_timeout=2.0, kafka='{"compression.type":"none"}'
    )


@pytest.fixture
def api(stage, own_broker) -> Iterator[Worker]:
    """A process that has published before, so that its clients are connected."""
    worker = stage.start_api()
    with TenantsClient(stage.address) as client:
        client.put(derive_id("warm@example.org"), make_form("warm"))
    yield worker
    stage.close()


def post(http, email: str) -> httpx.Response:
    headers = {"Idempotency-Key": f"post-{email}"}
    return http.post("/tenants", json=make_form(email), headers=headers)


@pytest.mark.guarantee("T7", "T14", "T5")
@pytest.mark.parametrize("has_it", [False, True], ids=["before Kafka", "after Kafka"])
def test_a_request_whose_api_is_killed_is_one_event_when_it_is_repeated(
    stage, api, http, own_broker, wait_for, has_it
):
    email = f"killed-{has_it}"
    key = derive_id(f"{email}@example.org")
    failed: list[Exception] = []

    def send() -> None:
        try:
            post(http, email)
        except httpx.TransportError as error:
            failed.append(error)

    with psycopg.connect(stage.database) as holder:
        holder.execute("lock table jobs_lib.requests in share mode")
        caller = threading.Thread(target=send)
        caller.start()
        waiting = (
            "select count(*) from pg_locks where not granted"
            " and relation = 'jobs_lib.requests'::regclass"
        )
        wait_for(lambda: stage.ask(waiting) == [(1,)], what="the request is noted soon")
        # What is held is lost, and what is frozen arrives later.
        (own_broker.proxy.freeze if has_it else own_broker.proxy.hold)()
        holder.rollback()
        noted = f"select count(*) from jobs_lib.requests where id = 'post-{email}'"
        wait_for(lambda: stage.ask(noted) == [(1,)], what="the request is noted")
        if has_it:
            # The place of the event cannot be noted, and nobody is answered.
            holder.execute(
                "select from jobs_lib.requests where id = %s for update",
                (f"post-{email}",),
            )
            own_broker.proxy.thaw()
            wait_for(lambda: stage.read_log(key), what="Kafka has the event")
        api.kill()
        # A backend would still note the place for the process that is gone.
        stage.ask(END_WAITING)
    caller.join()
    assert len(failed) == 1
    own_broker.proxy.restore()
    assert len(stage.read_log(key)) == has_it
    stage.ask(f"{SENDERS_TIME} returning 1")
    stage.start_api()
    answers = [post(http, email) for _ in range(2)]
    (event,) = stage.read_log(key)
    for answer in answers:
        assert answer.status_code == 201
        assert read_place(answer) == (event.partition, event.offset)


@pytest.mark.guarantee("T5")
def test_while_kafka_is_away_a_request_waits_and_is_refused_without_an_event(
    stage, api, http, own_broker
):
    own_broker.proxy.hold()
    answer = post(http, "away")
    assert answer.status_code == 503
    assert answer.headers["Retry-After"] == "1"
    assert answer.headers["content-type"] == "application/problem+json"
    assert "cannot be done now" in answer.json()["detail"]
    assert answer.elapsed.total_seconds() > 1
    key = derive_id("away@example.org")
    assert stage.read_log(key) == []
    with TenantsClient(stage.address) as client, ThreadPoolExecutor(1) as pool:
        # The client repeats it until Kafka is there.
        created = pool.submit(client.create, make_form("away"), "post-away")
        own_broker.proxy.release()
        assert created.result(60)["id"] == key, api.output
    assert len(stage.read_log(key)) == 1


@pytest.mark.guarantee("T5", "T14")
def test_an_answer_of_kafka_that_is_lost_is_no_success_and_is_found(
    stage, api, http, own_broker
):
    own_broker.proxy.swallow("post-lost", hold=True)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(post, http, "lost")
        assert own_broker.proxy.swallowed.wait(30)
        answer = sent.result(60)
    assert answer.status_code == 503
    assert "not known" in answer.json()["detail"]
    assert answer.headers["Retry-After"] == "1"
    own_broker.proxy.restore()
    (event,) = stage.read_log(derive_id("lost@example.org"))
    stage.ask(f"{SENDERS_TIME} returning 1")
    again = post(http, "lost")
    assert again.status_code == 201
    assert read_place(again) == (event.partition, event.offset)
    assert len(stage.read_log(event.key)) == 1
