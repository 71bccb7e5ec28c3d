"""The addresses of PostgreSQL, Kafka and the schema registry: what is refused in them.

An address may hold a password. So no text about one that is refused shows it.
"""

from __future__ import annotations

from jobs_lib.errors import ConfigurationError

LAST_PORT = 65_535
"""The C library takes a larger number for the port of its last 16 bits."""

_UNREADABLE = (
    "the URL cannot be read. In a user, a password or a database's name, each of "
    "@ / : ? # % [ ] and a space is written by its number, such as %40 for @; a port "
    "is a number; and after a ? come only parameters that libpq knows"
)
"""The message leaves out libpq's text, which repeats the password."""


def check_url(url: str) -> str:
    """The URL of a PostgreSQL database as libpq reads it.

    Raises:
        ConfigurationError: it is none, or cannot be read; the text does not show it.
    """
    driver, there, _ = url.partition("://")
    scheme = driver.split("+")[0]
    if not there or scheme not in {"postgresql", "postgres"}:
        named = scheme if there and scheme.isalnum() else "no scheme"
        raise ConfigurationError(
            f"the URL starts with {named!r}; "
            "it must look like postgresql://user@host:5432/database"
        )
    url = libpq_url(url)
    if not _is_readable(url):
        raise ConfigurationError(_UNREADABLE)
    return url


def libpq_url(url: str) -> str:
    """The URL as libpq reads it: SQLAlchemy's form names a driver."""
    scheme, there, rest = url.partition("://")
    return f"{scheme.split('+')[0]}{there}{rest}"


def check_port(address: str) -> None:
    """Refuse a port that cannot be, in ``host:port`` or a URL.

    Raises:
        ValueError: the port is none; the text shows no password.
    """
    # From the last @ on: a password may have a slash that nobody has escaped.
    host = address.rpartition("://")[2].rpartition("@")[2].partition("/")[0]
    port = host.rpartition(":")[2]
    if port.isdecimal() and not 0 < int(port) <= LAST_PORT:
        raise ValueError(f"{host!r} has no port from 1 to {LAST_PORT}")


def check_registries(urls: str) -> None:
    """Refuse what is no list of URLs, with commas between them.

    Raises:
        ValueError: a part of the list is none; the text does not show it.
    """
    # Behind a comma in a password its rest would be shown as an address.
    if not all("://" in one for one in urls.split(",")):
        raise ValueError(
            "give each registry as http://host:port, with commas between them; a comma "
            "in a password is written %2C"
        )


def _is_readable(url: str) -> bool:
    """Whether libpq reads the URL, and takes no piece of a password for a name."""
    # Processes that coordinate over Kafka alone load no database driver.
    try:
        import psycopg
        from psycopg.conninfo import conninfo_to_dict
    except ImportError:
        return True  # nobody can connect to it here: see jobs_lib/extras.py
    try:
        parts = {key: str(value) for key, value in conninfo_to_dict(url).items()}
    except psycopg.ProgrammingError:
        return False
    names = parts.get("host", "") + parts.get("dbname", "")
    ports = parts.get("port", "").replace(",", "")
    return "@" not in names and (ports.isdigit() or not ports)
