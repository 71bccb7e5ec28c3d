"""A failure in a test is noticed, unless the test expects it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jobs_lib import masking, telemetry
from tests.support.apps import heard
from tests.support.canary import VALUE
from tests.support.expectations import Watch, watch


def test_an_event_that_was_not_expected_is_found_once():
    own = Watch()
    own.note("loop.failed", {"loop": "relay", "error": "no"})
    with own.expecting(["loop.failed"]):
        own.note("loop.failed", {"loop": "relay", "error": "said"})
        own.note("jobs.fenced", {"ids": [7]})
    own.note("origins.lost", {"origins": ["t/1"]})
    assert own.take() == (
        "loop.failed {'loop': 'relay', 'error': 'no'}\n"
        "jobs.fenced {'ids': [7]}\n"
        "origins.lost {'origins': ['t/1']}"
    )
    assert own.take() == ""


def test_the_log_of_another_process_is_read():
    own = Watch()
    lines = [
        "loop.failed loop=executor error=refused sqlstate=None",
        "2026-01-01 WARNING jobs_lib: jobs.fenced ids=[7]",
        "the test mentions loop.failed",
        "origins.taken role=execute origins=['t/1']",
    ]
    with own.expecting(["jobs.fenced"]):
        own.read(lines)
    assert own.take() == lines[0]


def test_the_name_fenced_covers_all_events_of_a_take_over():
    own = Watch()
    with own.expecting(["fenced"]):
        own.note("jobs.fenced", {"ids": [7]})
        own.note("origins.lost", {"origins": ["t/1"]})
        own.note("loop.failed", {"loop": "relay", "error": "FencedError: taken over"})
        own.note("loop.failed", {"loop": "relay", "error": "refused"})
    assert own.take() == "loop.failed {'loop': 'relay', 'error': 'refused'}"


@pytest.mark.parametrize("code", ["COORDINATOR_LOAD_IN_PROGRESS", "NOT_COORDINATOR"])
def test_errors_of_a_starting_broker_are_no_failures(code):
    own = Watch()
    error = f"KafkaException: Failed to initialize Producer ID: Broker: … ({code})"
    own.note("loop.failed", {"loop": "relay shard 1", "error": error})
    assert own.take() == ""


def test_a_long_list_of_unexpected_events_is_shortened():
    own = Watch()
    for n in range(8):
        own.note("jobs.fenced", {"ids": [n]})
    assert own.take().splitlines()[4:] == ["jobs.fenced {'ids': [4]}", "and 3 more"]


@pytest.mark.expects("loop.failed")
def test_an_event_named_by_a_mark_or_a_listener_is_expected():
    telemetry.emit("loop.failed", loop="test", error=ValueError("made to fail"))
    with heard("jobs.fenced"):
        telemetry.emit("jobs.fenced", ids=[7])
    assert watch.take() == ""
    telemetry.emit("jobs.fenced", ids=[8])
    assert watch.take() == "jobs.fenced {'ids': [8]}"


def test_an_undocumented_event_and_an_event_with_a_value_are_found(monkeypatch):
    # Another test may have declared a part of the value a secret, which is never shown.
    monkeypatch.setattr(masking, "_pattern", None)
    telemetry.emit("rows.forgotten", shard=1)
    telemetry.emit("job.ran", job=None, outcome="retried", error=VALUE)
    assert watch.take().splitlines() == [
        "the table of events has no rows.forgotten",
        "job.ran holds a value",
    ]


def test_a_value_that_another_process_writes_is_found():
    own = Watch()
    own.read(["fine", f"it is {VALUE}"])
    assert own.take() == f"a process has written a value: it is {VALUE}"


def test_the_table_has_the_events_that_are_emitted_and_no_others():
    here = Path(telemetry.__file__)
    source = "".join(
        file.read_text() for file in here.parents[1].rglob("*.py") if file != here
    )
    emitted = {*re.findall(r'emit\(\s*"([a-z_.]+)"', source)}
    assert emitted - telemetry.EVENTS == set()
    # Code looks up some events by a name.
    assert {event for event in telemetry.EVENTS if f'"{event}"' not in source} == set()
