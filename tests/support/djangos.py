"""Django in the process of the tests: set up once, used on each test's database."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import django
from django import db
from django.conf import settings
from psycopg.conninfo import conninfo_to_dict

if TYPE_CHECKING:
    from collections.abc import Iterator

OTHER = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
"""A database that is not PostgreSQL, beside that of the test."""


def set_up_django() -> None:
    """Configure Django, which needs its settings once for each process."""
    if not settings.configured:
        # Without this Django sets the time zone of the process for all tests that
        # follow.
        settings.configure(USE_TZ=True, TIME_ZONE=None, ALLOWED_HOSTS=["testserver"])
        django.setup()


def describe_database(url: str) -> dict[str, Any]:
    """The entry of Django's ``DATABASES`` for a URL."""
    parts = conninfo_to_dict(url)
    names = {"dbname": "NAME", "user": "USER", "password": "PASSWORD"}
    names |= {"host": "HOST", "port": "PORT"}
    given = {name: parts.get(key) for key, name in names.items()}
    return {"ENGINE": "django.db.backends.postgresql", **given}


@contextmanager
def on_database(url: str) -> Iterator[db.utils.ConnectionHandler]:
    """Django's connections to this database and to `OTHER`; none remain afterwards.

    Django keeps the connection of an alias, even if its settings have changed.
    """
    set_up_django()
    before = db.connections.settings
    forget_connections()
    db.connections.settings = db.connections.configure_settings(
        {"default": describe_database(url), "other": OTHER}
    )
    try:
        yield db.connections
    finally:
        db.connections.close_all()
        forget_connections()
        db.connections.settings = before


def forget_connections() -> None:
    """Make the connection of each alias again at its next use."""
    for alias in ("default", "other"):
        with suppress(AttributeError):
            del db.connections[alias]
