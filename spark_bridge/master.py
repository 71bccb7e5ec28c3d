"""Look at Spark's master before anything is started: does it answer, may we trust it?

A password that tasks need travels in the pickled function of the tasks. On one machine
nobody sees it. Between machines it must not be there, or Spark must encrypt its own
traffic.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from jobs_lib.addresses import LAST_PORT
from jobs_lib.errors import ReexportError
from jobs_lib.masking import find_secrets

if TYPE_CHECKING:
    from collections.abc import Mapping

ANSWERS_WITHIN = 5.0
"""Seconds for a master to take a connection; Spark itself would try for a minute."""
MOST_TASKS = 64
"""Tasks on a cluster, whose size nobody tells."""
_STANDALONE = "spark://"
_THREADS = re.compile(r"local\[(\d+)[],]")
_HOST = re.compile(r"(?:\[(?P<v6>[^]]+)\]|(?P<name>[^:]+)):(?P<port>\d{1,5})")
_DEFAULT = re.compile(r"\s*([^\s=:#]+)(?:\s*[=:]\s*|\s+)(.*?)\s*")
_ENCRYPTIONS = (
    ("spark.authenticate", "spark.network.crypto.enabled"),
    ("spark.authenticate", "spark.authenticate.enableSaslEncryption"),
    ("spark.ssl.rpc.enabled",),
)
"""Settings that, all of one line together, encrypt tasks on their way to workers."""


def is_local(master: str) -> bool:
    """Whether Spark runs inside this process alone."""
    # `local-cluster[…]` starts processes, and its workers are machines to us.
    return master == "local" or master.startswith("local[")


def count_threads(master: str) -> int:
    """How many threads of this machine Spark uses; meant for a local master."""
    if found := _THREADS.match(master):
        return max(1, int(found[1]))
    return 1 if master == "local" else os.cpu_count() or 1


def count_tasks(master: str, pieces: int) -> int:
    """Choose how many tasks share pieces of work of one size, such as ranges.

    A task costs a tenth of a second for itself, in which its thread does nothing else.
    So each thread of this machine has one: it ends about when the others do.
    """
    if is_local(master):
        return min(pieces, count_threads(master))
    return min(pieces, MOST_TASKS)


def is_here(master: str) -> bool:
    """Whether the traffic of Spark stays on this machine."""
    if is_local(master) or master.startswith("local-cluster["):
        return True
    if not master.startswith(_STANDALONE):
        return False
    addresses = map(_read_address, _list_addresses(master))
    return all(one is not None and _is_loopback(one[0]) for one in addresses)


def check_form(master: str) -> None:
    """Check the form of a standalone master's address.

    Raises:
        ReexportError: it names no host and port, or one of several addresses does not.
    """
    if not master.startswith(_STANDALONE):
        return
    for one in _list_addresses(master):
        if _read_address(one) is None:
            raise ReexportError(
                f"{one!r} names no master of Spark, in {master!r}: give one such as "
                "spark://host:7077, or several as spark://host:7077,other:7077"
            )


def check_answers(master: str, within: float = ANSWERS_WITHIN) -> None:
    """Check that a standalone master takes connections; others are left to Spark.

    Raises:
        ReexportError: none of its addresses does, or it names none.
    """
    if not master.startswith(_STANDALONE):
        return
    check_form(master)
    reasons = []
    for address in filter(None, map(_read_address, _list_addresses(master))):
        try:
            socket.create_connection(address, within).close()
        # An odd host is a UnicodeError.
        except (OSError, UnicodeError) as error:
            reasons.append(str(error) or type(error).__name__)
        else:
            return
    raise ReexportError(
        f"Spark's master at {master} does not answer: {'; '.join(reasons)}. Is it "
        "running, and is --master right? Or load without Spark: --engine sql"
    )


def check_password(master: str, url: str, settings: Mapping[str, str]) -> None:
    """Check that no password would cross a network in the open.

    Raises:
        ReexportError: the URL has a password, the master is not on this machine, and
            Spark does not encrypt its traffic.
    """
    if is_here(master) or not has_password(url) or is_encrypted(settings):
        return
    raise ReexportError(
        f"the database's URL holds a password, which would go to the workers of "
        f"{master} unencrypted. Either let the URL name a service file that lies on "
        "the workers (postgresql://?service=NAME), or let Spark encrypt its traffic: "
        "spark.authenticate and spark.network.crypto.enabled"
    )


def check_kafka(
    master: str, given: Mapping[str, str], settings: Mapping[str, str]
) -> None:
    """Check that no secret of Kafka's client would cross a network in the open.

    Args:
        master: Spark's.
        given: the settings of Kafka's client.
        settings: of Spark.

    Raises:
        ReexportError: one would.
    """
    if is_here(master) or not find_secrets(given) or is_encrypted(settings):
        return
    raise ReexportError(
        "JOBS_LIB_KAFKA holds a secret, which would go to the workers of "
        f"{master} unencrypted, because they read the topic. Either let its settings "
        "name files that lie on the workers, or let Spark encrypt its traffic: "
        "spark.authenticate and spark.network.crypto.enabled"
    )


def has_password(url: str) -> bool:
    """Whether a URL holds a password, rather than a file that does."""
    try:
        found = psycopg.conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        return False  # it reaches no database either, and says so
    return bool(found.get("password") or found.get("sslpassword"))


def is_encrypted(settings: Mapping[str, str]) -> bool:
    """Whether Spark, with these settings, encrypts what it sends to workers."""
    return any(
        all(settings.get(name, "").strip().lower() == "true" for name in names)
        for names in _ENCRYPTIONS
    )


def read_defaults() -> dict[str, str]:
    """Read the settings of ``spark-defaults.conf``, as Spark does when it starts."""
    folder = os.environ.get("SPARK_CONF_DIR")
    if not folder:
        home = os.environ.get("SPARK_HOME") or _find_wheel()
        folder = f"{home}/conf" if home else None
    if not folder:
        return {}
    try:
        text = Path(folder, "spark-defaults.conf").read_text(encoding="utf-8")
    except OSError:
        return {}
    found = (_DEFAULT.fullmatch(line) for line in text.splitlines())
    return {one[1]: one[2] for one in found if one}


def _find_wheel() -> str | None:
    spec = importlib.util.find_spec("pyspark")
    return next(iter(spec.submodule_search_locations or ()), None) if spec else None


def _list_addresses(master: str) -> list[str]:
    """List the addresses of a standalone master: of several masters one leads."""
    return master.removeprefix(_STANDALONE).split(",")


def _read_address(text: str) -> tuple[str, int] | None:
    """Read a host and its port; None if they are none."""
    found = _HOST.fullmatch(text)
    if found is None or not 0 < int(found["port"]) <= LAST_PORT:
        return None
    return found["v6"] or found["name"], int(found["port"])


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
