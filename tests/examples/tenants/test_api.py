"""The example on tenants keeps its promises over HTTP, as one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from examples.tenants.tenants import derive_id
from jobs_lib.operating.rewinds import rewind
from jobs_lib.postgres.database import Database
from tests.support.canary import VALUE
from tests.support.tenants import (
    Stage,
    make_form,
    read_place,
    read_states,
    without_account,
)

pytestmark = pytest.mark.expects("fenced")


@pytest.fixture(scope="module")
def stage(make_stage) -> Stage:
    """The API with the processor in its process, and the provider."""
    made = make_stage()
    made.start_provider()
    made.start_api("whole")
    return made


def post(http, email: str, request: str | None = None, **other: str):
    headers = {"Idempotency-Key": request} if request else {}
    return http.post("/tenants", json=make_form(email, **other), headers=headers)


@pytest.mark.guarantee("T1", "T5", "T12", "T13")
def test_each_change_is_one_event_and_its_answer_is_the_event(stage, http):
    created = post(http, "one")
    path = created.headers["Location"]
    changed = http.put(path, json=make_form("one", country="FR"))
    deleted = http.delete(path)
    codes = [answer.status_code for answer in (created, changed, deleted)]
    assert codes == [201, 200, 204]
    key = path.rpartition("/")[2]
    log = stage.read_log(key)
    places = [read_place(answer) for answer in (created, changed, deleted)]
    assert places == [(event.partition, event.offset) for event in log]
    assert [event.json for event in log] == [
        {"id": key, **make_form("one")},
        {"id": key, **make_form("one", country="FR")},
        None,
    ]
    for answer, event in zip((created, changed), log, strict=False):
        assert answer.json() == without_account(event.json)
    assert deleted.content == b""


@pytest.mark.guarantee("T2", "T3", "T11", "T16")
def test_the_table_follows_and_a_replay_changes_and_registers_nothing(stage, http):
    kept = [post(http, f"kept{n}").json()["id"] for n in range(6)]
    gone = post(http, "gone").json()["id"]
    http.put(f"/tenants/{kept[0]}", json=make_form("kept0", country="AT"))
    http.delete(f"/tenants/{gone}")
    stage.await_table()
    stage.await_registrations()
    assert stage.read_table() == read_states(stage.read_log())
    assert http.get(f"/tenants/{kept[0]}").json()["country"] == "AT"
    assert http.get(f"/tenants/{gone}").status_code == 404
    listed = http.get("/tenants?country=AT").json()
    assert [one["id"] for one in listed] == [kept[0]]
    before = stage.read_table(), sorted(stage.read_registrations())
    places = stage.ask(
        "select partition, 0 from jobs_lib.offsets where next_offset is not null"
    )
    rewind(Database(stage.database), stage.topic, stage.topic, dict(places))
    # The last event is behind all that is read again.
    post(http, "behind")
    stage.await_table()
    stage.await_registrations()
    behind = derive_id("behind@example.org")
    table, registered = stage.read_table(), sorted(stage.read_registrations())
    assert table.pop(behind)["email"] == "behind@example.org"
    registered.remove(behind)
    assert (table, registered) == before


@pytest.mark.guarantee("T16")
def test_each_tenant_is_registered_once_by_a_provider_that_fails_and_hangs(stage, http):
    # Of 20 calls one fails, one hangs, and of one the answer is lost.
    ids = [post(http, f"many{n}").json()["id"] for n in range(40)]
    stage.await_table()
    stage.await_registrations()
    found = stage.read_registrations()
    assert len({*found}) == len(found)
    assert {*ids} <= {*found}
    (attempts,) = stage.ask(
        "select count(*) from jobs_lib.history where attempt > 1"
    ).pop()
    assert attempts > 0


TRACE = """
    create table traced (place bigint generated always as identity, id text, name text);
    create function trace() returns trigger language plpgsql as $$ begin
        insert into traced (id, name) values (new.id, new.name);
        return null;
    end $$;
    create trigger trace after insert or update on tenants_rm
        for each row execute function trace()
