"""Own records of a partition of the log are read back, and then forgotten."""

from __future__ import annotations

import pytest

from jobs_lib.coordination.messages import Probe, Sender, Snapshot
from jobs_lib.coordination.place import Place
from jobs_lib.coordination.world import Outcome
from jobs_lib.coordination.writer import Sent

ME = Sender("shop.mailer", "a", "this run")


def pass_through(place: Place, sent: Sent, *, read_first: bool) -> None:
    """Read the first record and acknowledge it, in one order or the other."""
    if not read_first:
        place.acknowledge(sent, 0)
    place.fold(0, 1, 1, sent.message, ME)
    if read_first:
        place.acknowledge(sent, 0)


@pytest.mark.parametrize("read_first", [True, False])
def test_a_record_is_read_back_in_whatever_order_it_is_acknowledged(read_first):
    place = Place(0, 0, 0)
    sent = Sent(Probe(ME))
    place.unacknowledged.add(sent)
    pass_through(place, sent, read_first=read_first)
    assert sent.outcome is Outcome.VALID
    assert not place._waiting


@pytest.mark.parametrize("read_first", [True, False])
def test_a_snapshot_that_nobody_waits_for_does_not_stay_in_memory(read_first):
    place = Place(0, 0, 0)
    sent = Sent(Snapshot(ME, 0, 1, 0, 1, "digest", "entries", ""))
    pass_through(place, sent, read_first=read_first)
    assert not place._waiting
