"""Tasks as a Django project declares them."""

from __future__ import annotations

from typing import Any

from django.db import connection

try:
    from django.tasks import task
except ImportError:
    from django_tasks import task

ran: list[Any] = []
"""The arguments with which the tasks were called."""


@task
def greet(name: str, *, loud: bool = False) -> str:
    ran.append((name, loud))
    return name


@task
async def greet_later(name: str) -> None:
    ran.append(name)


@task(takes_context=True)
def count_attempts(context: Any) -> None:
    ran.append((context.attempt, context.task_result.id))
    if context.attempt == 1:
        raise ConnectionError("the partner does not answer")


@task
def ask_session() -> None:
    with connection.cursor() as cursor:
        cursor.execute("select pg_backend_pid()")
        ran.append(cursor.fetchone()[0])


def no_task() -> None:
    """This function was a task before."""
