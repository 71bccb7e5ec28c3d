"""What consumers declare of records that fail, and of replays."""

from __future__ import annotations

import pytest

from jobs_lib import App, ConfigurationError


@pytest.fixture
def app() -> App:
    return App("test")


def handle(record, conn) -> None: ...


def row(record) -> None: ...


def test_handlers_of_one_topic_agree_on_errors(app):
    app.consumer("orders", group="g", type="placed", on_error="skip")(handle)
    with pytest.raises(ConfigurationError, match="same on_error, not 'skip' and 'st"):
        app.consumer("orders", group="g", type="sent")(handle)
    app.consumer("orders", group="other")(handle)


def test_an_unknown_word_for_errors_is_refused(app):
    match = "on_error is 'stop' or 'skip', not 'ignore'"
    with pytest.raises(ConfigurationError, match=match):
        app.consumer("orders", group="g", on_error="ignore")(handle)
    model = app.read_model(
        "orders", table="t", key="k", group="other", on_error="ignore"
    )
    with pytest.raises(ConfigurationError, match=match):
        model(row)


def test_what_is_no_yes_or_no_is_refused(app):
    with pytest.raises(ConfigurationError, match="True or False, not 'sometimes'"):
        app.consumer("orders", group="g", repeatable="sometimes")(handle)


def test_records_may_be_replayed_if_every_handler_says_so(app):
    app.consumer("a", group="g", type="placed", repeatable=True)(handle)
    app.consumer("a", group="g", type="sent", repeatable=True)(handle)
    app.consumer("b", group="g", type="placed", repeatable=True)(handle)
    app.consumer("b", group="g", type="sent")(handle)
    app.consumer("c", group="g")(handle)
    app.read_model("d", table="t", key="k", group="g")(row)
    assert [one.is_repeatable for one in app.consumers] == [True, False, False, True]
