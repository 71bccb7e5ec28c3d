"""The test kit handles records, drains jobs, and checks the flights service."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psycopg
import pytest

from examples.flights import service
from examples.flights.flights import Flight
from examples.flights.service import Aircraft, aircraft_state, tell_partner, track
from jobs_lib.testing import make_record

if TYPE_CHECKING:
    from collections.abc import Iterator

SQL = Path(service.__file__).with_name("service.sql")
FLIGHT = Flight(
    id=1,
    departure=datetime(2013, 1, 1, 12, tzinfo=UTC),
    carrier="UA",
    number=1545,
    tail="N14228",
    origin="EWR",
    destination="IAH",
    arrived=True,
    delay=11,
)


class Partner:
    """The partner that the jobs call: it keeps the calls, and answers as told."""

    def __init__(self) -> None:
        self.status = 200
        self.told: list[tuple[str, str]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        told = (request.headers["Idempotency-Key"], request.read().decode())
        self.told.append(told)
        return httpx.Response(self.status)


@pytest.fixture
def jobs_app():
    return service.app


@pytest.fixture(scope="session")
def jobs_database_setup():
    def setup(url: str) -> None:
        with psycopg.connect(url) as conn:
            conn.execute(SQL.read_bytes())

    return setup


@pytest.fixture
def partner(monkeypatch) -> Iterator[Partner]:
    made = Partner()
    transport = httpx.MockTransport(made)
    with httpx.Client(base_url="http://partner", transport=transport) as client:
        monkeypatch.setattr(service, "partner", client)
        yield made


def fly(jobs, flight: Flight) -> None:
    jobs.handle(track, make_record(flight, key=flight.key, topic="flights"))


def test_a_flight_changes_its_aircraft_tells_the_topic_and_then_the_partner(
    jobs, outbox, partner
):
    fly(jobs, FLIGHT)
    state = Aircraft("N14228", flights=1, airport="IAH", delay=11, version=1)
    sent = outbox.assert_sent(aircraft_state, key="N14228", value=state)
    assert sent.version == 1
    told = jobs.assert_enqueued(tell_partner, flight=1, destination="IAH")
    assert told.group == "N14228"
    assert partner.told == []

    assert jobs.drain() == 1

    ((_, body),) = partner.told
    assert body == '{"tail":"N14228","flight":1,"destination":"IAH"}'


def test_a_flight_that_did_not_arrive_stays_where_it_was(jobs, outbox):
    fly(jobs, replace(FLIGHT, arrived=False, delay=None))
    state = Aircraft("N14228", flights=1, airport="EWR", delay=0, version=1)
    outbox.assert_sent(aircraft_state, value=state)
    jobs.assert_not_enqueued(tell_partner)


def test_a_flight_without_a_tail_number_belongs_to_no_aircraft(jobs, outbox):
    fly(jobs, replace(FLIGHT, tail=None))
    assert outbox.sent() == []
    with jobs.transaction() as conn:
        assert conn.execute("select * from handled").fetchall() == [(1, None)]
        assert conn.execute("select * from aircraft").fetchall() == []


def test_arrivals_wait_for_a_partner_that_is_away_and_keep_their_order(jobs, partner):
    for number in (1, 2, 3):
        fly(jobs, replace(FLIGHT, id=number))
    partner.status = 503
    assert jobs.drain() == 1
    assert jobs.assert_enqueued(tell_partner, flight=1).attempt == 0
    partner.status = 200
    jobs.travel(1)
    assert jobs.drain() == 3
    keys = [key for key, _ in partner.told]
    # The partner gets the first arrival twice, with one key.
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3
    assert [body.split('"flight":')[1][0] for _, body in partner.told] == list("1123")


def test_a_partner_that_refuses_is_an_error_and_is_tried_again(jobs, partner):
    fly(jobs, FLIGHT)
    partner.status = 400
    with pytest.raises(httpx.HTTPStatusError, match="400 Bad Request"):
        jobs.drain()
    assert jobs.assert_enqueued(tell_partner, flight=1).attempt == 1
