"""Records of the log are sent, whatever becomes of the client that sends them."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from jobs_lib.coordination.messages import Probe, Sender
from jobs_lib.coordination.writer import Sent, Writer
from jobs_lib.errors import UnavailableError
from tests.support.waiting import linger

ME = Sender("shop.mailer", "a", "this run")


class Broken:
    """A producer after a fatal error: it sends nothing, and one poll tells of it."""

    def __init__(self, producer) -> None:
        self._producer = producer
        self._told = False

    def __len__(self) -> int:
        return len(self._producer)

    def produce(self, *_: object, **__: object) -> None:
        raise KafkaException(KafkaError(KafkaError._FATAL, "it is broken"))

    def poll(self, timeout: float) -> int:
        if not self._told:
            self._told = True
            code = KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER
            raise KafkaException(KafkaError(code, "a record was lost", fatal=True))
        return self._producer.poll(timeout)


@pytest.fixture
def write(settings, log_topic):
    """A writer, with lists of the offsets of what it sent, and of what failed."""
    offsets: list[int] = []
    errors: list[Exception] = []
    writer = Writer(
        settings,
        log_topic(1),
        30.0,
        lambda sent, place, offset: offsets.append(offset),
        lambda sent, place, error: errors.append(error),
    )
    writer.start()
    yield writer, offsets, errors
    writer.stop(5)


@pytest.mark.expects("loop.failed")
def test_a_producer_with_a_fatal_error_is_replaced(write, wait_for):
    writer, offsets, errors = write
    writer.send(Sent(Probe(ME)), 0, 1, None)
    # It waits in the client when that breaks, and is told all the same.
    writer._producer = Broken(writer._producer)
    wait_for(lambda: type(writer._producer) is not Broken, what="it is replaced")
    writer.send(Sent(Probe(ME)), 0, 1, None)
    wait_for(lambda: len(offsets) == 2, what=lambda: f"both are in: {offsets} {errors}")
    assert sorted(offsets) == [0, 1]
    assert errors == []


@pytest.mark.expects("loop.failed")
def test_a_log_ends_although_its_producer_is_broken(log_topic, open_log):
    log = open_log(log_topic(1))
    writer = log._writer

    def flush(timeout: float) -> int:
        raise KafkaException(KafkaError(KafkaError._FATAL, "it is broken"))

    broken = Broken(writer._producer)
    vars(broken)["flush"] = flush
    writer._producer = broken
    log.stop()
    assert not writer._loop._thread.is_alive()
    assert not log._loop._thread.is_alive()
    assert log._opened is None


STANDS_STILL = """
import os, signal, threading, time
from jobs_lib.coordination.messages import Probe, Sender
from jobs_lib.coordination.world import Outcome
from jobs_lib.coordination.writer import Sent

sent = Sent(Probe(Sender("shop.mailer", "a", "this run")))

def read_on():
    time.sleep(0.5)
    print("stops", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.5)
    sent.end(Outcome.VALID)

threading.Thread(target=read_on).start()
print(sent.wait(5.0).name, flush=True)
"""


@pytest.mark.slow
@pytest.mark.guarantee("M15")
def test_who_stood_still_for_long_waits_for_what_it_has_sent(run_process):
    process = run_process("-c", STANDS_STILL)
    process.wait_for_line("stops")
    # Longer than it waits. When it goes on, its record is in the log, and not read yet.
    linger(6)
    process.resume()
    process.wait_for_line("VALID")
    assert process.wait() == 0


def test_who_waits_in_vain_is_told_for_how_long():
    with pytest.raises(UnavailableError, match=r"Probe was not read back.*0\.6 s"):
        Sent(Probe(ME)).wait(0.6)
