"""The command that shows for which groups consumers wait."""

from __future__ import annotations

import json
import sys
import types
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from jobs_lib.cli import terminal
from jobs_lib.cli.main import cli
from jobs_lib.errors import TopicError
from jobs_lib.operating.gates import list_gates
from tests.support.apps import running
from tests.support.groups import Group
from tests.support.records import key_of, produce
from tests.support.transactions import open_transaction

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobs_lib import App

pytestmark = pytest.mark.usefixtures("patient_gates")
APP = "service_of_gates:app"


@pytest.fixture
def other(bootstrap_servers) -> Iterator[Group]:
    """A group that a consumer waits for."""
    group = Group(bootstrap_servers)
    yield group
    group.close()


def declare(app: App, name: str, *after: tuple[str, str]) -> None:
    @app.consumer(name, group=f"{name}-own", after=after)
    def handle(record, conn) -> None: ...


def shorten(app: App) -> list[tuple[Any, ...]]:
    """What the command shows, without the names of the consumer."""
    return [
        (
            part.partition,
            part.offset,
            part.after,
            part.committed,
            part.needs,
            part.state,
        )
        for part in list_gates(app)
    ]


@pytest.mark.guarantee("K20", "K11", "FK16")
def test_each_partition_shows_what_each_group_lacks(
    make, admin, bootstrap_servers, topic, other, wait_for, read_offsets, monkeypatch
):
    name = topic(3)
    app = make(gate_refresh=0.05)
    declare(app, name, (name, other.name), (name, "nobody"))
    keys = [key_of(partition, 3) for partition in range(2)]
    produce(bootstrap_servers, name, [(key, n) for key in keys for n in range(4)])
    other.commit_soon(name, {1: 1})
    waits = (None, 1, "missing")
    assert shorten(app) == [
        (0, 0, other.name, None, 1, "waits"),
        (0, 0, "nobody", *waits),
        (1, 0, other.name, 1, 1, "open"),
        (1, 0, "nobody", *waits),
        (2, 0, other.name, None, None, "empty"),
        (2, 0, "nobody", None, None, "missing"),
    ]
    free = make(gate_refresh=0.05)
    declare(free, name, (name, other.name))
    other.commit(name, 2, 4)
    with running(free, "consumers"):
        wait_for(lambda: read_offsets(name) == {0: 2, 1: 4}, timeout=30, what="stored")
    assert shorten(free) == [
        (0, 2, other.name, 2, 3, "waits"),
        (1, 4, other.name, 4, None, "empty"),
        (2, 0, other.name, None, None, "empty"),
    ]
    module: Any = types.ModuleType("service_of_gates")
    module.app = free
    monkeypatch.setitem(sys.modules, "service_of_gates", module)
    result = CliRunner().invoke(cli, ["gates", APP, "--json"])
    assert result.exit_code == 0
    first = json.loads(result.output)[0]
    assert first == {
        "group": f"{name}-own",
        "topic": name,
        "partition": 0,
        "offset": 2,
        "after_topic": name,
        "after": other.name,
        "committed": 2,
        "needs": 3,
        "state": "waits",
    }
    table = CliRunner().invoke(cli, ["gates", APP])
    assert other.name in table.output
    refused = CliRunner().invoke(cli, ["gates", APP, "--json", "--watch", "1"])
    assert "--json prints once" in str(refused.exception)


