"""Record the statements that an executor sends, and send them again by pgbench.

The cost of an executor beyond its SQL shows best beside that very SQL. So pgbench sends
the same prepared statements with the same parameters, over one connection, on a copy of
the same table, without any Python. The statements are read from the server's log, so
they are exactly those that were sent, at the batch sizes that were used.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from jobs_lib.devstack.postgres import wheel_bin
from jobs_lib.postgres.queries import load_queries

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from benchmarks.server import Server

_ENTRY = re.compile(r"^\S+ \S+ \S+ \[(\d+)\] (\w+):  ", re.MULTILINE)
_EXECUTE = re.compile(r"execute [^:]+: (.*)", re.DOTALL)
_VALUE = re.compile(r"\$\d+ = ('(?:[^']|'')*'|NULL)")
_PLACEHOLDER = re.compile(r"%\(\w+\)s|\$\d+")
_LATENCY = re.compile(r"latency average = ([\d.]+) ms")


class ReplayError(Exception):
    """There is nothing to send again, or it did not have the same effect."""


class Recording:
    """The statements of some named queries, in the order in which they were sent."""

    def __init__(self, server: Server, names: Sequence[str]) -> None:
        self._server = server
        self._queries = {
            name: load_queries("jobs_lib")[name].as_string(None) for name in names
        }
        self._from = 0
        self._script = ""
        self.counts: dict[str, int] = {}

    def start(self) -> None:
        """Log every statement of the sessions that begin from now on."""
        self._from = self._server.log.stat().st_size
        with self._server.connect() as connection:
            connection.execute("alter database bench set log_statement = 'all'")

    def stop(self) -> None:
        """Make the script of the logged statements.

        Raises:
            ReplayError: one of the queries was never sent.
        """
        with self._server.log.open(encoding="utf-8", errors="replace") as file:
            file.seek(self._from)
            statements = read_statements(file.read())
        self._script, self.counts = make_script(statements, self._queries)

    def replay(self) -> float:
        """Send all statements again; return the seconds that this took."""
        with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
            file.write(self._script)
            file.flush()
            done = subprocess.run(
                [
                    str(Path(wheel_bin(), "pgbench")),
                    *("--no-vacuum", "--client=1", "--transactions=1"),
                    f"--file={file.name}",
                ],
                env=self._server.environment,
                capture_output=True,
                text=True,
                check=False,
            )
        found = _LATENCY.search(done.stdout)
        if done.returncode or found is None:
            raise ReplayError(f"pgbench failed: {done.stderr.strip()[-1_000:]}")
        return float(found[1]) / 1e3


def read_statements(log: str) -> Iterator[tuple[str, list[str]]]:
    """Each prepared statement in a server's log, with its values as SQL literals."""
    parts = _ENTRY.split(log)[1:]
    waiting: dict[str, str] = {}
    for pid, kind, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        if kind == "LOG" and (found := _EXECUTE.match(text)):
            # A tab indents the lines after the first one.
            waiting[pid] = found[1].replace("\n\t", "\n").rstrip()
        elif kind == "DETAIL" and pid in waiting:
            yield waiting.pop(pid), _VALUE.findall(text)


def make_script(
    statements: Iterable[tuple[str, list[str]]], queries: Mapping[str, str]
) -> tuple[str, dict[str, int]]:
    """A script that sends some queries again, and the number of each of them.

    Raises:
        ReplayError: one of them was never sent.
    """
    names = {_shape(query): name for name, query in queries.items()}
    counts = dict.fromkeys(queries, 0)
    prepared, executed = [], []
    for statement, values in statements:
        name = names.get(_shape(statement))
        if name is None:
            continue
        if not counts[name]:
            prepared.append(f"prepare replay_{name} as {statement};")
        counts[name] += 1
        executed.append(f"execute replay_{name} ({', '.join(values)});")
    if missing := [name for name, count in counts.items() if not count]:
        raise ReplayError(
            f"the executor sent no {' and no '.join(missing)}: benchmarks/measures/"
            "raw_sql.py names the queries of jobs_lib/sql that it claims and "
            "completes with"
        )
    return "\n".join([*prepared, *executed, ""]), counts


def _shape(statement: str) -> str:
    """A statement without the names of its parameters."""
    return _PLACEHOLDER.sub("?", statement).replace("%%", "%")
