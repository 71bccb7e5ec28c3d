"""The page about a public call describes every parameter of it."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import TYPE_CHECKING, Any

import pytest

import jobs_lib
from jobs_lib import Cancel, Discard, JobsError, Settings, testing
from jobs_lib.consuming.answers import Answers
from jobs_lib.django import declare_tasks
from jobs_lib.jobs.options import Options
from jobs_lib.jobs.type import JobType
from jobs_lib.outbox.capture import capture_changes, stop_capturing
from jobs_lib.outbox.topic import Topic
from jobs_lib.postgres.migrate import include_name, upgrade
from jobs_lib.service.service import Service
from jobs_lib.streams.stream import Stream
from tests.support.pages import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGES = {
    "consume.md": ["App.consumer", "Exact"],
    "enqueue.md": [
        *("App.transaction", "App.alone", "App.close", "App.aclose"),
        *("App.enqueue_middleware", "Draft.options", "options"),
        *("JobType.enqueue", "JobType.enqueue_many", "JobType.options"),
    ],
    "frameworks.md": [
        *("Service", "Service.start", "Service.stop", "Service.find_unready"),
        "declare_tasks",
    ],
    "jobs.md": [
        *("App.job", "App.batch", "App.run_middleware", "Job.transaction", "Item.fail"),
        *("exponential", "Retry", "RetryAfter", "Snooze"),
        *("Discard", "Cancel"),
    ],
    "migrations.md": ["upgrade", "include_name"],
    "origins.md": ["App"],
    "outbox.md": [
        *("App.topic", "App.entity", "Gone", "capture_changes", "stop_capturing"),
        *("join_key", "split_key"),
        *("Topic.send", "Topic.send_many", "Topic.tombstone", "Topic.send_current"),
    ],
    "periodic.md": ["App.periodic"],
    "read-models.md": ["App.read_model", "create_read_model"],
    "reexport.md": ["App.reexport_changes"],
    "read-your-writes.md": [
        *("App.answers", "Answers.valid_since", "Answers.wait_for", "Answers.put"),
        *("Answers.newer", "Answers.merge", "EntityState"),
    ],
    "schemas.md": ["App.load_schemas", "App.close_registry"],
    "source-of-truth.md": [
        *("App.stream", "Stream.publish", "Stream.publish_async", "derive_key"),
    ],
    "processing.md": ["App.transactional", "Stream.event"],
    "testing.md": [
        *("Jobs.drain", "Jobs.travel", "Jobs.enqueued", "Jobs.assert_enqueued"),
        *("Jobs.assert_not_enqueued", "Jobs.inline", "Jobs.handle"),
        *("Jobs.transaction", "Jobs.connect", "Jobs.retry", "make_record"),
        *("Outbox.sent", "Outbox.assert_sent", "Outbox.assert_not_sent"),
    ],
    "workers.md": ["Rate", "Workers"],
}
ELSEWHERE = {
    "App.database": "the library's own, for commands",
    "App.names_in_kafka": "the library's own, for checks at start",
    "App.registry": "the library's own",
    "Jobs.query": "the kit's own",
    "JobType.find_rule": "the executor asks it",
    "Retry.bound": "the executor asks it",
    "Retry.delay": "the executor asks it",
    "Retry.exhausted": "the executor asks it",
    "App.close_streams": "a part of App.close",
    "Job.ensure_may_publish": "a publish calls it",
    "Record.ensure_may_publish": "a publish calls it",
    "Stream.answer": "a publish calls it",
    "Stream.encode": "a publish calls it",
    "Stream.show": "a publish calls it",
    "Topic.encode": "a value's bytes, for the relay",
    "Service.ask_to_stop": "what a signal calls",
    "Service.run": "what the command `jobs-lib run` calls",
    "migrate": "what the command `jobs-lib migrate` calls",
    "load_settings": "docs/settings.md is generated from what it takes",
    "Settings": "docs/settings.md is generated from its fields",
}
GIVEN_BY_DECORATORS = {"function", "hook", "misplaced"}
"""Parameters that no caller names: the function or class below a decorator."""
MADE_BY_THE_LIBRARY = {
    "Answers", "Draft", "Enqueued", "Event", "Item", "Job", "JobType", "Jobs", "Outbox",
    "Published", "Record", "Sent", "Stream", "Topic",
}  # fmt: skip
"""Classes of objects that an application gets and never makes."""


def find_calls() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Find every public call: functions, classes that users make, and their methods."""
    yield from (
        (call.__name__, call)
        for call in (
            *(upgrade, include_name, capture_changes, stop_capturing, Service),
            declare_tasks,
        )
    )
    yield "options", Options
    public = [getattr(jobs_lib, name) for name in jobs_lib.__all__]
    public += [getattr(testing, name) for name in testing.__all__]
    for thing in [*public, Topic, Stream, JobType, Answers]:
        if inspect.isfunction(thing):
            yield thing.__name__, thing
        if not inspect.isclass(thing) or is_only_caught(thing):
            continue
        if thing.__name__ not in MADE_BY_THE_LIBRARY:
            yield thing.__name__, thing
        if thing is Settings:
            continue
        for name, member in inspect.getmembers(thing, inspect.isfunction):
            if not name.startswith("_") and member.__module__.startswith("jobs_lib"):
                yield f"{thing.__name__}.{name}", member


def is_only_caught(thing: type) -> bool:
    """Tell whether the object is an exception that no handler raises."""
    return issubclass(thing, JobsError) and thing.__module__ == JobsError.__module__


CALLS = dict(find_calls())


@pytest.mark.guarantee("U5")
def test_every_public_call_has_its_page():
    told = {call for calls in PAGES.values() for call in calls}
    assert CALLS.keys() - told - ELSEWHERE.keys() == set()
    assert told - CALLS.keys() == set()
    assert told & ELSEWHERE.keys() == set()


@pytest.mark.guarantee("U5")
@pytest.mark.parametrize("page", PAGES)
def test_every_parameter_stands_in_the_page_of_its_call(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))
    missing = [
        f"{call}({name})"
        for call in PAGES[page]
        for name, is_given_by_name in parameters(CALLS[call])
        # Its name alone, or as an argument; the first parameter may have another name.
        if not re.search(rf"`{name}`|\b{name}=", code)
        and (is_given_by_name or not re.search(rf"\b{name}\b", code))
    ]
    assert not missing, ", ".join(missing)


def parameters(call: Callable[..., Any]) -> list[tuple[str, bool]]:
    """Return the parameters of a call, and whether each is given by its name."""
    if call is Options:
        return [(field.name, True) for field in dataclasses.fields(Options)][1:]
    if call in (Discard, Cancel):
        return []  # the text of an exception
    return [
        (one.name, one.default is not one.empty or one.kind is one.KEYWORD_ONLY)
        for one in inspect.signature(call).parameters.values()
        if one.name not in {"self", *GIVEN_BY_DECORATORS}
        and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