@pytest.mark.guarantee("K20")
def test_the_live_view_shows_how_a_gate_opens(
    make, bootstrap_servers, topic, other, monkeypatch
):
    name = topic(1)
    app = make()
    declare(app, name, (name, other.name))
    produce(bootstrap_servers, name, [("k", n) for n in range(4)])
    other.commit_soon(name, {0: 0})
    module: Any = types.ModuleType("service_of_gates")
    module.app = app
    monkeypatch.setitem(sys.modules, "service_of_gates", module)
    pauses: list[float] = []

    class Pause:
        """Stands for the pause between two tables; the second one ends by Ctrl-C."""

        def wait(self, seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 2:
                raise KeyboardInterrupt
            other.commit(name, 3)

    monkeypatch.setattr(terminal, "threading", types.SimpleNamespace(Event=Pause))
    result = CliRunner().invoke(cli, ["gates", APP, "--watch", "0.5"])
    assert (result.exit_code, pauses) == (0, [0.5, 0.5])
    before, after = [line for line in result.output.splitlines() if other.name in line]
    shown = [
        [cell.strip() for cell in line.split("│")[-4:-1]] for line in (before, after)
    ]
    assert shown == [["0", "1", "waits"], ["3", "1", "open"]]


def test_a_derived_record_shows_its_place_in_the_common_topic(
    make, bootstrap_servers, topic, other
):
    name, first = topic(2), topic(2)
    app = make()
    declare(app, name, (first, other.name))
    for partition, header in ((0, f"{first}/1/7"), (1, "nowhere")):
        produce(
            bootstrap_servers,
            name,
            [(key_of(partition, 2), 1)],
            headers={"ce_derivedfrom": header},
        )
    keys = [key_of(partition, 2) for partition in range(2)]
    produce(bootstrap_servers, first, [(key, n) for key in keys for n in range(8)])
    other.commit(first, 1, 7)
    assert shorten(app) == [
        (0, 0, other.name, 7, 8, "waits"),
        (1, 0, other.name, 7, None, "unknown"),
    ]
    other.commit(first, 1, 8)
    assert shorten(app)[0] == (0, 0, other.name, 8, 8, "open")


@pytest.mark.guarantee("K20")
def test_a_marker_of_a_transaction_is_no_record_that_waits(
    make, admin, bootstrap_servers, topic, other
):
    name = topic(2)
    app = make()
    declare(app, name, (name, other.name))
    open_transaction(bootstrap_servers, name, 2).commit_transaction(60)
    # All is handled, and behind the only record of each lies its marker.
    for number in range(2):
        admin.execute(
            "insert into jobs_lib.offsets (consumer_group, topic, partition,"
            " next_offset) values (%s, %s, %s, 1)",
            (f"{name}-own", name, number),
        )
    other.commit(name, 1, 1)
    assert shorten(app) == [
        (number, 1, other.name, 1, None, "empty") for number in range(2)
    ]


@pytest.mark.guarantee("K20")
def test_what_the_next_record_needs_counts_and_not_the_offset_before_it(
    make, bootstrap_servers, topic, other
):
    name = topic(1)
    app = make()
    declare(app, name, (name, other.name))
    hiding = open_transaction(bootstrap_servers, name, 1)
    for _ in range(19):
        hiding.produce(name, b"{}", key="open", partition=0)
    # An abort would throw away what is not sent yet.
    assert hiding.flush(30) == 0
    hiding.abort_transaction(60)
    # A tombstone is a record, too.
    produce(bootstrap_servers, name, [("k", None)])
    for committed, state in ((10, "waits"), (21, "waits"), (22, "open")):
        other.commit(name, committed)
        assert shorten(app) == [(0, 0, other.name, committed, 22, state)]


def test_an_app_whose_consumers_wait_for_nobody_shows_nothing(make):
    assert list_gates(make()) == []


def test_a_topic_that_does_not_exist_is_named(make):
    app = make()
    declare(app, "not-there", ("not-there", "others"))
    with pytest.raises(TopicError, match="not-there"):
        list_gates(app)


def test_a_transaction_that_is_open_has_no_next_record_yet(
    make, bootstrap_servers, topic, other
):
    name, first = topic(1), topic(1)
    app = make()
    declare(app, name, (first, other.name))
    other.commit(first, 7)
    hiding = open_transaction(bootstrap_servers, name, 1)
    try:
        assert shorten(app) == [(0, 0, other.name, 7, None, "empty")]
    finally:
        hiding.abort_transaction(60)