"""
"""Each state that the table has had, in its order."""


@pytest.mark.guarantee("T9")
def test_changes_of_a_tenant_that_come_at_once_are_handled_in_the_order_of_events(
    stage, http
):
    with psycopg.connect(stage.database) as connection:
        connection.execute(TRACE)
    created = post(http, "order")
    path, key = created.headers["Location"], created.json()["id"]

    def put(number: int) -> int:
        form = make_form("order", name=f"name {number}")
        return int(http.put(path, json=form).status_code)

    with ThreadPoolExecutor(5) as pool:
        assert {*pool.map(put, range(40))} == {200}
    stage.await_table()
    names = [event.json["name"] for event in stage.read_log(key)]
    assert len(names) == 41
    had = stage.ask(f"select name from traced where id = '{key}' order by place")
    # A block writes only the last state.
    places = [names.index(name) for (name,) in had]
    assert places == sorted({*places})
    assert places[-1] == 40


WRONG: dict[str, tuple[int, dict[str, Any]]] = {
    "no JSON": (422, {"content": "{"}),
    "no email": (422, {"json": make_form("a") | {"email": VALUE}}),
    "a field too many": (422, {"json": make_form("a", plan="x")}),
    "no such country": (422, {"json": make_form("a", country="XX")}),
    "an event that is too large": (422, {"json": make_form("a", name="x" * 1_100_000)}),
    "an id that is none": (
        422,
        {"json": make_form("a"), "headers": {"Idempotency-Key": "x" * 201}},
    ),
}


@pytest.mark.guarantee("T8")
@pytest.mark.parametrize(("status", "what"), WRONG.values(), ids=WRONG)
def test_a_wrong_request_is_a_problem_and_no_event(stage, http, status, what):
    before = stage.read_log()
    for answer in (
        http.post("/tenants", **what),
        http.put(f"/tenants/{derive_id('a@example.org')}", **what),
    ):
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["status"] == status
        assert VALUE not in answer.text
    assert stage.read_log() == before


@pytest.mark.guarantee("T8", "T14")
def test_what_is_taken_is_refused_and_not_sent(stage, http):
    first = post(http, "taken", "taken-1")
    stage.await_table()
    before = stage.read_log()
    other = derive_id("other@example.org")
    answers = [
        post(http, "taken", "taken-2"),
        post(http, "TAKEN"),
        http.put(f"/tenants/{other}", json=make_form("taken")),
        post(http, "taken", "taken-1", name="Another name"),
        http.get(f"/tenants/{other}"),
        http.patch(f"/tenants/{other}"),
    ]
    codes = [answer.status_code for answer in answers]
    assert codes == [409, 409, 409, 422, 404, 405]
    kinds = {answer.headers["content-type"] for answer in answers}
    assert kinds == {"application/problem+json"}
    # The request that has created it is not a second use of the email.
    again = post(http, "taken", "taken-1")
    assert (again.status_code, again.json()) == (201, first.json())
    assert read_place(again) == read_place(first)
    assert stage.read_log() == before


@pytest.mark.guarantee("T8")
def test_a_put_and_a_delete_that_are_repeated_change_nothing(stage, http):
    path = post(http, "again").headers["Location"]
    state = make_form("again", country="IT")
    for call in (lambda: http.put(path, json=state), lambda: http.delete(path)):
        first = call()
        stage.await_table()
        before = stage.read_log()
        again = call()
        assert again.status_code == first.status_code
        assert again.content == first.content
        assert "Tenant-Event" not in again.headers
        assert stage.read_log() == before


@pytest.mark.guarantee("T14")
@pytest.mark.parametrize("where", ["header", "body"])
def test_a_request_that_comes_five_times_at_once_is_one_event(stage, http, where):
    def send(_: int):
        if where == "header":
            return post(http, "header", "five-1")
        return post(http, "body", **{"request": "five-2"})

    with ThreadPoolExecutor(5) as pool:
        answers = [*pool.map(send, range(5))]
    told = {(one.status_code, one.text, read_place(one)) for one in answers}
    ((status, _, place),) = told
    (event,) = stage.read_log(derive_id(f"{where}@example.org"))
    assert (status, place) == (201, (event.partition, event.offset))


@pytest.mark.guarantee("T15", "T18")
def test_two_requests_with_one_email_make_one_tenant(stage, http):
    with ThreadPoolExecutor(2) as pool:
        answers = [*pool.map(lambda name: post(http, name), ("Both", "both"))]
    # The second one is refused if the table has the first.
    ids = {one.json()["id"] for one in answers if one.status_code == 201}
    assert ids == {derive_id("both@example.org")}
    stage.await_table()
    rows = stage.ask("select id from tenants_rm where email ilike 'both@%'")
    assert rows == [(derive_id("both@example.org"),)]
