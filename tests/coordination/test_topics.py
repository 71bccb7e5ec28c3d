"""A group looks which partitions it shares, also while one of its topics is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from jobs_lib.coordination import topics as module
from jobs_lib.coordination.messages import Shared
from jobs_lib.coordination.topics import Look, Topics
from jobs_lib.errors import ConfigurationError, TopicError
from jobs_lib.settings import load_settings
from tests.coordination.test_read_back import ORDERS, Stepped

if TYPE_CHECKING:
    from collections.abc import Callable

INVOICES = Shared("shop.mailer", "invoices", 0)


@pytest.fixture
def counts(monkeypatch) -> dict[str, int]:
    """How many partitions each topic has."""
    found = {"orders": 1, "invoices": 2}
    monkeypatch.setattr(
        module,
        "list_partitions",
        lambda _, names: {name: found.get(name, 0) for name in names},
    )
    return found


@pytest.fixture
def share(counts) -> Callable[..., Topics]:
    """A function that makes the topics of a group that shares both."""

    def make(**more: Any) -> Topics:
        names = ["orders", "invoices"]
        settings = load_settings()
        return Topics(settings, "shop.mailer", names, 60, lambda: None, **more)

    return make


@pytest.mark.expects("loop.failed")
def test_a_topic_that_is_missing_for_a_while_hides_no_growth_of_another(share, counts):
    topics = share()
    topics._look()
    counts |= {"orders": 3, "invoices": 0}
    topics._look()
    parts = [("orders", number) for number in range(3)]
    assert topics.last == Look(parts, frozenset({"invoices"}))
    counts["invoices"] = 1
    topics._look()
    assert topics.last == Look([("invoices", 0), *parts], frozenset())


@pytest.mark.expects("loop.failed")
def test_only_who_awaits_topics_starts_without_one(share, counts):
    del counts["invoices"]
    with pytest.raises(TopicError, match="no topic 'invoices', or does not show it"):
        share().start()
    topics = share(awaits_topics=True)
    topics.start()
    topics.stop(30)
    assert topics.last.parts == [("orders", 0)]


@pytest.mark.parametrize(
    "part",
    [
        ("", 0),
        ("x" * 250, 0),
        ("half \ud800", 0),
        (b"orders", 0),
        ("orders", -1),
        ("orders", 2**31),
        ("orders", True),
        ("orders", "0"),
        ("orders", 0, 0),
        ("orders",),
        "orders",
        None,
    ],
)
def test_what_no_reader_of_the_log_lets_through_is_not_shared(part):
    found = [("orders", 0), ("x" * 249, 2**31 - 1)]
    topics = Topics(load_settings(), "a.b", (), 60, lambda: None, lambda: found)
    topics._look()
    before = topics.last
    assert before.parts == found
    # It would be claimed for ever.
    found.append(part)
    with pytest.raises(ConfigurationError) as refused:
        topics._look()
    assert str(refused.value).startswith(f"{part!r} cannot be shared")
    assert topics.last == before


def test_what_is_held_of_a_missing_topic_is_kept_and_is_no_part_of_the_share():
    member = Stepped()
    with member.log.lock:
        member.hold(member.claim())
        member._is_seen = True
        member._topics.last = Look([("invoices", 0)], frozenset({"orders"}))
        member._balance()
        assert not member._kept[ORDERS].is_leaving
        assert INVOICES in member._kept
        # It is back, without that partition.
        member._topics.last = Look([("invoices", 0)], frozenset())
        member._balance()
        assert member._kept[ORDERS].is_leaving
