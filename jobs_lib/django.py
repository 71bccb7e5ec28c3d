"""A backend of Django's tasks: an enqueued task is a job of an app.

The job is written in the transaction of Django's connection, like Django's own rows.
Django 6 has ``django.tasks``; earlier releases need the package ``django-tasks``.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django.core import checks
from django.db import DEFAULT_DB_ALIAS, close_old_connections, connections, transaction
from django.utils import timezone
from django.utils.module_loading import import_string

from jobs_lib.errors import ConfigurationError
from jobs_lib.jobs.job import Job  # noqa: TC001 -- read from the handler

try:
    from django.tasks import TaskContext, TaskResult, TaskResultStatus
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import Task
    from django.tasks.signals import task_enqueued, task_finished, task_started
except ImportError:
    from django_tasks import TaskContext, TaskResult, TaskResultStatus
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.base import Task
    from django_tasks.signals import task_enqueued, task_finished, task_started

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from jobs_lib.app import App
    from jobs_lib.jobs.type import JobType

__all__ = ["TasksBackend", "declare_tasks"]


class TasksBackend(BaseTaskBackend):  # type: ignore[misc] # Django has no types
    """The class that ``TASKS`` names as its ``BACKEND``.

    Its ``OPTIONS`` are ``app``, the path of an app whose queues are declared by
    :func:`declare_tasks`, and ``database``, the alias of Django's connection, which
    defaults to ``default``. The result of a task is not kept.
    """

    supports_defer = True
    supports_async_task = True
    supports_priority = True

    def enqueue(
        self, task: Any, args: Iterable[Any], kwargs: Mapping[str, Any]
    ) -> TaskResult[Any]:
        """Insert a job, in the transaction that is open, or in one of its own.

        Raises:
            ConfigurationError: the app cannot be imported, or lacks the queue.
            InvalidTask: Django refuses the task.
            EnqueueError: the arguments do not fit into a job.
        """
        self.validate_task(task)
        job_type = self._find_type(task.queue_name)
        result = _make_result(task, "", args, kwargs, self.alias)
        run_at = task.run_after
        if run_at is not None and timezone.is_naive(run_at):
            run_at = timezone.make_aware(run_at)
        chosen = job_type.options(priority=_name_level(task.priority), run_at=run_at)
        alias = self.options.get("database", DEFAULT_DB_ALIAS)
        with transaction.atomic(using=alias):
            job_id = chosen.enqueue(
                connections[alias],
                task=task.module_path,
                args=result.args,
                kwargs=result.kwargs,
                backend=self.alias,
            )
        # Frozen, like every object that Django gives to a caller.
        object.__setattr__(result, "id", str(job_id))
        object.__setattr__(result, "enqueued_at", timezone.now())
        task_enqueued.send(type(self), task_result=result)
        return result

    def check(self, **_: Any) -> Iterable[checks.CheckMessage]:
        """Check for ``manage.py check`` that the app exists and has each queue."""
        found = []
        for queue in sorted(self.queues):
            try:
                self._find_type(queue)
            except ConfigurationError as error:
                found.append(checks.Error(str(error), id="jobs_lib.E001"))
        return found

    def _find_type(self, queue: str) -> JobType[Any]:
        place = f"TASKS[{self.alias!r}]"
        path = self.options.get("app")
        if not isinstance(path, str) or not path:
            raise ConfigurationError(
                f"{place} names no app: add 'OPTIONS': {{'app': 'worker.app'}}"
            )
        try:
            app: App = import_string(path.replace(":", "."))
        except ImportError as error:
            raise ConfigurationError(
                f"{place} names the app {path!r}, which cannot be imported: {error}"
            ) from error
        try:
            return app.jobs[_name_type(queue)]
        except KeyError:
            raise ConfigurationError(
                f"{place} has the queue {queue!r}, which the app {path!r} does not "
                f"declare: call declare_tasks(app, queue={queue!r})"
            ) from None


def declare_tasks(app: App, queue: str = "default", **given: Any) -> None:
    """Let an app run the tasks of one of Django's queues.

    Args:
        app: runs them.
        queue: its name.
        **given: what ``@app.job`` takes for all of its tasks, such as ``retry``,
            ``workers`` and ``time_limit``.

    Raises:
        ConfigurationError: one of them cannot be used, or the queue is declared
            already.
    """

    @app.job(name=_name_type(queue), **given)
    def run_task(
        job: Job, task: str, args: list[Any], kwargs: dict[str, Any], backend: str
    ) -> None:
        found = import_string(task)
        if not isinstance(found, Task):
            raise ConfigurationError(
                f"{task} is no task: it was one when the job was enqueued. Put the "
                "decorator back, or cancel the job"
            )
        result = _make_result(found, str(job.id), args, kwargs, backend)
        result.worker_ids.extend([job.origin] * job.attempt)
        with _told(found, result):
            if found.takes_context:
                found.call(TaskContext(task_result=result), *args, **kwargs)
            else:
                found.call(*args, **kwargs)


@contextmanager
def _told(task: Any, result: TaskResult[Any]) -> Iterator[None]:
    """Django's signals around an attempt, and connections that can be used."""
    # A worker's thread lives for long: its last task may have left a broken connection.
    close_old_connections()
    sender = type(task.get_backend())
    now = timezone.now()
    _note(result, TaskResultStatus.RUNNING, started_at=now, last_attempted_at=now)
    task_started.send(sender, task_result=result)
    try:
        yield
    except BaseException:
        _note(result, TaskResultStatus.FAILED, finished_at=timezone.now())
        raise
    else:
        _note(result, TaskResultStatus.SUCCESSFUL, finished_at=timezone.now())
    finally:
        task_finished.send(sender, task_result=result)
        close_old_connections()


def _note(result: TaskResult[Any], status: Any, **times: Any) -> None:
    for name, value in {"status": status, **times}.items():
        object.__setattr__(result, name, value)


def _make_result(
    task: Any, result_id: str, args: Any, kwargs: Any, backend: str
) -> TaskResult[Any]:
    return TaskResult(
        task=task,
        id=result_id,
        status=TaskResultStatus.READY,
        enqueued_at=None,
        started_at=None,
        finished_at=None,
        last_attempted_at=None,
        args=args,
        kwargs=kwargs,
        backend=backend,
        errors=[],
        worker_ids=[],
    )


def _name_type(queue: str) -> str:
    return f"django.{queue}"


def _name_level(priority: int) -> Any:
    """Django has levels from -100 to 100, and a job has three."""
    if priority == 0:
        return "normal"
    return "high" if priority > 0 else "batch"
