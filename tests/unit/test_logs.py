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


@pytest.fixture
def secret(monkeypatch) -> str:
    """A secret that this process was given, and the only one."""
    monkeypatch.setattr(masking, "_secrets", set())
    monkeypatch.setattr(masking, "_pattern", None)
    masking.keep_secret({"hunter2-canary"})
    return "hunter2-canary"


def test_a_record_with_attributes_of_an_events_names_is_the_applications(secret):
    line = JsonFormatter().format(record(event=f"order.paid {secret}", order=7))
    found = read(line)
    assert (found["message"], found["order"]) == ("paid x", 7)
    assert found["event"] == "order.paid ***"


class Mute:
    """A value whose text cannot be made."""

    def __str__(self) -> str:
        raise LookupError("no text")


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"trace": 17}, {"trace": 17}),
        ({"fields": ["a"]}, {"fields": "['a']"}),
        ({"event": "e", "fields": 3}, {"event": "e", "fields": 3}),
        ({"event": telemetry.LoggedEvent("e"), "fields": 3}, {"event": "e"}),
        ({"event": {"id": 4}}, {"event": "{'id': 4}"}),
        ({"level": "gold", "level_": 1}, {"level_": "gold", "level__": 1}),
        ({"time": 1, "logger": 2}, {"time_": 1, "logger_": 2}),
        ({"ratio": float("nan"), "rate": float("-inf")}, {"ratio": "nan"}),
        ({"size": 10**5_000}, {"size": "(its text cannot be made: ValueError)"}),
        ({"value": Mute()}, {"value": "(its text cannot be made: LookupError)"}),
        ({"nothing": None}, {"nothing": "None"}),
    ],
)
def test_a_record_with_any_extra_fields_is_one_object(given, shown):
    line = JsonFormatter().format(record(**given))
    found = read(line)
    assert found.items() >= shown.items()
    assert (found["level"], found["logger"]) == ("INFO", "shop")
    assert found["message"] == "paid x"
    assert not {"NaN", "Infinity"} & set(line.replace(",", " ").split())


def test_a_traceback_is_shown_beside_an_extra_field_of_its_name():
    made = fail()
    made.trace = "4711"
    found = read(JsonFormatter().format(made))
    assert "LookupError: no partner" in str(found["trace"])
    assert found["trace_"] == "4711"


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()])
def test_a_record_whose_arguments_do_not_fit_its_text_is_shown_masked(
    formatter, secret
):
    made = record("paid %d", **{"args": (secret,)})
    line = formatter.format(made)
    assert "paid %d ('***',)" in line
    assert made.args == (secret,)


def test_a_number_of_an_event_that_json_has_not_is_a_text(caplog):
    caplog.set_level(logging.INFO, logger="jobs_lib")
    telemetry.emit("consumer.started", group="g", per_second=float("inf"), batch=None)
    found = read(JsonFormatter().format(caplog.records[-1]))
    assert (found["per_second"], found["batch"]) == ("inf", None)


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()])
def test_both_log_formats_hide_secrets(formatter, secret):
    try:
        raise LookupError("hunter2-canary")
    except LookupError:
        made = record("hunter2-canary %s", note="hunter2-canary")
        made.exc_info = sys.exc_info()
    assert "hunter2" not in formatter.format(made)
