"""The member of a group that a sidecar takes for its service's."""

from __future__ import annotations

import threading

import pytest

from jobs_lib.errors import ConfigurationError, UnavailableError
from jobs_lib.kafka.members import GroupMember
from jobs_lib.ownership.follow import FollowSource, find_address
from tests.support.apps import heard, make_app

GROUP = "g"


def member(
    client_id: str, *partitions: int, instance: str = "", host: str = "/1.2.3.4"
):
    """A member, in the form in which the coordinator describes it."""
    assigned = {(topic, n) for n in partitions for topic in ("orders", "of-another")}
    return GroupMember(client_id, host, instance or None, frozenset(assigned))


@pytest.fixture
def source():
    """The source of a sidecar of the pod `pod-a` on this host."""
    settings = make_app(
        "postgresql://nobody@127.0.0.1:1/none",
        pod="pod-a",
        kafka_bootstrap_servers="127.0.0.1:9092",
        session_timeout=0.1,
    ).settings
    return FollowSource(settings, {GROUP: frozenset({"orders"})})


def wanted(source, *answers):
    """Return the origins that the source wants after these lists of members."""
    for members in answers:
        source._note(GROUP, members)
    source._expire()
    return source.wanted


def test_the_instance_id_counts_before_the_client_id(source):
    answer = [member("pod-a", 1), member("x", 2, instance="pod-a")]
    assert wanted(source, answer, answer) == {"orders/2"}


def test_a_sidecar_follows_an_answer_after_reading_it_twice(source):
    first, second = [member("pod-a", 1)], [member("pod-a", 2)]
    assert wanted(source, first) == set()
    assert wanted(source, first) == {"orders/1"}
    assert wanted(source, second) == {"orders/1"}
    assert wanted(source, second) == {"orders/2"}


def test_a_sidecar_follows_the_member_on_its_own_host_when_names_repeat(source):
    here = "/" + find_address("127.0.0.1:9092")
    answer = [member("pod-a", 1), member("pod-a", 2, host=here), member("pod-b", 3)]
    assert wanted(source, answer, answer) == {"orders/2"}


def test_two_members_with_one_pod_name_are_refused_when_both_stay(source, wait_for):
    answer = [member("pod-a", 1), member("pod-a", 2)]
    # One of them may remain from a process that was killed.
    assert wanted(source, answer, answer) == set()

    said = []

    def refused() -> bool:
        try:
            source._note(GROUP, answer)
        except ConfigurationError as error:
            said.append(str(error))
        return bool(said)

    wait_for(refused, what="it is refused")
    assert "2 members of the group 'g' call themselves 'pod-a'" in said[0]
    assert "JOBS_LIB_POD" in said[0]


def test_a_clear_answer_ends_the_time_in_doubt(source):
    answer = [member("pod-a", 1), member("pod-a", 2)]
    source._note(GROUP, answer)
    assert GROUP in source._unclear_since
    alone = [member("pod-a", 1)]
    assert wanted(source, alone, alone) == {"orders/1"}
    assert GROUP not in source._unclear_since


def test_an_unreachable_broker_yields_no_local_address():
    assert find_address("127.0.0.1:9092") == "127.0.0.1"
    assert find_address("nonsense") == ""


def test_a_question_that_ends_with_the_sidecar_is_no_failure(source, monkeypatch):
    asked, ended = threading.Event(), threading.Event()

    class Asking:
        """Answers nothing until it is closed."""

        def describe(self, *_: object) -> None:
            asked.set()
            ended.wait(30)
            raise UnavailableError("the process that asks has ended, by signal 9")

        def close(self) -> None:
            ended.set()

    monkeypatch.setattr(source, "_members", Asking())
    with heard("loop.failed") as failed:
        source.start(lambda: None)
        assert asked.wait(30)
        source.stop()
    assert not failed
