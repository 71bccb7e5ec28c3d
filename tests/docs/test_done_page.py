"""The page on how far jobs are done shows a consumer that tells it."""

from __future__ import annotations

import importlib
import sys

import pytest

from jobs_lib.consuming import done
from jobs_lib.jobs.context import Place, holding
from jobs_lib.testing import make_record
from tests.support.pages import ROOT, write_modules
from tests.support.places import Partition

PAGE = "docs/done.md"


@pytest.mark.guarantee("K22")
def test_the_jobs_of_the_page_keep_the_place_of_their_record(
    tmp_path, database, database_url, admin, monkeypatch
):
    assert write_modules(PAGE, tmp_path) == ["tracker.py", "derived.py"]
    monkeypatch.setenv("JOBS_LIB_DATABASE_URL", database_url)
    monkeypatch.syspath_prepend(tmp_path)
    tracker, derived = map(importlib.import_module, ("tracker", "derived"))
    try:
        (declared,) = tracker.app.consumers
        assert (declared.done, declared.done_group) == (True, "flight-tracker.done")
        partition = Partition(database, admin)
        record = make_record({}, key="LH1")
        with holding(Place(partition.place(7))), tracker.app.transaction() as conn:
            tracker.track(record, conn)
        assert partition.tell() == 7
        (maker,), (reader,) = derived.app.consumers, derived.ledger.consumers
        assert maker.waits_for_relay
        assert reader.derived_from == ("payments", maker.done_group)
        assert reader.told_topics == ("transfers", "payments")
    finally:
        for app in (tracker.app, derived.app, derived.ledger):
            app.close()
        for name in ("tracker", "derived"):
            del sys.modules[name]


def test_the_page_names_the_times_that_the_code_has():
    text = " ".join((ROOT / PAGE).read_text(encoding="utf-8").split())
    assert done._PAUSE == 1
    assert "Once a second the process commits the offsets that have changed" in text
    assert done._AGAIN == 10
    assert "and every ten seconds, it commits all of them" in text
    assert "for ten seconds at most" in text
