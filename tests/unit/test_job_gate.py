"""Types of jobs that wait for groups: what is declared, and when a gate is open."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock
from uuid import UUID

import pytest

from jobs_lib import App, ConfigurationError, Exact, Job
from jobs_lib.consuming.circles import Circles
from jobs_lib.errors import StoredPayloadError
from jobs_lib.executor.claiming import gated as gated_module
from jobs_lib.executor.claiming.claimer import Claimer
from jobs_lib.executor.claiming.gated import GatedRows
from jobs_lib.executor.claiming.wanted import WantedRows
from jobs_lib.executor.claiming.windows import Windows
from jobs_lib.executor.limiting import gate as module
from jobs_lib.executor.limiting.gate import GateClosed, JobGate
from jobs_lib.executor.section import divide
from jobs_lib.jobs.waiting import Source
from jobs_lib.kafka.dependencies import Dependency
from jobs_lib.kafka.positions import KnownOffsets
from jobs_lib.service.metrics import describe_gates
from jobs_lib.service.preparation import (
    can_reach_kafka,
    find_dependencies,
    find_placed,
)
from jobs_lib.settings import load_settings

if TYPE_CHECKING:
    from jobs_lib.jobs.type import JobType

B, C = Dependency("t", "b"), Dependency("t", "c")
MINE = Source("mine", "t", 1)


def make_app(**settings: Any) -> App:
    """An app without servers."""
    return App(
        "test", settings=load_settings(database_url="postgresql://x", **settings)
    )


def declare(app: App, after: Any, name: str = "work", **options: Any) -> JobType[Any]:
    """Declare a type of jobs."""

    def work(job: Job) -> None: ...

    return app.job(name=name, after=after, **options)(work)


@pytest.mark.parametrize(
    "after",
    ["flights", [("flights",)], [("flights", "g", "h")], [("flights", 1)], 7, [None]],
)
def test_what_is_no_pair_of_names_is_refused(after):
    with pytest.raises(ConfigurationError, match="give pairs of a topic and a group"):
        declare(make_app(), after)


def test_a_tick_has_no_record_to_wait_for():
    app = make_app()
    work = declare(app, [("t", "b")])
    with pytest.raises(ConfigurationError, match="and a tick is none"):
        app.periodic("* * * * *")(work)


def test_names_are_those_of_the_environment():
    app = make_app(environment="test", topic_template="{environment}.{name}")
    work = declare(app, [("t", "b"), (Exact("their"), Exact("group"))])
    assert work.after == (Dependency("test.t", "test.b"), Dependency("their", "group"))
    assert find_placed(app) == {"test.t", "their"}
    assert find_dependencies(app, ["executor"]) == {*work.after}
    assert find_dependencies(app, ["consumers"]) == set()


def test_jobs_that_would_wait_for_themselves_are_refused():
    app = make_app()
    declare(app, [("t", "mine.done")])
    app.consumer("t", group="mine", done=True)(lambda record, conn: None)
    with pytest.raises(ConfigurationError, match="which waits until they are done"):
        app.names_in_kafka()
    # Another consumer's jobs may wait for that one's.
    app.consumer("t", group="other")(lambda record, conn: None)
    app.names_in_kafka()


def test_a_gate_needs_kafka():
    app = make_app()
    declare(app, [("t", "b")])
    with pytest.raises(ConfigurationError, match="KAFKA_BOOTSTRAP_SERVERS names no"):
        can_reach_kafka(app, ["executor"], sidecar=False)
    assert not can_reach_kafka(app, ["relay"], sidecar=False)


def test_types_that_wait_for_the_same_groups_are_claimed_together():
    app = make_app()
    declare(app, [("t", "b"), ("t", "c")], "one")
    declare(app, [("t", "c"), ("t", "b")], "same")
    declare(app, [("t", "b")], "other")
    declare(app, [("t", "b")], "limited", limit=2)
    declare(app, (), "free")
    sections = {tuple(sorted(one.types)): one.after for one in divide(app.jobs)}
    assert {types: {*after} for types, after in sections.items()} == {
        ("free",): set(),
        ("one", "same"): {B, C},
        ("other",): {B},
        ("limited",): {B},
    }


class Asked:
    """Stands for the client that asks Kafka."""

    def __init__(self) -> None:
        self.answers: dict[str, KnownOffsets] = {}
        self.listen = Mock()
        self.calls = 0

    def know(self, age: float = 0.0, **groups: dict[int, int]) -> None:
        """Answer with offsets by partition, of an age in seconds."""
        read_at = time.monotonic() - age
        for group, offsets in groups.items():
            self.answers[group] = KnownOffsets(3, offsets, read_at)
        for call in self.listen.call_args_list:
            call.args[0]()

    def ask_handled(
        self, group: str, topic: str, *, within: float
    ) -> KnownOffsets | None:
        """Return the last answer, unless it is too old."""
        self.calls += 1
        answer = self.answers.get(group)
        return answer if answer and answer.age <= within else None


@pytest.fixture
def asked() -> Asked:
    """What Kafka answers."""
    return Asked()


@pytest.fixture
def gate(asked) -> JobGate:
    """A gate that waits for two groups, with one partition that is known."""
    made = JobGate(["work"], [B, C], asked, 10.0)
    made.note_sources([(7, *MINE)])
    return made


def start(gate: JobGate, record: str) -> None:
    """Start a job as a worker does; raises if it may not."""
    job: Any = SimpleNamespace(id=1, type="work", record=record)
    gate.guard(lambda job: None, is_async=False)(job)


@pytest.mark.guarantee("K11", "K18")
def test_a_job_starts_only_on_answers_that_are_known_and_new(gate, asked, monkeypatch):
    with pytest.raises(GateClosed):
        start(gate, "7:4")
    asked.know(b={1: 9})
    with pytest.raises(GateClosed):
        start(gate, "7:4")
    asked.know(c={1: 5})
    start(gate, "7:4")
    with pytest.raises(GateClosed):
        start(gate, "7:5")
    asked.know(c={0: 5})
    with pytest.raises(GateClosed):
        start(gate, "7:0")
    asked.know(age=29.9, b={1: 9}, c={1: 5})
    start(gate, "7:4")
    asked.know(age=30.1, b={1: 9}, c={1: 5})
    with pytest.raises(GateClosed):
        start(gate, "7:4")
    assert gate.find_ends() == {}
    # No answer comes any more.
    asked.know(b={1: 9}, c={1: 5})
    start(gate, "7:4")
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 31)
    monkeypatch.setattr(module, "time", clock)
    with pytest.raises(GateClosed):
        start(gate, "7:4")
    assert gate.find_ends() == {}


def test_a_job_that_no_gate_can_judge_says_so(gate):
    gate.note_sources([(7, *MINE), (8, "mine", "elsewhere", 0)])
    with pytest.raises(StoredPayloadError, match="comes from no record of 't'"):
        start(gate, "")
    with pytest.raises(StoredPayloadError, match="comes from a record of 'elsewhere'"):
        start(gate, "8:1")
    # The numbers of partitions are read again before it is blamed.
    with pytest.raises(GateClosed):
        start(gate, "9:1")
    assert gate.missing == {9}
    gate.note_sources([(7, *MINE)], gate.missing)
    with pytest.raises(StoredPayloadError, match="comes from no record of 't'"):
        start(gate, "9:1")


def test_a_job_that_would_wait_for_itself_by_others_says_so(asked):
    app = make_app()
    app.consumer("t", group="mine", done=True)(lambda record, conn: None)
    app.consumer("t", group="b", after=[("t", "mine.done")])(lambda record, conn: None)
    explain = Circles(app.consumers, app.jobs).explain
    gate = JobGate(["work"], [B], asked, 10.0, explain)
    gate.note_sources([(7, *MINE), (8, "other", "t", 1)])
    asked.know(b={1: 5})
    with pytest.raises(StoredPayloadError, match=r"'b' on 't' waits for 'mine\.done'"):
        start(gate, "7:4")
    start(gate, "8:4")
    # So that a worker takes it, and says so.
    assert gate.find_end(MINE, gate.find_ends()) > 2**62


def test_dispatchers_are_woken_only_when_a_gate_has_moved(gate, asked):
    woken = Mock()
    gate.wakes.append(woken)
    asked.know(b={1: 9}, c={1: 5})
    assert woken.call_count == 1
    asked.know(b={1: 9}, c={1: 5})
    asked.know(b={1: 20}, c={1: 5})
    assert woken.call_count == 1
    asked.know(c={1: 6})
    assert woken.call_count == 2


@pytest.fixture
def rows(gate) -> tuple[GatedRows, Windows, WantedRows]:
    """The gates of one dispatcher, which owns one origin."""
    windows = Windows()
    windows.take({"home/0": 1})
    windows.cursors["home/0"].advance(1_000)
    return GatedRows(gate, ["work"]), windows, WantedRows(windows.cursors, ())


def look(rows: tuple[GatedRows, Windows, WantedRows]) -> tuple[Any, Any]:
    """Begin a round; return what it looks for, and the reader of the answer."""
    gated, windows, wanted = rows
    gated.look()
    batch = gated.prepare(windows.cursors, wanted)
    if not batch:
        return None, None
    ((_, parameters), read) = batch.questions[0]
    return parameters, read


@pytest.mark.guarantee("K12")
def test_jobs_are_looked_for_between_the_old_end_and_the_new_one(rows, asked):
    gated, _, wanted = rows
    assert look(rows) == (None, None)
    assert gated.parameters() == {"gate_first": 6, "gate_ends": "{0}"}
    asked.know(b={1: 9}, c={1: 5})
    given, read = look(rows)
    assert (given["sources"], given["lows"], given["ends"]) == ("{7}", "{0}", "{5}")
    # It was cut, and goes on behind the last one.
    read([(7, 2, 11, "home/0"), (7, 3, 12, None)])
    assert wanted.extra == {11: "home/0"}
    given, read = look(rows)
    assert (given["lows"], given["low_ids"], given["ends"]) == ("{3}", "{12}", "{5}")
    read([])
    assert look(rows) == (None, None)
    # Set back: what is passed over from now on may have any offset above.
    asked.know(c={1: 2})
    assert look(rows) == (None, None)
    assert gated.parameters()["gate_ends"] == "{2}"
    asked.know(c={1: 8})
    given, read = look(rows)
    assert (given["lows"], given["ends"]) == ("{2}", "{8}")
    # Without an answer nothing is known of what was passed over.
    asked.know(age=31.0, b={1: 9}, c={1: 8})
    assert look(rows) == (None, None)
    asked.know(b={1: 9}, c={1: 8})
    given, read = look(rows)
    assert (given["lows"], given["ends"]) == ("{0}", "{8}")


def test_jobs_of_a_new_partition_are_looked_for_from_its_start(rows, gate, asked):
    gated, _, _ = rows
    asked.know(b={1: 9, 2: 9}, c={1: 5, 2: 4})
    look(rows)[1]([])
    assert look(rows) == (None, None)
    # A claim has passed over them, since nothing was known of them.
    woken = Mock()
    gate.wakes.append(woken)
    gated.note("home/0", [9], [1])
    assert woken.call_count == 1
    assert (look(rows)[0], gate.missing) == ({}, {9})
    gate.note_sources([(7, *MINE), (9, "mine", "t", 2)])
    given, _ = look(rows)
    assert (given["sources"], given["lows"], given["ends"]) == ("{9}", "{0}", "{4}")
    assert gated.parameters()["gate_ends"] == "{5,0,4}"


def test_a_partition_met_while_the_partitions_are_read_is_asked_for_next(
    rows, gate, asked
):
    gated, _, _ = rows
    asked.know(b={1: 9, 2: 9}, c={1: 5, 2: 4})
    look(rows)[1]([])
    gated.note("home/0", [8], [1])
    _, read = look(rows)
    # The answer is on its way, and does not have this one yet.
    gated.note("home/0", [9], [1])
    read([(7, *MINE), (8, "mine", "elsewhere", 0)])
    assert gate.missing == {9}
    _, read = look(rows)
    read([(7, *MINE), (8, "mine", "elsewhere", 0), (9, "mine", "t", 2)])
    assert gate.missing == set()
    given, _ = look(rows)
    assert (given["sources"], given["ends"]) == ("{8,9}", f"{{{2**63 - 1},4}}")


def test_an_older_list_of_partitions_that_comes_later_takes_none_away(
    rows, gate, asked
):
    gated, _, _ = rows
    asked.know(b={1: 9, 2: 9}, c={1: 5, 2: 4})
    look(rows)[1]([])
    gated.note("home/0", [9], [1])
    # Two dispatchers have asked, and their answers overtake one another.
    (_, older), (_, newer) = look(rows), look(rows)
    newer([(7, *MINE), (9, "mine", "t", 2)])
    assert look(rows)[0]["sources"] == "{9}"
    older([(7, *MINE)])
    assert gate.missing == set()
    assert look(rows)[0]["sources"] == "{9}"


def test_partitions_are_read_anew_where_commits_may_be_lost(rows, gate, asked):
    gated, _, _ = rows
    asked.know(b={1: 9, 2: 9}, c={1: 5, 2: 4})
    look(rows)[1]([])
    gated.doubt()
    # Another partition has got the number since.
    given, read = look(rows)
    assert given == {}
    read([(7, "mine", "t", 2)])
    look(rows)
    assert gated.parameters()["gate_ends"] == "{4}"


def test_jobs_of_a_paused_origin_hold_up_no_look_for_those_of_others(rows, asked):
    gated, windows, wanted = rows
    windows.take({"home/1": 1})
    look(rows)
    asked.know(b={1: 9}, c={1: 5})
    wanted.add(dict.fromkeys(range(3_000), "home/1"))
    gated.look()
    batch = gated.prepare({"home/0": windows.cursors["home/0"]}, wanted)
    ((_, parameters), _) = batch.questions[0]
    assert (parameters["ends"], parameters["origins"]) == ("{5}", '{"home/0"}')


def test_no_more_is_looked_for_while_enough_is_wanted(rows, asked):
    _, _, wanted = rows
    look(rows)
    asked.know(b={1: 9}, c={1: 5})
    wanted.add(dict.fromkeys(range(3_000), "home/0"))
    assert look(rows) == (None, None)
    wanted.clear()
    assert look(rows)[0]["ends"] == "{5}"


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """The time of the gate, which stands still."""
    clock = SimpleNamespace(now=1_000.0)
    clock.monotonic = lambda: clock.now
    for one in (module, gated_module):
        monkeypatch.setattr(one, "time", clock)
    return clock


@pytest.mark.guarantee("K20")
def test_it_is_looked_up_now_and_then_whether_jobs_still_wait(rows, gate, asked, clock):
    gated, windows, _ = rows
    windows.take({"home/1": 1})
    gate.note_sources([(7, *MINE), (8, "mine", "t", 2), (9, "mine", "t", 3)])
    asked.know(b={1: 5}, c={1: 9})
    gate.find_ends = lambda: {"t": {1: 5}}
    look(rows)[1]([])
    for number in (7, 8, 9):
        gated.note("home/0", [number], [10])
    gated.note("home/9", [7], [11])
    gated.note("home/1", [7], [12])
    clock.now += 59
    assert look(rows) == (None, None)
    clock.now += 1
    given, read = look(rows)
    assert (given["sources"], given["lows"]) == ("{7,8,9}", "{5,0,0}")
    # Another job of 9 is passed over meanwhile.
    clock.now += 0.1
    gated.note("home/0", [9], [10])
    read([(8, True, None, 1)])
    # In origins of others it was not looked.
    waiting = {(place.origin, place.number) for place in gate._waiting}
    assert waiting == {("home/9", 7), ("home/0", 8), ("home/0", 9)}
    clock.now += 58
    assert look(rows) == (None, None)


def test_a_look_for_jobs_that_wait_goes_on_behind_those_of_others(
    rows, gate, asked, clock
):
    gated, _, _ = rows
    asked.know(b={1: 5}, c={1: 9})
    gate.find_ends = lambda: {"t": {1: 5}}
    look(rows)[1]([])
    gated.note("home/0", [7], [10])
    clock.now += 60
    look(rows)[1]([(7, False, 8, 123)])
    clock.now += 1
    given, read = look(rows)
    assert (given["lows"], given["low_ids"]) == ("{8}", "{123}")
    read([(7, False, None, 130)])
    assert gate.find_waits() == []
    # The next time it begins at the gate again.
    gated.note("home/0", [7], [10])
    clock.now += 60
    assert look(rows)[0]["lows"] == "{5}"


@pytest.mark.guarantee("K20")
def test_the_metric_names_the_slowest_group_of_each_partition(gate, asked):
    asked.know(b={1: 9}, c={1: 5})
    gate.note_waiting("home/0", 7, 8)
    (sample,) = describe_gates([gate]).samples
    assert sample.labels == {"topic": "t", "partition": "1", "after": "c"}
    assert 0 <= sample.value < 60
    asked.know(c={1: 9})
    assert describe_gates([gate]).samples == []


@pytest.mark.guarantee("K20")
def test_jobs_wait_no_longer_than_their_group_is_behind_under_steady_load(
    gate, asked, clock
):
    # A record a second, and a group that is three of them behind.
    for offset in range(60):
        asked.know(b={1: offset - 3}, c={1: offset})
        gate.note_waiting("home/0", 7, offset)
        (wait,) = gate.find_waits()
        assert wait.seconds <= 5
        clock.now += 1
    # It stands still: whoever came first has waited since.
    for offset in range(60, 90):
        gate.note_waiting("home/0", 7, offset)
        clock.now += 1
    (wait,) = gate.find_waits()
    assert 30 <= wait.seconds <= 35


@pytest.mark.guarantee("K20")
def test_a_gate_that_moves_past_all_but_the_last_job_tells_since_when_that_waits(
    gate, asked, clock
):
    asked.know(b={1: 0}, c={1: 0})
    gate.note_waiting("home/0", 7, 4)
    clock.now += 50
    gate.note_waiting("home/0", 7, 9)
    # The same ones are met again, and have waited all the time.
    clock.now += 7
    gate.note_waiting("home/0", 7, 9)
    gate.note_waiting("home/0", 7, 4)
    assert [one.seconds for one in gate.find_waits()] == [57]
    asked.know(b={1: 5}, c={1: 9})
    assert [(one.seconds, one.wait.behind) for one in gate.find_waits()] == [(7, 5)]
    asked.know(b={1: 10}, c={1: 10})
    assert gate.find_waits() == []


def test_kafka_is_asked_once_however_many_partitions_wait(gate, asked):
    asked.know(b={}, c={})
    gate.note_sources([(number, "mine", "t", number) for number in range(100)])
    for number in range(100):
        gate.note_waiting("home/0", number, 8)
    asked.calls = 0
    assert len(gate.find_waits()) == 100
    assert asked.calls == len(gate.after)


def test_the_metric_names_no_jobs_of_origins_that_others_own_now(gate, asked):
    asked.know(b={1: 9}, c={1: 5})
    claimer = Claimer(UUID(int=1), UUID(int=2), {}, gate=gate)
    claimer.take({"home/0": 1, "home/1": 1})
    for origin, offset in (("home/0", 8), ("home/1", 7)):
        claimer.gated.note(origin, [7], [offset])
    claimer.release(["home/0"])
    (wait,) = gate.find_waits()
    assert (wait.origin, wait.wait.place.offset) == ("t/1", 7)
    claimer.release(["home/1"])
    assert gate.find_waits() == []


def test_a_section_without_a_gate_reads_none():
    gated = GatedRows(None, ["work"])
    gated.look()
    assert (gated.suffix, gated.parameters()) == ("", {})
