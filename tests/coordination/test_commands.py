"""What operators do with groups: show, pause, resume, release, and set positions."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner

from jobs_lib.cli.main import cli
from jobs_lib.coordination.log import Log
from jobs_lib.coordination.messages import (
    ClaimingPartition,
    Heartbeat,
    Probe,
    ReleaseGroup,
    ReleasingPartition,
    Sender,
    Shared,
)
from jobs_lib.coordination.place import Place
from jobs_lib.coordination.shares import Attendance
from jobs_lib.coordination.world import Outcome
from jobs_lib.coordination.writer import Writer
from jobs_lib.errors import UnavailableError
from jobs_lib.operating.coordination import SharedPart, Viewer, pause, pauses, session
from jobs_lib.operating.coordination.session import OPERATORS, wait_until_free
from jobs_lib.operating.coordination.view import GroupPause, View
from jobs_lib.settings import default_settings, load_settings
from tests.coordination.commands import GROUP, WAIT, look, states


def test_show_tells_holders_positions_lags_and_pauses(
    log_topic, topic, publish, consume, run, wait_for, settings
):
    log, data = log_topic(), topic(2)
    assert look(run, log)["parts"] == look(run, log)["pauses"] == []
    publish(data, 5, 1)
    first, handler = consume(log, data)
    consume(log, data, group="shop.other", client_id="z")
    wait_for(lambda: len(handler.seen) == 5)
    shared = Shared(GROUP, data, 1)
    wait_for(lambda: first.member.log.find(shared).position == 5)
    view = look(run, log)
    assert (view["log"], view["is_now"]) == (log, True)
    age = datetime.now(UTC) - datetime.fromisoformat(view["time"])
    assert abs(age) < timedelta(seconds=WAIT)
    assert [(one["group"], one["partition"]) for one in view["parts"]] == [
        *((GROUP, 0), (GROUP, 1), ("shop.other", 0), ("shop.other", 1))
    ]
    part = look(run, log, "--group", GROUP)["parts"][1]
    holding = first.member.log.find(shared).holding
    assert 0 <= part.pop("silent") < WAIT
    assert part == {
        "group": GROUP,
        "topic": data,
        "partition": 1,
        "position": 5,
        "lag": 0,
        "client": "a",
        "instance": first.member.sender.instance_id,
        "claim": holding.claim,
        "state": "fresh",
    }
    pause(settings, log, GROUP, timedelta(minutes=10))
    publish(data, 3, 1)
    view = look(run, log, "--group", GROUP)
    (found,) = view["pauses"]
    assert (found["group"], found["places"]) == (GROUP, 2)
    assert states(view) == [(0, "free"), (1, "free")]
    assert (view["parts"][1]["lag"], view["parts"][1]["client"]) == (3, None)
    table = run(log, "show")
    assert f"paused: {GROUP} until" in table.stderr
    assert all(text in table.stdout for text in (GROUP, data, "shop.other", "fresh"))


def test_show_knows_that_a_holder_has_died_though_nobody_writes_any_more(
    log_topic, topic, open_log, run, wait_for
):
    log, data = log_topic(1), topic(2)
    dead = open_log(log)
    claim = ClaimingPartition(dead.sender, Shared(GROUP, data, 0), 500)
    dead.send(claim).wait(WAIT)
    dead.stop()
    wait_for(
        lambda: states(look(run, log)) == [(0, "stale"), (1, "free")],
        what="it is stale",
        every=0.2,
    )
    view = look(run, log)
    assert view["parts"][0]["silent"] > 1.0
    # Nobody has ever claimed the other one: Kafka knows that it is there.
    assert view["parts"][1]["position"] is None


def test_the_live_view_goes_on_to_tell_what_is_new(
    log_topic, topic, run_process, bootstrap_servers, open_log
):
    log, data = log_topic(1), topic(1)
    worker = run_process(
        *("-m", "jobs_lib.cli", "coordination", "show", "--watch", "0.1"),
        env={
            "JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS": bootstrap_servers,
            "JOBS_LIB_COORDINATION_TOPIC": log,
        },
    )
    worker.wait_for_line("silent")
    here = open_log(log)
    shared = Shared(GROUP, data, 0)
    here.send(ClaimingPartition(here.sender, shared, 600_000)).wait(WAIT)
    worker.wait_for_line(f"{data}.*fresh")
    here.send(
        ReleasingPartition(here.sender, shared, here.find(shared).holding.claim, 7)
    ).wait(WAIT)
    worker.wait_for_line(f"{data}.* 7 .*free")
    worker.signal(2)
    assert worker.wait() == 0


def test_a_view_that_cannot_begin_leaves_no_reader_of_the_log(monkeypatch):
    viewer = Viewer(load_settings(kafka_bootstrap_servers="localhost:1"), "log")
    stopped: list[bool] = []
    monkeypatch.setattr(viewer._log, "start", lambda: None)
    monkeypatch.setattr(viewer._log, "stop", lambda: stopped.append(True))

    def start(_: Writer) -> None:
        raise UnavailableError("no broker answers")

    monkeypatch.setattr(Writer, "start", start)
    with pytest.raises(UnavailableError), viewer:
        raise AssertionError("it has begun")
    assert stopped == [True]


def test_the_live_view_tells_each_time_and_goes_on_while_no_broker_answers(
    monkeypatch,
):
    begun = datetime(2026, 8, 1, tzinfo=UTC)
    part = SharedPart(GROUP, "orders", 0, 7, 0, None, None, None, "free", None)
    paused = GroupPause(GROUP, begun + timedelta(hours=1), "ann", 1)
    views: list[View | Exception] = [
        View("log", begun, True, [part], []),
        UnavailableError("no broker answers"),
        View("log", begun + timedelta(minutes=5), True, [], [paused]),
    ]

    def look(_: Viewer) -> View:
        if not views:
            raise KeyboardInterrupt
        view = views.pop(0)
        if isinstance(view, Exception):
            raise view
        return view

    monkeypatch.setattr(Viewer, "__enter__", lambda viewer: viewer)
    monkeypatch.setattr(Viewer, "__exit__", lambda *_: None)
    monkeypatch.setattr(Viewer, "look", look)
    monkeypatch.setenv("JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS", "localhost:1")
    default_settings.cache_clear()
    words = ["coordination", "show", "--log", "log", "--watch", "0.1"]
    done = CliRunner().invoke(cli, words)
    default_settings.cache_clear()
    assert done.exit_code == 0, done.output
    told = [
        line.strip()
        for line in done.stdout.splitlines()
        if "it is" in line or "before" in line or "orders" in line or "paused" in line
    ]
    first = "by the brokers' clocks it is 2026-08-01 00:00:00+00:00"
    assert told[0] == first
    assert "orders" in told[1]
    assert told[2] == "this is what was known before: no broker answers"
    assert told[3] == first
    assert "orders" in told[4]
    assert told[5] == "by the brokers' clocks it is 2026-08-01 00:05:00+00:00"
    assert told[6].startswith(f"paused: {GROUP} until 2026-08-01 01:00:00+00:00 by ann")
    assert len(told) == 7


@pytest.mark.guarantee("M19")
def test_a_paused_group_lets_go_and_claims_all_again_once_it_is_resumed(
    log_topic, topic, publish, consume, run, wait_for
):
    log, data = log_topic(), topic(4)
    # Far longer than the test: nothing may wait for an interval to pass.
    consumer, handler = consume(log, data, interval=20.0)
    wait_for(lambda: len(consumer.member.list_held()) == 4)
    done = run(log, "pause", GROUP, "--for", "10m", "--json")
    paused = json.loads(done.stdout)
    assert (paused["holders"], paused["is_known"]) == ([], True)
    assert not consumer.member.list_held()
    until = datetime.fromisoformat(paused["until"])
    left = until - datetime.now(UTC)
    assert timedelta(minutes=9) < left < timedelta(minutes=11)
    publish(data, 3)
    again = run(log, "pause", GROUP, "--until", "2099-01-01", code=2)
    assert "a pause of more than 366 days is too long" in str(again.exception)
    again = run(log, "pause", GROUP, "--for", "1h")
    assert f"it was paused until {until:%Y-%m-%d %H:%M:%S}" in again.stdout
    assert not handler.seen
    assert "resumed: " in run(log, "resume", GROUP).stdout
    # The operator is no member: no share is left to it.
    wait_for(
        lambda: len(consumer.member.list_held()) == 4,
        timeout=20,
        what=lambda: f"all are held again: {consumer.member.list_held()}",
    )
    wait_for(lambda: len(handler.seen) == 3)
    assert "it was not paused" in run(log, "resume", GROUP).stdout


def test_who_pauses_a_group_is_no_member_of_it():
    attendance = Attendance(GROUP, 500)
    pauser = Sender(GROUP, "operator", "1")
    attendance.note(0, ReleaseGroup(pauser, 0), Outcome.VALID, 1_000)
    assert attendance.list_members() == []


@pytest.mark.slow
def test_a_pause_names_who_holds_on_and_takes_dead_holders_for_gone(
    log_topic, topic, publish, consume, run, wait_for, open_log
):
    log, data = log_topic(), topic(2)
    publish(data, 1, 0)
    consumer, handler = consume(log, data)
    handler.may_go.clear()
    wait_for(lambda: handler.begun == 1, what="the handler hangs")
    done = run(log, "pause", GROUP, "--for", "10m", "--wait", "1", code=1)
    assert f"still held: {data}/0 by a, instance " in done.stderr
    assert f"{data}/1" not in done.stderr
    refused = run(log, *to_end(data, 0), "--wait", "0.1", code=2)
    assert f"held yet: {data}/0 by 'a'" in str(refused.exception)
    # The other one is free, and its position may be set.
    run(log, *to_end(data, 1))
    handler.may_go.set()
    run(log, "pause", GROUP, "--for", "10m")
    consumer.stop()
    run(log, "resume", GROUP)
    dead = open_log(log)
    dead.send(ClaimingPartition(dead.sender, Shared(GROUP, data, 0), 500)).wait(WAIT)
    dead.stop()
    run(log, "pause", GROUP, "--for", "10m")


def to_end(topic: str, partition: int) -> list[object]:
    """The words of the command that sets a position to the end."""
    return [*("set-position", GROUP, topic, "--partition", partition, "--to", "latest")]


def test_a_group_that_the_log_does_not_know_is_paused_with_a_warning(log_topic, run):
    log = log_topic()
    done = run(log, "pause", "shop.mialer", "--for", "1m")
    assert "the log has said nothing of a group shop.mialer" in done.stderr
    assert f"show --log {log}" in done.stderr
    assert look(run, log)["pauses"][0]["group"] == "shop.mialer"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["pause", GROUP], "say how long: --for 10m"),
        (["pause", GROUP, "--for", "1m", "--until", "2099-01-01"], "say how long"),
        (["pause", GROUP, "--for", "0s"], "is over: by the brokers' clocks it is"),
        (["pause", GROUP, "--until", "2001-01-01"], "is over: by the brokers' clocks"),
        (["pause", GROUP, "--for", "999999d"], "more than 366 days"),
        (["pause", "mailer", "--for", "1m"], "group='mailer' needs a namespace"),
        (["resume", "mailer"], "group='mailer' needs a namespace"),
        (["release", "mailer"], "group='mailer' needs a namespace"),
        (["show", "--json", "--watch", "1"], "--json prints once"),
        (["show", "--verify", "--group", GROUP], "--verify reads all once"),
    ],
    ids=str,
)
def test_bad_input_is_refused_and_nothing_is_written(log_topic, run, words, told):
    log = log_topic(1)
    refused = run(log, *words, code=2)
    assert told in str(refused.exception)
    view = look(run, log)
    assert view["pauses"] == view["parts"] == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["pause", GROUP, "--for", "10"], "is no duration: give a number and its unit"),
        (["pause", GROUP, "--until", "soon"], "'soon' is no time"),
        (["set-position", GROUP, "orders", "--to", "-1"], "'-1' is no time"),
        (["set-position", GROUP, "orders", "--to", 5_000 * "9"], "is no time: give"),
        (["set-position", GROUP, "orders", "--to", "²"], "'²' is no time"),
        (["set-position", GROUP, "orders", "--to", "٣"], "'٣' is no time"),
        (["set-position", GROUP, "orders"], "Missing option '--to'"),
    ],
    ids=str,
)
def test_words_that_say_nothing_are_refused(run, words, told):
    assert told in " ".join(run("log", *words, code=2).stderr.split())


def test_without_a_log_or_a_broker_the_commands_say_what_to_set(run, monkeypatch):
    refused = run("", "show", code=2)
    assert "Give its name in Kafka by --log, or set JOBS_LIB_C" in str(
        refused.exception
    )
    refused = run("no-log", "show", code=2)
    assert "'no-log' does not exist" in str(refused.exception)
    monkeypatch.delenv("JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS")
    assert "no Kafka broker is set" in str(run("log", "show", code=2).exception)


def test_a_group_that_is_released_claims_anew_where_it_was(
    log_topic, topic, publish, consume, run, wait_for
):
    log, data = log_topic(), topic(2)
    publish(data, 5, 0)
    consumer, handler = consume(log, data)
    wait_for(lambda: len(handler.seen) == 5)
    held = consumer.member.log.find
    shared = Shared(GROUP, data, 0)
    before = held(shared).holding.claim
    assert run(log, "release", GROUP).stdout == f"released: {GROUP}\n"
    wait_for(
        lambda: (found := held(shared).holding) is not None and found.claim > before
    )
    assert held(shared).position == 5
    assert look(run, log)["pauses"] == []
    begun = handler.begun
    handler.may_go.clear()
    publish(data, 1, 1)
    wait_for(lambda: handler.begun > begun, what="the handler hangs")
    done = run(log, "release", GROUP, "--wait", "0.5", code=1)
    assert f"still held: {data}/1 by a" in done.stderr
    assert look(run, log)["pauses"] == []
    handler.may_go.set()
    run(log, "pause", GROUP, "--for", "10m")
    refused = run(log, "release", GROUP, code=2)
    assert "is paused until" in str(refused.exception)


def test_a_release_leaves_the_pause_that_somebody_makes_meanwhile(
    log_topic, settings, run, monkeypatch
):
    log = log_topic()
    wait = wait_until_free

    def let_go_and_pause(*_):
        monkeypatch.setattr(pauses, "wait_until_free", wait)
        pause(settings, log, GROUP, timedelta(minutes=10))
        return []

    monkeypatch.setattr(pauses, "wait_until_free", let_go_and_pause)
    assert run(log, "release", GROUP).stdout == f"released: {GROUP}\n"
    (left,) = look(run, log)["pauses"]
    assert left["places"] == 2


def test_no_probe_of_an_operator_counts_as_a_sign_of_a_member(monkeypatch):
    sent: list[Any] = []
    monkeypatch.setattr(Log, "start", lambda log: None)
    with session.open_for(load_settings(), "log", GROUP) as log:
        place = Place(0, 5, 5)
        place.is_partial = True
        log._places, log.partitions = [place], 1
        log._writer = Mock(send=lambda one, *_: sent.append(one.message))
        log._ask_for_snapshot(place)
        log._tell_loss(place)
        log.probe([0])
        log._writer = None
    # Members of the paused group would leave a share to it.
    assert [type(one) for one in sent] == [Probe] * 3
    assert {one.sender for one in sent} == {Sender(OPERATORS, *log.sender[1:])}
    assert log.sender.group_id == GROUP


def test_a_topic_that_kafka_does_not_have_is_shown_without_a_lag(
    log_topic, open_log, run
):
    log = log_topic(1)
    here = open_log(log)
    shared = Shared(GROUP, "not a topic\x1b[31m", 0)
    here.send(ClaimingPartition(here.sender, shared, 500)).wait(WAIT)
    here.send(Heartbeat(here.sender, shared, 0, 7)).wait(WAIT)
    (part,) = look(run, log)["parts"]
    assert (part["position"], part["lag"]) == (7, None)
    assert "\x1b[31m" not in run(log, "show").stdout


def test_a_position_behind_the_end_has_a_negative_lag(
    log_topic, topic, open_log, run, settings
):
    log, data = log_topic(1), topic(1)
    here = open_log(log)
    shared = Shared(GROUP, data, 0)
    here.send(ClaimingPartition(here.sender, shared, 500)).wait(WAIT)
    here.send(ReleasingPartition(here.sender, shared, 0, 7)).wait(WAIT)
    assert look(run, log)["parts"][0]["lag"] == -7
    with Viewer(settings, log, "shop.other") as viewer:
        assert viewer.look().parts == []


def test_the_commands_load_no_database_driver(log_topic, bootstrap_servers):
    log = log_topic()
    code = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from jobs_lib.cli.main import cli\n"
        f"for words in (['show'], ['check'], ['pause', {GROUP!r}, '--for', '1m']):\n"
        "    done = CliRunner().invoke(cli, ['coordination', *words])\n"
        "    assert done.exit_code == 0, done.output\n"
        "print([one for one in sys.modules if one.split('.')[0] in "
        "{'psycopg', 'psycopg_pool', 'sqlalchemy', 'alembic'}])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={
            "JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS": bootstrap_servers,
            "JOBS_LIB_COORDINATION_TOPIC": log,
            "PYTHONPATH": ":".join(sys.path),
        },
    )
    assert done.stdout == "[]\n", done.stderr
