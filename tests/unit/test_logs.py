"""The log of the command: text or JSON, without secrets, one line for a record."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from jobs_lib import masking, telemetry
from jobs_lib.telemetry.logs import JsonFormatter, TextFormatter


def record(text: str = "paid %s", **more: object) -> logging.LogRecord:
    """A record, as an application's logger makes it."""
    made = logging.LogRecord("shop", logging.INFO, "x.py", 1, text, ("x",), None)
    vars(made).update(more)
    return made


def fail() -> logging.LogRecord:
    """A record with the current error."""
    try:
        raise LookupError("no partner\nERROR forged")
    except LookupError:
        made = record()
        made.exc_info = sys.exc_info()
        return made


def read(line: str) -> dict[str, object]:
    assert len(line.splitlines()) == 1
    found: dict[str, object] = json.loads(line)
    return found


def test_a_log_record_of_the_application_is_an_object_with_its_extra_fields():
    line = JsonFormatter().format(record(amount=7, customer="Zoë\u2028", flag=True))
    found = read(line)
    assert str(found.pop("time")).endswith("+00:00")
    assert found == {
        "level": "INFO",
        "logger": "shop",
        "message": "paid x",
        "amount": 7,
        "customer": "Zoë\u2028",
        "flag": True,
    }


@pytest.mark.guarantee("O5")
@pytest.mark.expects("jobs.fenced")
def test_an_event_is_an_object_with_its_fields(caplog):
    caplog.set_level(logging.INFO, logger="jobs_lib")
    telemetry.emit("origins.taken", role="relay", origins=["shard/1", "shard/2"])
    telemetry.emit("jobs.fenced", ids=list(range(9)))
    taken, fenced = (read(JsonFormatter().format(r)) for r in caplog.records[-2:])
    assert taken["event"] == "origins.taken"
    assert taken["origins"] == ["shard/1", "shard/2"]
    assert "message" not in taken
    assert fenced["ids"] == [0, 1, 2, 3, 4, "… 9 in all"]


def test_a_traceback_is_one_text_in_json_and_set_in_as_text():
    found = read(JsonFormatter().format(fail()))
    assert "LookupError: no partner\nERROR forged" in str(found["trace"])
    first, *lines = (
        TextFormatter("%(levelname)s %(message)s").format(fail()).split("\n")
    )
    assert first == "INFO paid x"
    assert all(line.startswith("    ") for line in lines)


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()])
def test_both_log_formats_hide_secrets(formatter, monkeypatch):
    monkeypatch.setattr(masking, "_secrets", set())
    monkeypatch.setattr(masking, "_pattern", None)
    masking.keep_secret({"hunter2-canary"})
    try:
        raise LookupError("hunter2-canary")
    except LookupError:
        made = record("hunter2-canary %s", note="hunter2-canary")
        made.exc_info = sys.exc_info()
    assert "hunter2" not in formatter.format(made)
