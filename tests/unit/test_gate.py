"""The gate's decision: what other groups have committed opens it, and nothing else."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import pytest

from jobs_lib import App, ConfigurationError, Exact, Job
from jobs_lib.consuming import gated as module
from jobs_lib.consuming.circles import Circles
from jobs_lib.consuming.consumer import Consumer
from jobs_lib.consuming.gate import Gate, Held, read_derived_from
from jobs_lib.consuming.gated import Gated
from jobs_lib.consuming.measures import Measures
from jobs_lib.consuming.progress import Ahead, Progress
from jobs_lib.consuming.queues import Queues
from jobs_lib.errors import RecordError
from jobs_lib.jobs.waiting import Source, find_fault
from jobs_lib.kafka.dependencies import (
    Dependency,
    Place,
    check_ends,
    find_end,
    find_wait,
)
from jobs_lib.kafka.positions import KnownOffsets
from jobs_lib.service.metrics import describe_consumers
from jobs_lib.settings import load_settings
from tests.support.apps import heard
from tests.support.fake_records import fake_record

B, C = Dependency("t", "b"), Dependency("t", "c")
OF_COMMON = Dependency("t0", "d")
AFTER = [("orders", "b")]


def know(*offsets: int | None) -> KnownOffsets:
    """An answer with the offset of each partition; None where there is none."""
    found = {number: at for number, at in enumerate(offsets) if at is not None}
    return KnownOffsets(len(offsets), found, time.monotonic())


def make_message(offset: int, partition: int = 0, made_of: str | None = None) -> Any:
    """Make a record of the topic t."""
    headers = [] if made_of is None else [("ce_derivedfrom", made_of.encode())]
    return fake_record(offset, topic="t", partition=partition, headers=headers)


@pytest.mark.guarantee("K6")
def test_the_slowest_group_counts_for_each_partition():
    answers = {B: know(30, 30, 10), C: know(23, 52, 15)}
    assert [find_end((B, C), answers, number) for number in range(3)] == [23, 30, 10]
    gate = Gate("t", (B, C))
    waits = [gate.find_wait({"t": Place(number, 99)}, answers) for number in range(3)]
    assert [wait and wait.dependency for wait in waits] == [C, B, B]
    assert [wait and wait.behind for wait in waits] == [77, 70, 90]


@pytest.mark.guarantee("K10")
def test_a_committed_offset_is_the_first_that_waits():
    gate, answers = Gate("t", (B,)), {B: know(5)}
    assert gate.find_wait({"t": Place(0, 4)}, answers) is None
    assert gate.find_wait({"t": Place(0, 5)}, answers) is not None
    block = [make_message(offset) for offset in (2, 4, 5, 9)]
    assert gate.count_open(block, answers) == 2
    assert gate.count_open(block[:2], answers) == 2
    assert gate.count_open(block[2:], answers) == 0
    assert gate.count_open(block, {B: know(10)}) == 4


@pytest.mark.guarantee("K11", "K18", "FK16")
@pytest.mark.parametrize(
    ("answer", "state", "says"),
    [
        (None, "unknown", "Kafka does not say how far the group 'b' is in 't'"),
        (know(None, None), "missing", "'b' has committed nothing of 't': does it run"),
        (know(None, 7), "waits", "'b' is at offset 0 of t/0, and has to pass 0"),
        (know(0, 7), "waits", "'b' is at offset 0 of t/0, and has to pass 0"),
    ],
    ids=["no answer", "unknown group", "no commit", "nothing read"],
)
def test_what_is_not_known_is_closed(answer, state, says):
    gate, answers = Gate("t", (B, C)), {B: answer, C: know(9, 9)}
    assert gate.count_open([make_message(0)], answers) == 0
    wait = gate.find_wait({"t": Place(0, 0)}, answers)
    assert wait is not None
    assert (wait.state, wait.dependency) == (state, B)
    assert says in wait.explain()
    assert find_wait(B, know(1), Place(0, 0)) is None


def at(read_at: float, **offsets: int) -> KnownOffsets:
    """Offsets of the partitions 0, 1, 2 that were read at this time."""
    found = {"abc".index(name): offset for name, offset in offsets.items()}
    return KnownOffsets(3, found, read_at)


@pytest.mark.guarantee("K3")
def test_an_offset_above_the_end_of_its_partition_closes_and_is_named():
    # Of the last one no end is known.
    found = check_ends(at(1, a=1_000, b=4, c=5), at(2, a=3, b=4), at(0, c=4))
    assert (found.offsets, found.above) == ({1: 4, 2: 4}, {0: 1_000})
    gate = Gate("t", (B,))
    assert gate.count_open([make_message(0)], {B: found}) == 0
    wait = gate.find_wait({"t": Place(0, 0)}, {B: found})
    assert wait is not None
    assert (wait.state, wait.behind) == ("above", 1)
    assert "offset 1000 of t/0, which is above its end" in wait.explain()
    assert gate.find_wait({"t": Place(1, 3)}, {B: found}) is None
    # It goes on being named before the end is read again.
    again = check_ends(at(3, a=1_000), at(2, a=3), found)
    assert (again.offsets, again.above) == ({}, {0: 1_000})
    # Of another offset that is above it nothing is known yet.
    moved = check_ends(at(3, a=5), at(2, a=3), found)
    assert (moved.offsets, moved.above) == ({}, {})


def test_an_offset_that_is_younger_than_the_end_waits_until_that_is_read():
    first = check_ends(at(1, a=5), at(2, a=5))
    then = check_ends(at(3, a=7), at(2, a=5), first)
    assert (then.offsets, then.above) == ({0: 5}, {})
    assert check_ends(at(3, a=7), at(4, a=8), then).offsets == {0: 7}
    # One that was set back counts at once.
    assert check_ends(at(3, a=2), at(2, a=5), first).offsets == {0: 2}


def test_a_partition_that_the_other_topic_does_not_have_is_closed():
    assert find_end((B,), {B: know(9)}, 1) == 0


def test_a_group_of_which_nothing_is_known_is_named_before_one_that_is_far_behind():
    gate = Gate("t", (B, OF_COMMON))
    places = {"t": Place(0, 1_000), "t0": Place(0, 3)}
    wait = gate.find_wait(places, {B: know(1), OF_COMMON: know(None)})
    assert wait is not None
    assert wait.dependency == OF_COMMON


@pytest.mark.guarantee("K5")
def test_a_derived_record_is_judged_by_both_topics():
    gate = Gate("t", (B, OF_COMMON))
    block = [
        make_message(offset, made_of=f"t0/{part}/{at}")
        for offset, part, at in ((0, 0, 7), (1, 1, 3), (2, 0, 8), (3, 0, 1))
    ]
    assert gate.count_open(block, {B: know(9), OF_COMMON: know(8, 4)}) == 2
    assert gate.count_open(block, {B: know(1), OF_COMMON: know(8, 4)}) == 1
    assert gate.count_open(block, {B: know(9), OF_COMMON: know(8, 3)}) == 1
    assert gate.count_open(block, {B: know(9), OF_COMMON: know(9, 4)}) == 4
    assert gate.locate(block[1]) == {"t": Place(0, 1), "t0": Place(1, 3)}


@pytest.mark.parametrize(
    "text",
    [None, "", "t0", "t0/0", "t1/0/1", "t0/0/-1", "t0/x/1", "t0/0/1/2", "t0/0/²"],
)
def test_a_header_that_names_no_place_of_the_topic_is_refused(text):
    with pytest.raises(RecordError, match=r"t/0 offset 6 .*t0/<partition>/<offset>"):
        read_derived_from(make_message(6, made_of=text), "t0")


def test_records_before_one_without_such_a_header_go_first():
    gate, answers = Gate("t", (OF_COMMON,)), {OF_COMMON: know(8)}
    block = [make_message(0, made_of="t0/0/7"), make_message(1)]
    assert gate.count_open(block, answers) == 1
    with pytest.raises(RecordError):
        gate.count_open(block[1:], answers)


# Partitions that are held


class Answering:
    """Gives answers of two groups, and notes for which ages it is asked."""

    def __init__(self, **answers: KnownOffsets | None) -> None:
        self.answers = answers
        self.within: list[float] = []
        self.listen = Mock()

    def ask_handled(
        self, group: str, topic: str, *, within: float
    ) -> KnownOffsets | None:
        self.within.append(within)
        return self.answers.get(group)


@pytest.fixture
def positions() -> Answering:
    """Both groups have passed four records of each partition."""
    return Answering(b=know(4, 4), c=know(4, 4))


@pytest.fixture
def member() -> Any:
    """A member that notes what it is told."""
    return Mock()


@pytest.fixture
def queues(member) -> Queues:
    """Two partitions with ten records each."""
    queues = Queues(member, 1_000_000)
    for number in range(2):
        progress = Progress(("t", number), 1, 0, reading=True, most=100)
        progress.push([make_message(offset, number) for offset in range(10)])
        queues.partitions["t", number] = progress
    return queues


@pytest.fixture
def gated(queues, positions) -> Gated:
    """What holds these partitions."""
    declared: Any = [Mock(topic="t", after=(B, C)), Mock(topic="free", after=())]
    return Gated("a", declared, queues, positions, refresh=2.0)


def hold(gated: Gated, queues: Queues, number: int = 0) -> Progress:
    """Apply what may be applied of a partition, so that the rest is held."""
    progress = queues.partitions["t", number]
    while block := gated.cut(progress, progress.choose()):
        progress.move((block[-1].offset() or 0) + 1, len(block))
    return progress


@pytest.mark.guarantee("K18")
def test_an_answer_counts_for_three_refreshes(gated, queues, positions):
    hold(gated, queues)
    assert {*positions.within} == {6.0}


@pytest.mark.guarantee("K10", "K13")
def test_no_thread_takes_a_partition_that_is_held(gated, queues):
    progress = hold(gated, queues)
    assert progress.stored == 4
    assert progress.held is not None
    assert not progress.is_ready(time.monotonic())
    assert queues.partitions["t", 1].is_ready(time.monotonic())


@pytest.mark.parametrize("mark", ["in_doubt", "replaced", "stopped", "range"])
def test_a_held_partition_is_taken_for_anything_else(gated, queues, mark):
    progress = hold(gated, queues)
    setattr(progress, mark, (20, 30) if mark == "range" else True)
    now = time.monotonic()
    if mark == "range":
        # What is in memory goes in first, and it waits.
        assert not progress.is_ready(now)
        progress.drop_all()
    assert progress.is_ready(now)


@pytest.mark.guarantee("K7")
def test_an_answer_opens_what_it_allows(gated, queues, positions, member):
    first, second = hold(gated, queues, 0), hold(gated, queues, 1)
    positions.answers["b"] = know(5, 4)
    gated.judge()
    assert first.held is not None
    positions.answers["c"] = know(5, 9)
    gated.judge()
    assert first.held is None
    assert first.is_ready(time.monotonic())
    assert second.held is not None
    assert second.held.wait.dependency == B
    member.begin.assert_not_called()
    assert [one.offset() for one in gated.cut(first, first.choose())] == [4]


def test_a_partition_waits_since_its_record_began_to(gated, queues):
    progress = hold(gated, queues)
    assert progress.held is not None
    progress.held.since -= 100
    since = progress.held.since
    gated.cut(progress, progress.choose())
    assert progress.held.since == since


@pytest.mark.guarantee("K15")
def test_records_of_a_partition_that_waits_for_long_are_read_again(
    gated, queues, positions, member
):
    progress = hold(gated, queues)
    gated.look()
    assert len(progress.waiting) == 6
    assert progress.held is not None
    progress.held.since -= module._KEEP_SECONDS + 1
    gated._looked_at = 0.0
    gated.look()
    assert not progress.waiting
    assert not progress.reading
    member.pause.assert_called_once_with(("t", 0))
    # Nothing is left to let go.
    gated._looked_at = 0.0
    gated.look()
    member.pause.assert_called_once()
    member.begin.assert_not_called()
    positions.answers = {"b": know(9, 9), "c": know(9, 9)}
    gated.judge()
    member.begin.assert_called_once_with(("t", 0), 4)


def test_records_that_wait_for_long_are_kept_if_the_log_lost_those_behind(
    gated, queues
):
    progress = hold(gated, queues)
    # It may have lost these, too.
    progress.range = (20, 30)
    assert progress.held is not None
    progress.held.since -= module._KEEP_SECONDS + 1
    gated.look()
    assert len(progress.waiting) == 6


def test_a_partition_that_a_thread_has_keeps_its_records(gated, queues):
    progress = hold(gated, queues)
    assert progress.held is not None
    progress.held.since -= module._KEEP_SECONDS + 1
    progress.busy = True
    gated.look()
    assert progress.waiting


@pytest.mark.guarantee("K20")
def test_many_closed_partitions_are_one_event_and_are_not_told_again(gated, queues):
    held = [hold(gated, queues, number).held for number in range(2)]
    for number, one in enumerate(held):
        assert one is not None
        one.since -= module._TELL_SECONDS + 1 + number
    with heard("gate.closed", "gate.opened") as told:
        for _ in range(3):
            gated._looked_at = 0.0
            gated.look()
        assert [event for event, _ in told] == ["gate.closed"]
        fields = told[0][1]
        assert (fields["count"], fields["origin"], fields["after"]) == (2, "t/1", "b")
        for progress in queues.partitions.values():
            progress.held = None
        for _ in range(2):
            gated._looked_at = 0.0
            gated.look()
    assert [event for event, _ in told] == ["gate.closed", "gate.opened"]
    assert told[1][1]["seconds"] >= module._TELL_SECONDS


def test_a_topic_without_dependencies_is_free(gated):
    progress = Progress(("free", 0), 1, 0)
    block = [make_message(7)]
    assert gated.cut(progress, block) is block


def test_a_record_that_cannot_be_judged_does_not_stay_held(queues, positions):
    declared: Any = [Mock(topic="t", after=(OF_COMMON,))]
    gated = Gated("a", declared, queues, positions, refresh=1.0)
    progress = queues.partitions["t", 0]
    wait: Any = Mock()
    progress.held = Held({"t0": Place(0, 1)}, wait, time.monotonic())
    with pytest.raises(RecordError):
        gated.cut(progress, progress.choose())
    assert progress.held is None


@pytest.mark.guarantee("K15", "FK17")
def test_a_thousand_held_partitions_are_compared_once_for_each_answer(positions):
    queues = Queues(Mock(), 1_000_000)
    positions.answers = {"b": know(*[0] * 1_000), "c": know(*[9] * 1_000)}
    declared: Any = [Mock(topic="t", after=(B, C))]
    gated = Gated("a", declared, queues, positions, refresh=1.0)
    for number in range(1_000):
        progress = Progress(("t", number), 1, 0, reading=True, most=100)
        progress.push([make_message(0, number)])
        queues.partitions["t", number] = progress
        hold(gated, queues, number)
    assert queues.take() is None
    positions.within.clear()
    gated.judge()
    assert len(positions.within) == 2
    positions.listen.assert_called_once_with(gated.judge)


@pytest.mark.guarantee("K4", "K18")
def test_kafka_is_asked_again_where_nobody_has_to_wait(gated, positions):
    gated.look()
    assert len(positions.within) == 2
    gated.look()
    assert len(positions.within) == 2


@pytest.mark.guarantee("K12")
def test_a_block_that_was_read_ahead_is_judged_again(positions, queues):
    declared: Any = Mock(topic="t", after=(B, C), block=None)
    consumer = Consumer(
        *(Mock(), Mock(group="a"), [declared], uuid4()),
        block=100,
        block_seconds=1.0,
        prefetch_bytes=1_000_000,
        heartbeat=1.0,
        topic_ids=Mock(),
        dependencies=positions,
    )
    progress = queues.partitions["t", 0]
    block = [*progress.waiting][:4]
    ahead = progress.ahead = Ahead(block, Mock())
    assert consumer._choose(progress) == (block, ahead)
    for committed, left in ((3, block[:3]), (0, [])):
        positions.answers["c"] = know(committed)
        progress.ahead = Ahead(block, Mock())
        assert consumer._choose(progress) == (left, None)


@pytest.mark.guarantee("K20")
def test_metrics_show_how_long_each_partition_waits_and_for_whom(gated, queues):
    measures = Measures(Mock(group="a"), queues.partitions, queues.changed)
    measures.gated = frozenset({"t"})
    for number in range(2):
        held = hold(gated, queues, number).held
        assert held is not None
        held.since -= 60 * (number + 1)
    (first, second) = measures.find_waits()
    assert (first.partition, first.after) == (("t", 1), "b")
    assert 120 <= first.seconds < 180
    assert 60 <= second.seconds < 120
    families = {one.name: one for one in describe_consumers([measures], None)}
    (count,) = families["jobs_lib_consumer_gate_partitions"].samples
    assert (count.labels, count.value) == ({"group": "a", "topic": "t"}, 2)
    longest, _ = families["jobs_lib_consumer_gate_seconds"].samples
    expected = {"group": "a", "topic": "t", "partition": "1", "after": "b"}
    assert longest.labels == expected
    assert longest.value >= 120
    queues.partitions["t", 1].leaving = True
    assert [one.partition for one in measures.find_waits()] == [("t", 0)]


# Declarations


@pytest.fixture
def app() -> App:
    return App("shop", settings=load_settings(environment="dev"))


def handle(record: Any, conn: Any) -> None: ...


def run(job: Job) -> None: ...


@pytest.mark.guarantee("U4")
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("others", "`after` of .* is 'others': give pairs of a topic and a group"),
        (("orders", "others"), "give pairs"),
        ([("orders",)], "give pairs"),
        ([("orders", "g", "h")], "give pairs"),
        ([("orders", 7)], "give pairs"),
        (7, "`after` of .* is 7"),
        ([("no topic", "others")], "'no topic' is no name for a topic"),
        ([("orders", "")], "'' is no name for a consumer group"),
        ([("orders", "g")], "waits for its own group.*leave .* out of `after`"),
        ([("flights", "g")], "waits for its own group"),
        ([("a", "x"), ("b", "x")], "'a' and 'b', .* one more at most"),
    ],
)
def test_what_is_no_dependency_is_refused(app, given, says):
    with pytest.raises(ConfigurationError, match=says):
        app.consumer("orders", group="g", after=given)
    with pytest.raises(ConfigurationError, match=says):
        app.read_model("orders", table="t", key="id", group="g", after=given)
    assert not app.consumers


def test_names_are_those_of_the_environment_and_exact_ones_stay(app):
    after = [("orders", "b"), ("orders", Exact("c")), ("orders", "b")]
    app.consumer("orders", group="g", after=after)(handle)
    (declared,) = app.consumers
    topic = "dev.orders"
    assert declared.after == (Dependency(topic, "dev.b"), Dependency(topic, "c"))


def test_handlers_of_one_topic_and_group_wait_for_the_same(app):
    app.consumer("orders", group="g", type="a", after=AFTER)(handle)
    with pytest.raises(ConfigurationError, match="give them the same after"):
        app.consumer("orders", group="g", type="b")(handle)


def test_a_dependency_has_the_name_that_the_environment_gives_it(app):
    app.consumer("orders", group="g", after=[("orders", Exact("dev.h"))])(handle)
    with pytest.raises(ConfigurationError, match="of the environment 'dev'"):
        app.names_in_kafka()


def test_a_resynchronisation_waits_for_the_same_groups(app):
    declare = app.read_model("orders", table="t", key="id", group="g", after=AFTER)
    declare(lambda record: {})
    (declared,) = app.consumers
    other = declared.make_again("dev.g.again")
    assert (other.topic, other.group) == ("dev.orders", "dev.g.again")
    assert other.after == declared.after == (Dependency("dev.orders", "dev.b"),)


def test_a_longer_circle_is_named_and_other_paths_are_not(app):
    for group, other in (("a", "b"), ("b", "c"), ("c", "d"), ("d", "b")):
        app.consumer("orders", group=group, after=[("orders", other)])(handle)
    on = "on 'dev.orders'"
    circle = " for ".join(f"'dev.{one}' {on}" for one in ("b", "c", "d", "b"))
    with pytest.raises(ConfigurationError, match=circle):
        app.names_in_kafka()


@pytest.mark.guarantee("K22")
def test_a_consumer_that_waits_for_its_own_jobs_is_refused(app):
    app.consumer("orders", group="g", done=True, after=[("orders", "g.done")])(handle)
    with pytest.raises(ConfigurationError, match="waits for its own group"):
        app.names_in_kafka()


@pytest.mark.guarantee("K22")
def test_a_circle_through_the_jobs_of_a_consumer_is_refused(app):
    app.consumer("orders", group="a", done=True, after=[("orders", "b")])(handle)
    app.consumer("orders", group="b", after=[("orders", "a.done")])(handle)
    with pytest.raises(
        ConfigurationError, match=r"'dev\.a' .* for 'dev\.b' .*'dev\.a'"
    ):
        app.names_in_kafka()


@pytest.mark.guarantee("K5")
def test_a_circle_through_a_derived_topic_is_refused(app):
    derived: Any = {"done": True, "derived_from": ("orders", "maker.done")}
    app.consumer("lines", group="a", after=[("lines", "b")], **derived)(handle)
    app.consumer("lines", group="b", after=[("orders", "a.done")])(handle)
    with pytest.raises(
        ConfigurationError, match=r"'dev\.a' .* for 'dev\.b' .*'dev\.a'"
    ):
        app.names_in_kafka()


@pytest.mark.guarantee("K5", "K22")
def test_a_maker_and_what_is_made_of_it_do_not_wait_for_each_other(app):
    app.consumer("orders", group="maker", done="sent", after=[("orders", "a.done")])(
        handle
    )
    derived: Any = {"done": True, "derived_from": ("orders", "maker.done")}
    app.consumer("lines", group="a", **derived)(handle)
    on = "on 'dev.orders'"
    circle = rf"'dev\.a\.done' {on} for 'dev\.maker\.done' {on} for 'dev\.maker' {on}"
    with pytest.raises(ConfigurationError, match=circle):
        app.names_in_kafka()


@pytest.mark.guarantee("K5")
@pytest.mark.parametrize("maker", ["a.done", "a", Exact("a.done")])
def test_a_consumer_that_makes_its_own_records_is_refused(maker):
    app = App("shop", settings=load_settings())
    derived: Any = {"done": True, "derived_from": ("orders", maker)}
    app.consumer("lines", group="a", **derived)(handle)
    with pytest.raises(ConfigurationError, match="waits for this consumer itself"):
        app.names_in_kafka()


def test_a_consumer_may_make_its_own_records_if_it_reads_both_topics(app):
    app.consumer("orders", group="a")(handle)
    derived: Any = {"done": True, "derived_from": ("orders", "a")}
    app.consumer("lines", group="a", **derived)(handle)
    assert "dev.lines" in app.names_in_kafka()


@pytest.mark.guarantee("K22")
def test_a_circle_through_jobs_that_wait_is_refused(app):
    app.consumer("t", group="g1", done=True)(handle)
    app.consumer("t", group="g2", after=[("t", "g1.done")])(handle)
    # What g2 enqueues has no reason to wait for g2, so these are jobs of g1.
    app.job(name="work", after=[("t", "g2")])(run)
    circle = r"'dev\.g1\.done' .* for jobs of 'work' for 'dev\.g2' .*'dev\.g1\.done'"
    with pytest.raises(ConfigurationError, match=circle):
        app.names_in_kafka()


@pytest.mark.guarantee("K5", "K22")
def test_a_circle_through_jobs_and_a_derived_topic_is_refused(app):
    app.consumer("orders", group="maker", done="sent")(handle)
    derived: Any = {"done": True, "derived_from": ("orders", "maker.done")}
    app.consumer("lines", group="a", **derived)(handle)
    app.job(name="work", after=[("orders", "a.done")])(run)
    circle = r"for jobs of 'work' for 'dev\.a\.done' on 'dev\.orders' for 'dev\.maker"
    with pytest.raises(ConfigurationError, match=circle):
        app.names_in_kafka()


def test_jobs_that_wait_for_themselves_whoever_enqueues_them_are_refused(app):
    for group in ("g1", "g2"):
        app.consumer("t", group=group, done=True)(handle)
    after = [("t", "g1.done"), ("t", "g2.done")]
    app.consumer("t", group="last", after=after)(handle)
    app.job(name="work", after=[("t", "last")])(run)
    with pytest.raises(ConfigurationError, match=r"jobs of 'work' for 'dev\.last'"):
        app.names_in_kafka()


def test_the_enqueue_shows_whose_jobs_wait_for_themselves(app):
    app.consumer("t", group="g1", done=True)(handle)
    app.consumer("t", group="g2", after=[("t", "g1.done")])(handle)
    app.consumer("t", group="g3")(handle)
    work = app.job(name="work", after=[("t", "g2")])(run)
    app.read_model("t", table="x", key="id", group="m")(lambda record: {})
    app.names_in_kafka()
    circles = Circles(app.consumers, app.jobs)
    fault = find_fault(work.after, Source("dev.g1", "dev.t", 0), circles.explain)
    assert fault is not None
    assert "itself: 'dev.g2' on 'dev.t' waits for 'dev.g1.done' on 'dev.t'" in fault
    for group in ("dev.g2", "dev.g3", "another app's"):
        source = Source(group, "dev.t", 0)
        assert find_fault(work.after, source, circles.explain) is None


def test_names_that_end_with_the_environment_show_circles_of_jobs_too():
    settings = load_settings(environment="dev", topic_template="{name}.{environment}")
    app = App("shop", settings=settings)
    app.consumer("t", group="g1", done=True)(handle)
    app.consumer("t", group="g2")(handle)
    work = app.job(name="work", after=[("t", "g1.done")])(run)
    app.names_in_kafka()
    explain = Circles(app.consumers, app.jobs).explain
    assert find_fault(work.after, Source("g1.dev", "t.dev", 0), explain) is not None
    assert find_fault(work.after, Source("g2.dev", "t.dev", 0), explain) is None


def test_two_paths_to_one_group_are_no_circle(app):
    for group, others in (("a", "bc"), ("b", "d"), ("c", "d")):
        after = [("orders", other) for other in others]
        app.consumer("orders", group=group, after=after)(handle)
    assert "dev.orders" in app.names_in_kafka()
