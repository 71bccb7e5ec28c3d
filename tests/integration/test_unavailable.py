"""A database that cannot be had is told with the whole reason, and its way out."""

from __future__ import annotations

import gc
import weakref

import pytest

from jobs_lib.db import Database
from jobs_lib.errors import UnavailableError


def reason(url: str) -> str:
    """What is said when the database at a URL is opened."""
    with pytest.raises(UnavailableError) as told, Database(url).connect("test"):
        pass
    assert "\n" not in str(told.value)
    assert "hunter2" not in str(told.value)
    return str(told.value)


def test_the_reason_is_told_and_not_the_hint_below_it():
    told = reason("postgresql://me:hunter2@127.0.0.1:1/orders")
    assert told == (
        "the database at postgresql://me@127.0.0.1:1/orders does not answer: "
        'connection failed: connection to server at "127.0.0.1", port 1 failed: '
        "Connection refused. Is it running, and is JOBS_LIB_DATABASE_URL right?"
    )


def test_of_several_addresses_each_is_told():
    told = reason("postgresql://me:hunter2@127.0.0.1:1,127.0.0.1:2/orders")
    assert "port 1 failed: Connection refused" in told
    assert "port 2 failed: Connection refused" in told


def test_the_error_of_the_driver_is_not_kept():
    with pytest.raises(UnavailableError) as told:
        Database("postgresql://me@127.0.0.1:1/orders").connect("test")
    error = told.value.__context__
    assert error is not None
    kept = weakref.ref(error)
    del told, error
    gc.collect()
    assert kept() is None
