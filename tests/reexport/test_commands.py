"""The command and the Python call start the same re-export."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from jobs_lib import reexport as api
from jobs_lib.app import App
from jobs_lib.cli.reexport import reexport
from jobs_lib.errors import ReexportError
from jobs_lib.settings import Settings
from tests.reexport.helpers import loaded_keys, make_entity, make_table, query
from tests.support.commands import make_runner

FLIGHTS = 336_776


@pytest.fixture
def run(database, monkeypatch):
    app = App("test", settings=Settings(database_url=database.url))
    app.entities["aircraft"] = make_entity()
    return make_runner(reexport, app, monkeypatch)


def jobs_of(database):
    return query(
        database,
        "select origin, type, payload->'keys' from jobs_lib.jobs order by id",
    )


def plan_of(database):
    return query(
        database,
        'select "range", lower, upper, r.keys, entity, topic, rate, x.state'
        " from jobs_lib.reexport_ranges r"
        " join jobs_lib.reexports x on x.id = r.reexport_id order by 1",
    )


@pytest.mark.guarantee("W22")
def test_command_and_call_start_the_same_reexport(database, run):
    make_table(database, range(50_000), "int")
    run("start", "aircraft", "--rate", "6000", "--engine", "sql")
    jobs, plan = jobs_of(database), plan_of(database)
    query(
        database,
        "with j as (delete from jobs_lib.jobs),"
        " x as (delete from jobs_lib.reexports) select 1",
    )
    api.start(database, make_entity(), rate=6_000)
    assert plan_of(database) == plan
    assert len(plan) == 3
    assert jobs_of(database) == jobs
    assert len(loaded_keys(database)) == 50_000


def test_a_dry_run_prints_the_plan_and_changes_nothing(database, run):
    with database.connect("test") as connection:
        connection.execute(
            "create table aircraft as select generate_series(1, %s) as tail", [FLIGHTS]
        )
    output = run("start", "aircraft", "--rate", "6000", "--dry-run")
    assert "336,776 keys of aircraft.tail (bigint) to aircraft-state" in output
    assert "17 ranges" in output
    assert "from the first up to 19812" in output
    assert "at 6,000 records a minute it takes 57.6 minutes, ends 20" in output
    assert "`jobs-lib reexport stale aircraft --rate 6000 --dry-run` counts" in output
    plan = json.loads(run("start", "aircraft", "--rate", "6000", "--dry-run", "--json"))
    assert plan["total"] == sum(piece["keys"] for piece in plan["ranges"]) == FLIGHTS
    assert query(database, "select count(*) from jobs_lib.reexports") == [(0,)]


@pytest.mark.guarantee("W29")
def test_a_window_gives_the_rate_and_the_end(database, run):
    with database.connect("test") as connection:
        connection.execute(
            "create table aircraft as select generate_series(1, %s) as tail", [FLIGHTS]
        )
    # It opens in an hour or two, whenever the test runs.
    begin = (datetime.now(UTC) + timedelta(hours=2)).hour
    window = f"{begin:02}:00-{(begin + 8) % 24:02}:00"
    hours = ("--window", window, "--tz", "UTC")
    plan = json.loads(run("plan", "aircraft", *hours, "--json"))
    assert plan["groups"] is None
    assert plan["rate"] == 720
    begins, ends = (datetime.fromisoformat(plan[one]) for one in ("begins", "eta"))
    assert (begins.hour, begins.minute) == (begin, 0)
    assert timedelta(hours=7, minutes=59) < ends - begins <= timedelta(hours=8)
    output = run("plan", "aircraft", *hours)
    assert f"the window {window} has 480 minutes: --rate 720\n" in output
    start = ("start", "aircraft", *hours, "--engine", "sql", "--json")
    assert json.loads(run(*start))["rate"] == 720
    # What is left.
    query(
        database,
        "with x as (update jobs_lib.reexports set sent = total - 1000 returning 1)"
        " select 1 from x",
    )
    assert json.loads(run(*start))["rate"] == 3


def test_files_are_one_source_and_need_spark(database, run):
    start = ("start", "aircraft", "--rate", "60")
    for options, told in (
        (("--parquet", "a", "--csv", "b"), "either --parquet or --csv"),
        (("--csv", "a", "--engine", "sql"), "only Spark reads a DataFrame"),
        (("--csv", "a", "--engine", "sql", "--dry-run"), "only Spark reads"),
        (("--csv", "a"), "have no version"),
        (("--csv", "a", "--dry-run"), "have no version"),
    ):
        with pytest.raises(ReexportError, match=told):
            run(*start, *options)
    for options, told in (
        (("--parquet", "a", "--csv", "b"), "either --parquet or --csv"),
        (("--parquet", "a"), "have no version"),
        (("--conf", "spark.a=b"), "a plan of the entity's table starts no Spark"),
    ):
        with pytest.raises(ReexportError, match=told):
            run("plan", "aircraft", "--rate", "60", *options)
    assert query(database, "select count(*) from jobs_lib.reexports") == [(0,)]


def test_a_rate_and_a_window_exclude_each_other(database, run):
    for options in ((), ("--rate", "60", "--window", "22:00-06:00")):
        with pytest.raises(ReexportError, match=r"either --rate, .* or --window"):
            run("start", "aircraft", *options)
        with pytest.raises(ReexportError, match=r"either --rate, .* or --window"):
            run("plan", "aircraft", *options)
    with pytest.raises(ReexportError, match="no time zone 'Mars'"):
        run("plan", "aircraft", "--window", "22:00-06:00", "--tz", "Mars")


def test_the_list_has_the_latest_first(database, run):
    make_table(database, ["N1", "N2"])
    for _ in range(3):
        run("start", "aircraft", "--engine", "sql", "--rate", "60")
        run("cancel", "aircraft")
    listed = json.loads(run("list", "--json", "--limit", "2"))
    assert [one["state"] for one in listed] == ["cancelled"] * 2
    assert listed[0]["id"] > listed[1]["id"]
    assert run("list").count("cancelled") == 3


def test_the_commands_start_steer_show_and_cancel_a_re_export(database, run):
    make_table(database, ["N1", "N2"])
    start = ("start", "aircraft", "--engine", "sql")
    assert "begun" in run(*start, "--rate", "60")
    assert "begun" not in run(*start, "--rate", "90", "--json")
    assert "resumed" in run(*start, "--rate", "90")
    assert "running" in run("status", "aircraft")
    assert "120 records a minute" in run("rate", "aircraft", "120")
    assert "jobs-lib reexport resume aircraft" in run("pause", "aircraft")
    assert json.loads(run("resume", "aircraft", "--json"))["state"] == "running"
    assert "cancelled" in run("cancel", "aircraft")
    with pytest.raises(ReexportError, match="is cancelled"):
        run("pause", "aircraft")


@pytest.mark.guarantee("X3")
def test_the_command_says_when_the_snapshot_is_lost(database, run):
    make_table(database, ["N1", "N2"])
    start = ("start", "aircraft", "--engine", "sql", "--rate", "60")
    with pytest.raises(ReexportError, match="not -1"):
        run(*start, "--snapshot", "--hold-for", "-1")
    started = json.loads(run(*start, "--snapshot", "--json"))
    assert started["snapshot"] is True
    assert "snapshot" not in run("status", "aircraft")
    # As if its loader had ended before the range was loaded.
    text = "update jobs_lib.reexport_ranges set loaded_at = null returning 1"
    query(database, text)
    assert "its snapshot ended with the loader" in run(*start)
    assert json.loads(run("status", "aircraft", "--json"))["snapshot"] is False


def test_watch_stays_until_the_end(database, run):
    make_table(database, [])
    output = run("start", "aircraft", "--rate", "60", "--engine", "sql", "--watch")
    assert "finished, 0 sent" in output


def test_watch_tells_why_the_load_failed(database, run):
    make_table(database, [None])
    with pytest.raises(ReexportError, match="have no 'tail'"):
        run("start", "aircraft", "--rate", "60", "--engine", "sql", "--watch")


def test_an_unknown_entity_is_named_with_the_known_ones(run):
    with pytest.raises(
        ReexportError, match=r"no entity 'workers' \(declared: aircraft\)"
    ):
        run("status", "workers")
