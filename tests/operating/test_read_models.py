"""How far read models are, while their topics change."""

from __future__ import annotations

from jobs_lib.operating import read_models
from jobs_lib.operating.read_models import list_read_models
from tests.support.apps import make_app


def test_a_topic_that_grows_while_it_is_looked_at_is_shown(database_url, monkeypatch):
    app = make_app(database_url)

    @app.read_model("flights", table="model", key="id", group="board")
    def row(record):
        return record.value

    counts = iter([1, 2])

    def find(*_):
        return dict.fromkeys(range(next(counts)), 0)

    monkeypatch.setattr(read_models, "find_places", find)
    assert [(one.partition, one.left) for one in list_read_models(app)] == [(0, 0)]
