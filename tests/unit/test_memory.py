"""A process that runs for long keeps its memory small."""

from __future__ import annotations

import ctypes
import gc
from types import SimpleNamespace

import pytest

from jobs_lib.service.limits import tune_memory


@pytest.fixture
def collector():
    """The garbage collector; its settings are restored afterwards."""
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


@pytest.fixture
def told(monkeypatch):
    """A function that returns the calls of `mallopt` in the C library, if it has it."""

    def told(*, knows: bool) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        library = SimpleNamespace()
        if knows:
            library.mallopt = lambda *given: found.append(given)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
        return found

    return told


def test_the_collector_does_not_scan_startup_objects_again(collector):
    tune_memory()
    assert gc.get_freeze_count() > 10_000
    assert gc.get_threshold()[0] >= 20_000


def test_freed_memory_is_not_kept_apart(collector, told):
    found = told(knows=True)
    tune_memory()
    # This is M_MXFAST of malloc.h.
    assert found == [(1, 0)]


def test_a_library_without_such_a_setting_will_do(collector, told):
    assert told(knows=False) == []
    tune_memory()
