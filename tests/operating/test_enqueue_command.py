"""`jobs-lib jobs enqueue` checks fields as the app does, and refuses wrong ones."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from jobs_lib.errors import EnqueueError, JobsError, OperatingError, PayloadError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from click.testing import Result

SHOP = """
from uuid import UUID

from jobs_lib import App, Item, Job

app = App("shop")


@app.job(group="customer")
def charge(job: Job, customer: str, order: int, lines: list[int] | None = None) -> None:
    ...


@app.job()
def ship(job: Job, parcel: UUID, note: str | None = None) -> None: ...


@app.batch()
def index(items: list[Item[str]]) -> None: ...
"""


@pytest.fixture
def enqueue(
    command: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    (tmp_path / "enqueueing_shop.py").write_text(SHOP, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("JOBS_LIB_APP", "enqueueing_shop:app")
    # Each test imports it again, with the settings of its own database.
    monkeypatch.delitem(sys.modules, "enqueueing_shop", raising=False)
    return lambda *words: command("jobs", "enqueue", *words)


def refusal(result: Result) -> JobsError:
    assert isinstance(result.exception, JobsError), result.output
    return result.exception


def test_fields_are_json_where_they_can_be_and_the_id_is_printed(enqueue, admin):
    done = enqueue("charge", "customer=42", "order=7", "lines=[1, 2]")
    assert done.exit_code == 0, done.output
    assert admin.execute(
        'select id, type, "group", payload from jobs_lib.jobs'
    ).fetchone() == (
        int(done.output),
        "charge",
        "42",
        {"customer": "42", "order": 7, "lines": [1, 2]},
    )
    parcel = str(UUID(int=7))
    for note, expected in (("fragile", "fragile"), ("NaN", "NaN"), ("null", None)):
        told = enqueue("ship", f"parcel={parcel}", f"note={note}", "--json")
        (stored,) = admin.execute(
            "select payload from jobs_lib.jobs where id = %s",
            (json.loads(told.output)["id"],),
        ).fetchone()
        assert stored == {"parcel": parcel, "note": expected}


def test_a_payload_may_be_given_whole_and_with_options(enqueue, admin):
    whole = {"customer": "ada", "order": 7}
    done = enqueue(
        *("charge", "--payload", json.dumps(whole), "--priority", "high"),
        *("--unique", "order-7", "--delay", "600"),
    )
    assert done.exit_code == 0, done.output
    assert admin.execute(
        "select payload, priority, unique_key, state,"
        " run_at > clock_timestamp() + interval '9 minutes' from jobs_lib.jobs"
    ).fetchall() == [(whole, 1, "order-7", "scheduled", True)]
    enqueue("charge", "customer=a", "order=1", "--run-at", "2030-01-01T12:00")
    assert admin.execute(
        "select run_at at time zone 'UTC' = '2030-01-01 12:00' from jobs_lib.jobs"
        " order by id desc limit 1"
    ).fetchone() == (True,)


@pytest.mark.parametrize(
    ("words", "kind", "match"),
    [
        (["bill"], OperatingError, "no job type 'bill'; it has: charge, index, ship"),
        (["charge", "customer"], OperatingError, "'customer' is no field: write"),
        (["charge", "order=1", "order=2"], OperatingError, "'order' is given twice"),
        (["charge", "order=1", "--payload", "{}"], OperatingError, "not both"),
        (["charge", "customer=a", "order=1", "--delay", "-1"], EnqueueError, "is -1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_words_of_the_enqueue_command_are_refused_with_the_way_out(
    enqueue, admin, words, kind, match
):
    with pytest.raises(kind, match=match):
        raise refusal(enqueue(*words))
    assert admin.execute("select from jobs_lib.jobs").rowcount == 0


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["customer=ada"], {"customer": "ada"}),
        (["customer=ada", "order=x"], {"customer": "ada", "order": "x"}),
        (
            ["customer=ada", "order=1", "odrer=2"],
            {"customer": "ada", "order": 1, "odrer": 2},
        ),
    ],
    ids=["missing", "of a wrong type", "unknown"],
)
def test_fields_that_do_not_fit_are_refused_in_the_words_of_python(
    enqueue, words, values: dict[str, Any]
):
    told = str(refusal(enqueue("charge", *words)))
    from enqueueing_shop import app, charge  # type: ignore[import-not-found]

    with pytest.raises(PayloadError) as refused:
        charge.enqueue(app, **values)
    assert told == str(refused.value)
    assert told.startswith("the enqueued payload does not fit the handler charge(")


def test_the_enqueue_command_without_an_app_says_how_to_name_one(enqueue, monkeypatch):
    monkeypatch.delenv("JOBS_LIB_APP")
    done = enqueue("charge")
    assert done.exit_code == 2
    assert "--app" in done.output
    done = enqueue("charge", "customer=a", "order=1", "--app", "enqueueing_shop:app")
    assert done.exit_code == 0, done.output
