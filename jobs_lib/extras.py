"""What is missing where the extra ``postgres`` is not installed, and the way out.

The library is one package. A process that shares partitions over Kafka alone, by
:mod:`jobs_lib.coordination`, installs it without a database driver.
"""

from __future__ import annotations

from importlib.util import find_spec

from jobs_lib.errors import ConfigurationError

DRIVERS = ("psycopg", "psycopg_pool", "sqlalchemy", "alembic")
"""The packages of the extra, as an import names them."""
LIBPQ_IS_MISSING = (
    "libpq is missing: pip install 'jobs-lib[binary]' brings one, or install it on the "
    "system (Debian: libpq5)"
)
_NEEDED = ("psycopg", "psycopg_pool")
"""Those that each app needs. SQLAlchemy and Alembic are for migrations alone."""


def explain_missing(error: ImportError) -> str | None:
    """Say in one line what to install; None if something else is missing."""
    if "no pq wrapper" in str(error):
        return LIBPQ_IS_MISSING
    name = (error.name or "").partition(".")[0]
    return _tell(name) if name in DRIVERS else None


def require_driver() -> None:
    """Look for the packages that each app needs, without importing them.

    Raises:
        ConfigurationError: one is missing.
    """
    for name in _NEEDED:
        if find_spec(name) is None:
            raise ConfigurationError(_tell(name))


def _tell(name: str) -> str:
    return (
        f"jobs_lib needs {name}: pip install 'jobs-lib[postgres]', or "
        "'jobs-lib[binary]' with a libpq"
    )
