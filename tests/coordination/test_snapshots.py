"""Snapshots of a log: how they are spelt, and which of them count."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jobs_lib.coordination as package
from jobs_lib.coordination.messages import (
    ClaimingPartition,
    Probe,
    ReleaseGroup,
    ReleasingPartition,
    Sender,
    Shared,
    Unreadable,
    decode,
    encode,
)
from jobs_lib.coordination.snapshots import EVERY_MS, Collector, Pacer, split
from jobs_lib.coordination.world import World, find_digest
from tests.coordination.listener import Listener, Snapshots, begin, parse, spell

ANN = Sender("shop.mailer", "ann", "1")
ORDERS = Shared("shop.mailer", "orders", 0)
characters = st.characters(exclude_categories=["Cs"]) | st.sampled_from(
    '"\\/\n\r\t\b\f\0\x1f\x7f\x80\u2028\uffff\U00010000\U0001f600'
)
names = st.text(characters, min_size=1, max_size=3)


def read_example() -> bytes:
    """Read the snapshot that stands in PROTOCOL.md."""
    assert package.__file__ is not None
    page = Path(package.__file__).with_name("PROTOCOL.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    return str(found).encode()


@pytest.mark.guarantee("M2", "M4")
def test_the_example_of_the_page_is_what_members_write_and_read():
    example = read_example()
    theirs = Snapshots(1).hear(42, example)
    assert theirs is not None
    listener = begin(0, theirs)
    found = json.loads(example)
    assert spell(listener) == (found["entries"], found["pauses"])
    assert listener.positions == {
        ("shop.mailer", "orders", 3): 17,
        ("shop.mailer", "orders", 20): 7,
    }
    assert list(listener.holders) == [("shop.mailer", "orders", 3)]
    ours = Collector().read(42, 1, example)
    assert ours is not None
    (part,) = split(ours.restore(0), Sender("shop.mailer", "mailer-0", "5f2c"))
    assert json.loads(encode(part, 1)) == found | {"partial": False}


@pytest.mark.guarantee("M4")
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(names, names, names, st.integers(0, 20)), max_size=6))
def test_two_members_spell_equal_worlds_alike_whatever_the_names(drawn):
    world, listener = World(0), Listener(0)
    for group, topic, client, partition in drawn:
        sender = Sender(group, client, "1")
        claim = ClaimingPartition(sender, Shared(group, topic, partition), 500)
        for message in (claim, ReleaseGroup(sender, 2_000 + partition)):
            record = world.next_offset, 1_000, encode(message, 1)
            world.apply(*record)
            listener.hear(*record)
    entries, pauses, digest = world.spell()
    assert ("".join(entries), pauses) == spell(listener)
    theirs, found = Snapshots(1), None
    for offset, part in enumerate(split(world, ANN, 50), world.next_offset):
        found = theirs.hear(offset, encode(part, 1))
    if world.next_offset:
        assert found is not None
        assert found["digest"] == digest


def make_part(**more):
    """Make a snapshot of one part, with other fields."""
    world = World(0)
    world.fold(0, 1_000, 1, ClaimingPartition(ANN, ORDERS, 500))
    (part,) = split(world, ANN)
    changed = part._replace(**more)
    digest = find_digest([changed.entries], changed.pauses)
    return changed._replace(**({"digest": digest} | more))


LINE = '["a.b","t",0,null,null,null,null,null,null,null]\n'


@pytest.mark.parametrize(
    ("more", "counts"),
    [
        ({}, True),
        ({"as_of": 6}, True),
        ({"as_of": 7}, False),
        ({"as_of": 8}, False),
        ({"part": 1}, False),
        ({"parts": 0}, False),
        ({"parts": 2}, False),
        ({"digest": "0" * 64}, False),
        ({"digest": make_part().digest.upper()}, False),
        ({"sender": ANN}, True),
        ({"entries": LINE}, True),
        ({"entries": LINE * 2}, False),
        ({"entries": LINE.rstrip()}, False),
        ({"entries": LINE.replace("0", "-1")}, False),
        ({"entries": LINE.replace("null]", "true]")}, False),
        ({"entries": LINE.replace('"t"', "5")}, False),
        ({"entries": '"a text of the length"\n'}, False),
        ({"pauses": '["a.b",5,"x","1"]\n'}, True),
        ({"pauses": '["a.b",5,"x"]\n'}, False),
        ({"pauses": '["a.b",5,"x","1"]\n' * 2}, False),
    ],
)
def test_a_snapshot_counts_if_its_parts_lines_and_digest_are_right(more, counts):
    value = encode(make_part(**more), 1)
    assert not isinstance(decode(value), Unreadable)
    assert (Collector().read(7, 1, value) is not None) is counts
    assert (Snapshots(1).hear(7, value) is not None) is counts
    assert Collector().read(7, 2, value) is None


@pytest.mark.guarantee("M2")
@pytest.mark.parametrize("odd", ["5", "1", '"true"', "null", "false", "true"])
@pytest.mark.parametrize("name", ["partial", "wants_snapshot"])
def test_a_field_that_may_be_missing_is_so_unless_it_is_true(name, odd):
    message = make_part() if name == "partial" else Probe(ANN)
    value = encode(message, 1).replace(
        f'"{name}":false'.encode(), f'"{name}":{odd}'.encode()
    )
    found, wanted = decode(value), parse(value)
    assert not isinstance(found, Unreadable)
    assert wanted is not None
    assert getattr(found[1], name) is (odd == "true")
    missing = value.replace(f',"{name}":{odd}'.encode(), b"")
    assert decode(missing) == (1, message)
    assert parse(missing) is not None


@pytest.mark.parametrize(
    "more",
    [
        {"time_ms": 5},
        {"parts": 3},
        {"partial": True},
        {"pauses": " "},
        {"sender": ANN},
        {"sender": Sender("-.-", "ben", "1")},
        {"sender": Sender("-.-", "ann", "2")},
    ],
)
def test_parts_that_differ_in_what_all_say_do_not_belong_together(more):
    whole = make_part()
    halves = [
        whole._replace(parts=2),
        whole._replace(parts=2, part=1, entries=""),
    ]
    wrong = [halves[0]._replace(**more), halves[1]]
    for parts, counts in ((halves, True), (wrong, False)):
        ours, theirs = Collector(), Snapshots(1)
        values = [encode(one, 1) for one in parts]
        found = [ours.read(7 + at, 1, one) for at, one in enumerate(values)]
        heard = [theirs.hear(7 + at, one) for at, one in enumerate(values)]
        assert (found[0], heard[0]) == (None, None)
        assert (found[1] is not None, heard[1] is not None) == (counts, counts)


@pytest.mark.guarantee("M2", "M4")
def test_what_was_held_once_has_an_entry_and_nothing_else_has():
    world, listener = World(0), Listener(0)
    never = Shared("shop.mailer", "orders", 1)
    for message in (
        ReleasingPartition(ANN, never, 0, 5),
        ClaimingPartition(ANN, ORDERS, 500),
        ReleasingPartition(ANN, ORDERS, 1, None),
    ):
        record = world.next_offset, 1_000, encode(message, 1)
        world.apply(*record)
        listener.hear(*record)
    line = f'["shop.mailer","orders",0{",null" * 7}]\n'
    assert (world.spell()[0], spell(listener)[0]) == ([line], line)
    restored = World(0)
    restored.restore(line, "")
    assert restored.spell()[0] == [line]


@pytest.mark.parametrize("apart_ms", [0, 40, 5_000])
def test_one_of_two_members_writes_a_snapshot_wherever_its_ten_minutes_began(apart_ms):
    members = ["a", "b"]
    pacers = {one: Pacer() for one in members}
    pacers["a"].written(0)
    pacers["b"].written(apart_ms)
    written: list[int] = []
    # Each sends a record in turn, and writes what it holds due after an own one.
    for number in range(1, 120_000):
        now_ms = 20 + number * 40
        sender = members[(number + 1) % 2]
        due = [one for one in members if pacers[one].is_due(0, now_ms)]
        if sender in due:
            written.append(now_ms)
            for one in members:
                pacers[one].written(now_ms)
    gaps = [after - before for before, after in itertools.pairwise([0, *written])]
    assert len(written) == 7
    assert max(gaps) < EVERY_MS + apart_ms + 20_000


def test_few_of_many_members_write_a_snapshot_while_it_is_on_its_way():
    count = 100
    pacers = [Pacer() for _ in range(count)]
    for number, one in enumerate(pacers):
        one.written(number % 3)
    written = 0
    for number in range(20_000):
        now_ms = EVERY_MS - 1_000 + number
        due = [one.is_due(0, now_ms) for one in pacers]
        written += due[number % count]
    assert written <= 5
