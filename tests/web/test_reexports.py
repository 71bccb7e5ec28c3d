"""Re-exports are started and steered over HTTP."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from jobs_lib import reexport as api
from jobs_lib.web import reexports
from tests.reexport.helpers import loaded_keys, query

START = {"rate": 6_000}


@pytest.fixture
def web(app, client):
    """A client of the app, who may do everything."""
    return client(reexports(app, authorise=lambda request: True))


def await_loaded(web, wait_for, name="aircraft"):
    def ended():
        return web.get(f"/{name}").json()["loader"]["state"] != "running"

    wait_for(ended, timeout=60, what=lambda: web.get(f"/{name}").json())
    return web.get(f"/{name}").json()


@pytest.mark.guarantee("W22", "X8")
def test_a_request_starts_the_same_re_export_and_steers_it(
    web, app, database, wait_for
):
    assert web.get("/").json() == {"reexports": []}
    assert web.get("/aircraft").status_code == 404
    plan = web.post("/aircraft/plan", json=START).json()
    assert (plan["total"], plan["rate"], plan["groups"]) == (250, 6_000, None)
    assert web.get("/").json() == {"reexports": []}
    begun = web.post("/aircraft/start", json=START | {"ranges": 5, "chunk": 10})
    assert begun.status_code == 201
    assert begun.json()["entity"] == "aircraft"
    shown = await_loaded(web, wait_for)
    assert shown["loader"] == {"state": "ended", "error": None}
    assert (shown["state"], shown["loaded"], shown["ranges"]) == ("running", 250, 5)
    assert len(loaded_keys(database)) == 250
    assert shown["measured"] is None
    assert web.post("/aircraft/pause", json={}).json()["state"] == "paused"
    assert web.post("/aircraft/resume", json={}).json()["state"] == "running"
    assert web.post("/aircraft/rate", json={"rate": 90}).json()["rate"] == 90
    lag = web.post("/aircraft/watch-lag", json={"limit": None}).json()
    assert lag["lag_group"] is None
    # Another start goes on with it.
    again = web.post("/aircraft/start", json={"window": "22:00-06:00", "tz": "UTC"})
    assert (again.status_code, again.json()["id"]) == (200, shown["id"])
    (listed,) = web.get("/").json()["reexports"]
    assert listed["id"] == shown["id"]
    assert web.post("/aircraft/cancel", json={}).json()["state"] == "cancelled"
    refused = web.post("/aircraft/pause", json={})
    assert (refused.status_code, "is cancelled" in refused.json()["error"]) == (
        409,
        True,
    )
    assert api.status(database, "aircraft").state == "cancelled"


def test_two_requests_at_once_begin_one(web, database, wait_for):
    answers = []

    def post():
        answers.append(web.post("/aircraft/start", json=START))

    threads = [threading.Thread(target=post) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {one.json()["id"] for one in answers} == {1}
    assert sorted(one.status_code for one in answers) == [200] * 5 + [201]
    await_loaded(web, wait_for)
    assert len(loaded_keys(database)) == 250
    assert query(database, "select count(*) from jobs_lib.reexports") == [(1,)]


@pytest.mark.expects("loop.failed")
def test_a_loader_that_fails_is_seen_and_another_start_goes_on(
    web, database, wait_for, monkeypatch
):
    load = api.SqlEngine.load

    def fail(self, database, loading, ranges):
        load(self, database, loading, ranges[:2])
        raise RuntimeError("the disk is gone")

    monkeypatch.setattr(api.SqlEngine, "load", fail)
    web.post("/aircraft/start", json=START | {"ranges": 5})
    shown = await_loaded(web, wait_for)
    assert (shown["state"], shown["loaded_ranges"]) == ("loading", 2)
    assert shown["loader"] == {
        "state": "failed",
        "error": "RuntimeError: the disk is gone",
    }
    monkeypatch.undo()
    web.post("/aircraft/start", json=START)
    shown = await_loaded(web, wait_for)
    assert (shown["state"], shown["loader"]["state"]) == ("running", "ended")
    assert len(loaded_keys(database)) == 250


def test_it_is_mounted_under_a_prefix(app, client):
    asgi = reexports(app, authorise=lambda request: True)
    web = client(Starlette(routes=[Mount("/admin/reexports", app=asgi)]), "/admin")
    assert web.get("/reexports/").json() == {"reexports": []}
    assert web.post("/reexports/aircraft/start", json=START).status_code == 201
    assert web.get("/reexports/aircraft").json()["total"] == 250
    assert web.get("/reexports/nothing").status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        ("other/start", START, 404, "no such entity"),
        ("aircraft/start", {}, 422, "either --rate"),
        ("aircraft/start", {"rate": 0}, 422, "the rate must be"),
        ("aircraft/start", {"rate": True}, 422, "rate is a whole number"),
        ("aircraft/start", {"rate": "60"}, 422, "rate is a whole number"),
        ("aircraft/start", {"window": "1"}, 422, "different times"),
        ("aircraft/start", START | {"ranges": 0}, 409, "1 to 10,000 ranges"),
        ("aircraft/start", START | {"chunk": 0}, 409, "1 to 10,000 keys"),
        ("aircraft/start", START | {"watch_lag": "x"}, 422, "GROUP:RECORDS"),
        ("aircraft/start", START | {"engine": "sql"}, 422, "known are: rate"),
        ("aircraft/rate", {}, 422, "rate is missing"),
        ("aircraft/rate", {"rate": 0}, 422, "the rate must be"),
        ("aircraft/watch-lag", {"limit": "x:0"}, 422, "limit must be"),
        ("aircraft/watch-lag", {"limit": "x:" + 5_000 * "9"}, 422, "GROUP:RECORDS"),
        ("aircraft/start", {"rate": 1, "watch_lag": "x:" + 5_000 * "9"}, 422, "GROUP"),
        ("aircraft/pause", {"now": 1}, 422, "known are: none"),
        ("aircraft/pause", {}, 409, "was never re-exported"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(
    web, database, path, body, status, told
):
    answer = web.post(f"/{path}", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, told in error, "\n" in error) == (status, True, False)
    assert query(database, "select count(*) from jobs_lib.reexports") == [(0,)]


def test_a_database_that_does_not_answer_is_said_without_its_password(app, client):
    from jobs_lib.settings import Settings

    app._settings = Settings(database_url="postgresql://me:kanarie@127.0.0.1:1/x")
    answer = client(reexports(app, authorise=lambda request: True)).get("/")
    assert answer.status_code == 503
    assert "kanarie" not in answer.text


def test_without_starlette_the_extra_is_named():
    code = "import sys; sys.modules['starlette'] = None\nimport jobs_lib.web"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "pip install 'jobs-lib[web]'" in done.stderr.splitlines()[-1]
