"""The process that asks for the members of groups may die, and may hang."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
from confluent_kafka import KafkaError, KafkaException

from jobs_lib.errors import AccessError, UnavailableError
from jobs_lib.kafka import members as module
from jobs_lib.kafka import members_process
from jobs_lib.kafka.members import Group, GroupMember, MembersClient
from jobs_lib.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SETTINGS = load_settings(
    kafka_bootstrap_servers="there:1", kafka={"sasl.password": "kept-quiet"}
)
BEGINS = """
import json, os, pathlib, sys, time
here = pathlib.Path(__file__).parent
(here / "starts").open("a").write("x")
starts = len((here / "starts").read_text())
def answer(groups, errors=()):
    print(json.dumps({"groups": groups, "errors": errors, "log": []}), flush=True)
for line in sys.stdin:
    question = json.loads(line)
"""
MEMBER = {"client_id": "pod", "host": "/h", "instance": None, "partitions": [["t", 1]]}
FOUND = {"state": "STABLE", "members": [MEMBER], "rights": ["READ"]}


@pytest.fixture
def replace(tmp_path, monkeypatch) -> Iterator[Callable[..., MembersClient]]:
    """A function that makes a client whose process does this with each question."""
    made: list[MembersClient] = []

    def replace(does: str, rests_after: float | None = None) -> MembersClient:
        script = tmp_path / "script.py"
        lines = [f"    {line}" for line in does.splitlines()]
        script.write_text(BEGINS + "\n".join(lines))
        monkeypatch.setattr(module, "_SCRIPT", script)
        made.append(MembersClient(rests_after))
        return made[-1]

    yield replace
    for one in made:
        one.close()


@pytest.fixture
def count_starts(tmp_path) -> Callable[[], int]:
    """A function that counts how often the process was started."""
    return lambda: len((tmp_path / "starts").read_text())


def test_a_process_that_dies_at_a_question_is_started_again(replace, count_starts):
    client = replace(f"if starts == 1: os.abort()\nanswer({{'g': {FOUND}}})")
    found = client.describe(SETTINGS, ["g"], 30)
    member = GroupMember("pod", "/h", None, frozenset({("t", 1)}))
    assert found == {"g": Group("STABLE", (member,), frozenset({"READ"}))}
    assert count_starts() == 2
    # It is kept for the next question, until it has died.
    assert client.describe(SETTINGS, ["g"], 30) == found
    assert count_starts() == 2
    client._process.kill()
    client._process.wait()
    assert client.describe(SETTINGS, ["g"], 30) == found
    assert count_starts() == 3


def test_a_process_that_dies_each_time_is_started_three_times_for_a_question(
    replace, count_starts
):
    client = replace("os.abort()")
    with pytest.raises(UnavailableError, match="has ended, by signal 6"):
        client.describe(SETTINGS, ["g"], 30)
    assert count_starts() == 3


def test_a_process_that_hangs_is_ended_in_time(replace, monkeypatch, count_starts):
    monkeypatch.setattr(module, "_SPARE_SECONDS", 0.0)
    monkeypatch.setattr(module, "_START_SECONDS", 0.0)
    client = replace("time.sleep(600)")
    with pytest.raises(UnavailableError, match="has said nothing for 0 s"):
        client.describe(SETTINGS, ["g"], 0.4)
    assert client._process is None


def test_a_process_may_take_long_to_start_and_is_quick_then(replace, monkeypatch):
    monkeypatch.setattr(module, "_SPARE_SECONDS", 0.0)
    client = replace(f"time.sleep(0.5); answer({{'g': {FOUND}}})")
    assert client.describe(SETTINGS, ["g"], 0.1)["g"].state == "STABLE"
    with pytest.raises(UnavailableError, match="has said nothing for 0 s"):
        client.describe(SETTINGS, ["g"], 0.1)


def test_a_process_with_thousands_of_descriptors_asks_as_well(replace):
    # select() can watch the first 1,024 descriptors only.
    client = replace(f"answer({{'g': {FOUND}}})")
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with contextlib.ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (before, most))
        opened.callback(client.close)
        for _ in range(1_100):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        assert client.describe(SETTINGS, ["g"], 30)["g"].state == "STABLE"
        assert client._process.stdout.fileno() > 1_024


def test_a_process_is_ended_when_nobody_asks_any_more(replace, wait_for, count_starts):
    client = replace(f"answer({{'g': {FOUND}}})", rests_after=0.05)
    for starts in (1, 2):
        client.describe(SETTINGS, ["g"], 30)
        wait_for(lambda: client._process is None, what="it has ended")
        assert count_starts() == starts


def test_a_question_ends_with_the_client(replace, wait_for):
    client, errors = replace("time.sleep(600)"), []

    def ask() -> None:
        try:
            client.describe(SETTINGS, ["g"], 600)
        except UnavailableError as error:
            errors.append(str(error))

    asker = threading.Thread(target=ask)
    asker.start()
    wait_for(lambda: client._process is not None, what="it is asked")
    client.close()
    asker.join(30)
    assert not asker.is_alive()
    assert "has ended, by signal 9" in errors[0]
    with pytest.raises(UnavailableError, match="is closed"):
        client.describe(SETTINGS, ["g"], 30)


def test_secrets_reach_the_process_by_its_question_alone(replace):
    client = replace(
        "assert question['configuration']['sasl.password'] == 'kept-quiet'\nanswer({})"
    )
    assert client.describe(SETTINGS, ["g"], 30) == {}
    for name in ("cmdline", "environ"):
        told = Path(f"/proc/{client._process.pid}/{name}").read_bytes()
        assert told
        assert b"kept-quiet" not in told


def test_a_client_that_has_failed_is_asked_no_more(monkeypatch):
    made: list[Mock] = []
    failure = KafkaException(KafkaError(KafkaError._TIMED_OUT))

    def make(configuration: Any, **_: Any) -> Mock:
        made.append(Mock(poll=Mock(return_value=0)))
        made[-1].delete_consumer_groups.return_value = {"g": Mock(result=results)}
        return made[-1]

    results = Mock(side_effect=[None, failure, None, None])
    monkeypatch.setattr(members_process, "AdminClient", make)
    asker = members_process.Asker()
    question = {"configuration": {}, "groups": ["g"], "timeout": 1, "deletes": True}
    answers = [asker.answer(question)["groups"]["g"] for _ in range(4)]
    assert ["error" in one for one in answers] == [False, True, False, False]
    assert [one.delete_consumer_groups.call_count for one in made] == [2, 2]


def test_a_refusal_of_the_client_comes_before_the_error_of_a_group(replace):
    timeout = [KafkaError._TIMED_OUT, "Timed out"]
    refused = [KafkaError._AUTHENTICATION, "bad password"]
    groups = {"g": {"error": timeout}}
    client = replace(
        f"answer({groups}, [{refused}] if question['groups'] == ['g'] else [])"
    )
    with pytest.raises(AccessError, match="bad password"):
        client.describe(SETTINGS, ["g"], 30)
    found = client.describe(SETTINGS, ["h"], 30)["g"]
    assert isinstance(found, KafkaError)
    assert (found.code(), found.str()) == tuple(timeout)
