"""Servers that already exist, named by environment variables."""

from __future__ import annotations

import os
import socket

from jobs_lib.addresses import LAST_PORT
from jobs_lib.errors import DevStackError
from jobs_lib.masking import masked_url

DATABASE_VARIABLE = "JOBS_LIB_DATABASE_URL"
KAFKA_VARIABLE = "JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS"

_CONNECT_SECONDS = 5


def given(variable: str) -> str | None:
    """The address in the environment variable; None if it is unset or empty."""
    return os.environ.get(variable, "").strip() or None


def shown(address: str) -> str:
    """The address as people may see it: without a password."""
    if "://" in address:
        return masked_url(address)
    return "a connection string" if "=" in address else address


def check(variable: str, address: str) -> None:
    """Raise DevStackError unless the server at the variable's address answers."""
    try:
        if variable == DATABASE_VARIABLE:
            _check_database(address)
        else:
            _check_kafka(address)
    except (OSError, ValueError) as error:
        raise DevStackError(
            f"{variable} is set to {shown(address)}, which does not answer "
            f"({error}): correct it, or unset it to have a server started here"
        ) from error


def _check_database(address: str) -> None:
    import psycopg

    # SQLAlchemy names the driver in the URL, and psycopg does not know that form.
    url = address.replace("postgresql+psycopg://", "postgresql://", 1)
    try:
        psycopg.connect(url, connect_timeout=_CONNECT_SECONDS).close()
    except psycopg.Error as error:
        raise OSError(str(error).strip().splitlines()[0]) from error


def _check_kafka(address: str) -> None:
    # A bare connection is enough: the broker may ask for credentials set elsewhere.
    for server in address.split(","):
        host, _, port = server.strip().rpartition(":")
        try:
            if not 0 < (number := int(port)) <= LAST_PORT:
                raise OSError(f"{number} is no port")
            where = (host.strip("[]"), number)
            socket.create_connection(where, _CONNECT_SECONDS).close()
        except OSError as error:
            failure = error
        else:
            return
    raise failure
