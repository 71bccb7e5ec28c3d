"""Arguments that tests give to SQLAlchemy."""

from __future__ import annotations

from sqlalchemy.engine import URL, make_url


def sqlalchemy_url(url: str) -> URL:
    """The URL with psycopg 3 as its driver."""
    return make_url(url).set(drivername="postgresql+psycopg")
