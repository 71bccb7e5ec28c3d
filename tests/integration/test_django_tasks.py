"""Each task of Django is a job, in the transaction of Django's connection."""

from __future__ import annotations

import asyncio
import importlib
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from django import db
from django.db import transaction

from jobs_lib import ConfigurationError, exponential
from tests.support.apps import HOME, count, executing, make_app
from tests.support.djangos import on_database, set_up_django

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

HERE = "tests.integration.test_django_tasks"
THERE = "tests.support.django_tasks_of_tests"
BACKEND = "jobs_lib.django.TasksBackend"

app: Any = None
"""The app of the test, to which the setting ``app`` leads."""


@pytest.fixture
def handler() -> Any:
    """Django's task backends, by their aliases."""
    set_up_django()
    try:
        return importlib.import_module("django.tasks").task_backends
    except ImportError:
        return importlib.import_module("django_tasks").task_backends


@pytest.fixture
def configure(handler, database_url) -> Iterator[Any]:
    """Set ``TASKS`` for one test, and the database of Django's connection."""
    before = handler.settings

    def forget() -> None:
        with suppress(AttributeError):
            del handler["default"]

    def set_tasks(**backend: Any) -> Any:
        forget()
        handler.settings = {"default": {"BACKEND": BACKEND, **backend}}
        return handler["default"]

    with on_database(database_url):
        yield set_tasks
    forget()
    handler.settings = before


@pytest.fixture
def tasks(configure, database_url) -> Iterator[ModuleType]:
    """The project's tasks; the app runs their queue."""
    global app
    app = make_app(database_url)
    configure(OPTIONS={"app": f"{HERE}.app"})
    module = importlib.import_module(THERE)
    module.ran.clear()
    declare = importlib.import_module("jobs_lib.django").declare_tasks
    declare(app, retry=exponential(first=0.01))
    yield module
    app.close()
    app = None


class UndoError(Exception):
    """Raised to roll a transaction back."""


@pytest.mark.guarantee("J38", "S2")
def test_a_task_follows_djangos_transaction(tasks, admin, wait_for):
    with suppress(UndoError), transaction.atomic():
        tasks.greet.enqueue("undone")
        raise UndoError
    with transaction.atomic():
        tasks.greet.enqueue("ada", loud=True)
        assert count(admin, "jobs") == 0
    assert count(admin, "jobs") == 1
    with executing(app, HOME):
        wait_for(lambda: tasks.ran == [("ada", True)])


@pytest.mark.guarantee("J38")
def test_a_task_outside_of_a_transaction_has_its_own(tasks, admin, wait_for):
    result = tasks.greet.enqueue("ada")
    assert str(result.status) == "READY"
    assert admin.execute("select id::text from jobs_lib.jobs").fetchall() == [
        (result.id,)
    ]


@pytest.mark.guarantee("J38")
def test_async_tasks_run_and_are_enqueued_by_async_views(tasks, wait_for):
    asyncio.run(tasks.greet_later.aenqueue("ada"))
    with executing(app, HOME):
        wait_for(lambda: tasks.ran == ["ada"])


@pytest.mark.guarantee("J38", "J8")
def test_a_task_that_fails_is_tried_again_and_sees_its_attempt(tasks, wait_for):
    result = tasks.count_attempts.enqueue()
    with executing(app, HOME):
        wait_for(lambda: len(tasks.ran) == 2)
    assert tasks.ran == [(1, result.id), (2, result.id)]


@pytest.mark.guarantee("J38")
def test_a_task_leaves_no_session_open_on_its_thread(tasks, admin, wait_for):
    tasks.ask_session.enqueue()
    with executing(app, HOME):
        wait_for(lambda: tasks.ran)
        wait_for(
            lambda: (
                not admin.execute(
                    "select 1 from pg_stat_activity where pid = %s", tasks.ran
                ).fetchone()
            )
        )


@pytest.mark.guarantee("J38")
def test_priority_and_time_are_those_of_the_job(tasks, admin):
    later = datetime.now(UTC) + timedelta(days=1)
    for priority in (-5, 0, 100):
        tasks.greet.using(priority=priority).enqueue("ada")
    tasks.greet.using(run_after=later).enqueue("ada")
    found = admin.execute(
        "select priority, state, run_at from jobs_lib.jobs order by id"
    ).fetchall()
    low, normal, high, scheduled = (row[0] for row in found)
    assert len({low, normal, high}) == 3
    assert scheduled == normal
    assert found[3][1:] == ("scheduled", later)


@pytest.mark.guarantee("J38")
def test_djangos_signals_report_each_attempt(tasks, wait_for):
    try:
        signals = importlib.import_module("django.tasks.signals")
    except ImportError:
        signals = importlib.import_module("django_tasks.signals")
    heard: list[tuple[str, str]] = []

    def hear(sender: Any, task_result: Any, **_: Any) -> None:
        heard.append((sender.__name__, str(task_result.status)))

    every = (signals.task_enqueued, signals.task_started, signals.task_finished)
    for signal in every:
        signal.connect(hear)
    try:
        tasks.count_attempts.enqueue()
        with executing(app, HOME):
            wait_for(lambda: len(heard) == 5)
    finally:
        for signal in every:
            signal.disconnect(hear)
    states = ["READY", "RUNNING", "FAILED", "RUNNING", "SUCCESSFUL"]
    assert heard == [("TasksBackend", state) for state in states]


@pytest.mark.guarantee("U4")
def test_a_job_whose_task_no_longer_exists_fails_with_its_name(tasks, admin, wait_for):
    given = {"args": [], "kwargs": {}, "backend": "default"}
    app.jobs["django.default"].enqueue(app, task=f"{THERE}.no_task", **given)

    def read() -> str:
        row = admin.execute("select errors[1] from jobs_lib.jobs").fetchone()
        return str(row and row[0])

    with executing(app, HOME):
        wait_for(lambda: f"{THERE}.no_task is no task" in read())


@pytest.mark.guarantee("U4")
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, r"TASKS\['default'\] names no app: add 'OPTIONS'"),
        (
            {"OPTIONS": {"app": "nowhere.app"}},
            "'nowhere.app', which cannot be",
        ),
        (
            {"OPTIONS": {"app": f"{HERE}:app"}, "QUEUES": ["default", "mail"]},
            r"does not declare: call declare_tasks\(app, queue='mail'\)",
        ),
    ],
)
def test_a_backend_that_cannot_work_is_refused_by_check_and_call(
    tasks, configure, admin, given, says
):
    backend = configure(**given)
    (error,) = backend.check()
    with pytest.raises(ConfigurationError, match=says) as refused:
        tasks.greet.using(queue_name=max(backend.queues)).enqueue("ada")
    assert error.msg == str(refused.value)
    assert count(admin, "jobs") == 0


@pytest.mark.guarantee("S2")
def test_arguments_that_are_refused_leave_the_transaction_as_it_was(tasks, admin):
    admin.execute("create table orders (id int)")
    with transaction.atomic():
        with db.connection.cursor() as cursor:
            cursor.execute("insert into orders values (1)")
        with pytest.raises(TypeError):
            tasks.greet.enqueue(object())
    assert admin.execute("select * from orders").fetchall() == [(1,)]
    assert count(admin, "jobs") == 0
