"""What the benchmark of consumers gives to all of them, and how it starts each."""

from __future__ import annotations

import inspect
import socket
from collections import Counter
from importlib.util import find_spec
from urllib.parse import urlsplit

import pytest

from benchmarks.consume.peers import PACKAGED, PEERS, READ_MODEL, RESYNC
from benchmarks.consume.service import takes_blocks
from benchmarks.consume.topics import MARKS, PARTITIONS, Topic, make_states
from benchmarks.consume.wire import Wire
from jobs_lib import App


def note_all(records: int, keys: int) -> Topic:
    topic = Topic("states")
    for state in make_states(records, keys):
        topic.note(state, state.value)
    return topic


def test_each_run_gets_the_same_records():
    assert list(make_states(500, 40)) == list(make_states(500, 40))


def test_a_value_has_291_bytes():
    topic = note_all(5_000, 500)
    values = topic.records - len(topic.gone)
    assert topic.value_bytes / values == pytest.approx(291, abs=1)


def test_a_table_should_hold_the_newest_state_of_each_key_that_is_not_gone():
    topic, versions = note_all(5_000, 500), Counter[str]()
    for state in make_states(5_000, 500):
        versions[state.key] += 1
        assert state.version == versions[state.key] or state.partition >= 0
    assert len(topic.gone) == 5
    assert not topic.gone & topic.rows.keys()
    assert sum(count for count, _ in topic.sums.values()) == topic.records
    kept = {key: row[-1] for key, row in topic.rows.items()}
    assert kept == {key: n for key, n in versions.items() if key not in topic.gone}


def test_each_partition_ends_with_a_mark():
    states = list(make_states(5_000, 500))
    marks = Counter(state.partition for state in states if state.partition >= 0)
    assert marks == dict.fromkeys(range(PARTITIONS), MARKS + 1)
    ends = [state.key for state in states[-PARTITIONS:]]
    assert ends == [f"mark-{n}-end" for n in range(PARTITIONS)]


@pytest.mark.parametrize(
    "peer", [READ_MODEL, RESYNC, *PEERS.values()], ids=lambda one: one.name
)
def test_each_consumer_has_a_program_and_a_library_has_a_version(peer):
    if peer.command:
        assert find_spec(peer.command[peer.command.index("-m") + 1]) is not None
    is_ours = peer in (READ_MODEL, RESYNC)
    assert bool(peer.version) == (is_ours or peer.name in PACKAGED)


def test_blocks_are_measured_if_a_consumer_can_be_given_them():
    declared = inspect.signature(App.consumer).parameters
    assert takes_blocks() == ("per" in declared)


def test_the_bytes_of_both_directions_are_counted():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with Wire(f"postgresql://me:secret@127.0.0.1:{port}/db?a=b") as wire:
            parts = urlsplit(wire.url)
            assert (parts.username, parts.password) == ("me", "secret")
            assert (parts.path, parts.query) == ("/db", "a=b")
            assert parts.port not in (None, port)
            client = socket.create_connection(("127.0.0.1", parts.port))
            with client, server.accept()[0] as accepted:
                client.sendall(b"12345")
                assert accepted.recv(5, socket.MSG_WAITALL) == b"12345"
                accepted.sendall(b"123")
                assert client.recv(3, socket.MSG_WAITALL) == b"123"
            assert wire.count == 8
