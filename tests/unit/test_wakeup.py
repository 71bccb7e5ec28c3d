"""Other threads end a sleep at the points where their steps interleave."""

from __future__ import annotations

import contextlib
import os
import resource
import threading

import psycopg
import pytest

from jobs_lib.postgres.database import Database
from jobs_lib.postgres.wakeup import Wakeup
from tests.support.apps import heard


@pytest.fixture
def wakeup():
    """A sleep without a connection for hints."""
    # A wakeup without a channel to listen to asks nothing of the database.
    with contextlib.closing(Wakeup(Database("dbname=none", "any"), None)) as w:
        yield w


def test_a_set_during_a_wake_does_not_lose_the_next_one(wakeup, wait_for, monkeypatch):
    def read(descriptor: int, size: int) -> bytes:
        wakeup.set()  # another thread, at this moment
        return os_read(descriptor, size)

    os_read = os.read
    wakeup.set()
    with monkeypatch.context() as patched:
        patched.setattr(os, "read", read)
        wakeup.wait(60)

    sleeper = threading.Thread(target=wakeup.wait, args=(60,), daemon=True)
    sleeper.start()
    wakeup.set()
    wait_for(lambda: not sleeper.is_alive(), timeout=10, what="the sleep ends")


def test_a_hint_connection_that_came_and_went_counts_as_two_turns(database, wait_for):
    with contextlib.closing(Wakeup(database, database.channel)) as wakeup:
        wakeup.wait(0)
        wait_for(lambda: wakeup.receives_hints, what="hints can come")
        assert wakeup.turns == 1
        wakeup._hang_up()
        assert wakeup.turns == 2


def test_a_process_with_thousands_of_descriptors_sleeps_and_wakes(wakeup):
    # select() can watch the first 1,024 descriptors only.
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with contextlib.ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (before, most))
        for _ in range(1_100):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        database = Database("dbname=none", "any")
        # What earlier tests have left may be closed meanwhile, and make low ones free.
        made = (
            opened.enter_context(contextlib.closing(Wakeup(database, None)))
            for _ in range(100)
        )
        high = next(one for one in made if one._reader > 1_024)
        high.set()
        assert high.wait(60) == []


def test_a_connection_failure_after_the_close_is_not_reported(wait_for, monkeypatch):
    asked, answer = threading.Event(), threading.Event()
    database = Database("dbname=none", "any")

    def connect(*_: object, **__: object) -> None:
        asked.set()
        answer.wait(60)
        raise psycopg.OperationalError("the server goes away")

    monkeypatch.setattr(database, "connect", connect)
    with heard("loop.failed") as failed:
        with contextlib.closing(Wakeup(database, "any")) as wakeup:
            wakeup.wait(0)
            assert asked.wait(60)
        answer.set()
        wait_for(lambda: not wakeup._connecting, what="the attempt has ended")
    assert not failed


def test_hints_come_once_the_process_may_have_one_more_thread(
    database, wait_for, monkeypatch
):
    def refuse(_) -> None:
        raise RuntimeError("can't start new thread")

    with contextlib.closing(Wakeup(database, database.channel)) as wakeup:
        with monkeypatch.context() as patched, heard("loop.failed") as failed:
            patched.setattr(threading.Thread, "start", refuse)
            wakeup.wait(0)
        assert len(failed) == 1

        def receives_hints() -> bool:
            wakeup.wait(0)
            return wakeup.receives_hints

        wait_for(receives_hints, timeout=10, what="hints can come")
