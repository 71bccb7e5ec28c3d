"""Events and errors use the words of code, and no Python notation."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any, Optional
from uuid import UUID

import psycopg
import psycopg2  # type: ignore[import-untyped]
import pytest
from confluent_kafka import KafkaError, KafkaException
from sqlalchemy import create_engine
from sqlalchemy.exc import OperationalError

from jobs_lib import App, Discard, Job
from jobs_lib.errors import ConfigurationError, PayloadError
from jobs_lib.executor.lane import ClaimedJob, Finished, Lane
from jobs_lib.masking import describe
from jobs_lib.reasons import find_reason
from jobs_lib.telemetry import emit
from tests.support.claimed import make_claimed

FORMS = re.compile(r" object at 0x|UUID\(|datetime\.|Error\{|Job\(|'|\(\.\.\.\)")
"""The notation of Python, which a person would write in another way."""


class Partner:
    class Busy(Exception): ...


@dataclass
class Address:
    town: str


def make_job() -> ClaimedJob:
    lane = Lane("orders/3", 1, None, 1, UUID(int=1), Finished())
    job = make_claimed(lane, 7)
    job.type = "charge"
    return job


@pytest.mark.parametrize(
    ("event", "fields", "text"),
    [
        (
            "origins.taken",
            {"role": "execute", "origins": ["local/1", "local/2"]},
            "origins.taken role=execute origins=[local/1, local/2]",
        ),
        (
            "process.started",
            {"process": UUID(int=7), "pod": "a", "roles": {"consume:shop"}},
            f"process.started process={UUID(int=7)} pod=a roles=[consume:shop]",
        ),
        (
            "jobs.released",
            {"ids": [UUID(int=n) for n in range(7)]},
            "jobs.released ids=["
            + ", ".join(str(UUID(int=n)) for n in range(5))
            + ", … 7 in all]",
        ),
        (
            "job.stuck",
            {"job": make_job(), "stack": "shop.py"},
            "job.stuck type=charge id=7 group=None attempt=1",
        ),
        ("jobs.released", {"ids": []}, "jobs.released ids=[]"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_a_line_of_an_event_shows_no_form_of_python(caplog, event, fields, text):
    caplog.set_level(logging.INFO, "jobs_lib")
    emit(event, **fields)
    assert caplog.messages == [text]
    assert not FORMS.search(text)


def test_an_error_of_kafka_is_described_by_its_text():
    error = KafkaException(KafkaError(KafkaError._ALL_BROKERS_DOWN, "2/2 are down"))
    assert describe(error) == "KafkaException: 2/2 are down (_ALL_BROKERS_DOWN)"
    # A KafkaException may hold anything else.
    assert describe(KafkaException("odd")) == "KafkaException: odd"
    assert describe(KafkaException()) == "KafkaException: "


def test_a_class_is_called_as_code_calls_it():
    class Local(Exception):
        class Inner(Exception): ...

    assert describe(Partner.Busy("now")) == "Partner.Busy: now"
    assert describe(Local("now")) == "Local: now"
    assert describe(Local.Inner("now")) == "Local.Inner: now"

    def work(job: Job) -> None: ...

    app = App("shop")
    with pytest.raises(ConfigurationError, match=r"for Partner\.Busy: give"):
        app.job(rules={Partner.Busy: "no rule"})(work)  # type: ignore[dict-item]


def test_a_refused_payload_shows_the_signature_as_it_is_written():
    app = App("shop")

    @app.job()
    def ship(job: Job, order: int, to: Address | None = None) -> None: ...

    def pack(job, order, to, lines, tags): ...

    # These are the annotations without `from __future__ import annotations`.
    pack.__annotations__ = {
        "job": Job,
        "order": int,
        "to": Address,
        "lines": list[int],
        "tags": Optional[str],  # noqa: UP045
    }
    declared: Any = app.job()(pack)
    with pytest.raises(PayloadError) as refused:
        app.jobs["ship"].enqueue(app, order="x")
    assert "handler ship(order: int, to: Address | None = None): " in str(refused.value)
    with pytest.raises(PayloadError) as refused:
        declared.enqueue(app, order="x")
    signature = "pack(order: int, to: Address, lines: list[int], tags: Optional[str]): "
    assert signature in str(refused.value)


def refused_by(connect: Any, *arguments: Any) -> Exception:
    with pytest.raises(Exception) as refused:  # noqa: PT011
        connect(*arguments)
    return refused.value


ONE = "postgresql://me@127.0.0.1:1/x"
TWO = "postgresql://me@127.0.0.1:1,127.0.0.1:2/x"
REASON = "Connection refused (127.0.0.1, port 1)"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: refused_by(psycopg.connect, ONE), REASON),
        (lambda: refused_by(psycopg2.connect, ONE), REASON),
        (
            lambda: refused_by(psycopg.connect, "host=/nowhere dbname=x"),
            'No such file or directory (socket "/nowhere/.s.PGSQL.5432")',
        ),
        (
            lambda: psycopg.OperationalError(
                "consuming input failed: server closed the connection unexpectedly\n"
                "\tThis probably means the server terminated abnormally\n"
                "\tbefore or while processing the request."
            ),
            "server closed the connection unexpectedly",
        ),
        (
            lambda: psycopg.OperationalError(
                'connection failed: connection to server at "db.test" (10.0.0.7),'
                ' port 5432 failed: FATAL:  password authentication failed for user "m"'
            ),
            'FATAL: password authentication failed for user "m" (db.test, port 5432)',
        ),
        (lambda: psycopg.OperationalError(), "OperationalError"),
    ],
    ids=["refused", "psycopg2", "socket", "lost", "password", "nothing"],
)
def test_libpqs_lines_are_one_with_the_reason_first(make, reason):
    error = make()
    assert find_reason(error) == reason
    assert describe(error) == f"OperationalError: {reason}"


def test_each_host_that_was_tried_has_its_reason():
    last = "Connection refused (127.0.0.1, port 2)"
    # The first releases of psycopg 3.2 report the last host only.
    assert find_reason(refused_by(psycopg.connect, TWO)) in {f"{REASON}; {last}", last}


def test_an_error_that_sqlalchemy_wraps_is_described_in_one_line():
    engine = create_engine(ONE.replace("postgresql", "postgresql+psycopg"))
    error = refused_by(engine.connect)
    assert isinstance(error, OperationalError)
    assert describe(error) == f"OperationalError: {REASON}"


def test_a_discard_is_described_with_its_name():
    assert describe(Discard("of no use")) == "Discard: of no use"
