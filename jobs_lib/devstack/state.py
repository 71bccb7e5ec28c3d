"""The state file: the server processes that were started for a project, and where."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from jobs_lib.devstack.places import locked, write_secret
from jobs_lib.devstack.process import ServerProcess
from jobs_lib.errors import DevStackError

if TYPE_CHECKING:
    from pathlib import Path

    from jobs_lib.devstack.server import Server


@dataclass(frozen=True)
class Record:
    """The record of a server. It stays after the server has stopped."""

    pid: int
    #: When the kernel started the process: another one with this pid is not it.
    started: str
    port: int
    address: str
    folder: str

    @property
    def process(self) -> ServerProcess:
        """The process, alive or not."""
        return ServerProcess(self.pid, self.started)


class StateFile:
    """A JSON file of records by server."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Record]:
        """Read the records. Raises DevStackError if the file is damaged.

        Without a file there are none.
        """
        try:
            state: dict[str, dict[str, Any]] = json.loads(self.path.read_bytes())
            return {key: Record(**fields) for key, fields in state.items()}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, AttributeError) as error:
            raise DevStackError(
                f"{self.path} is damaged ({error}): end the servers that it named, if "
                "they run, and remove the file"
            ) from error
        except OSError as error:
            raise DevStackError(
                f"{self.path} cannot be read: {error}; choose another folder (--folder)"
            ) from error

    def write(self, key: str, server: Server) -> None:
        """Record a server that was just started."""
        record = Record(
            server.pid,
            server.process.started,
            server.port,
            server.address,
            str(server.folder),
        )
        # Both servers start at once, and each writes its record.
        with locked(self.path.with_suffix(".lock")):
            records = {**self.read(), key: record}
            # The address of PostgreSQL has its password in it.
            text = json.dumps({k: asdict(r) for k, r in records.items()}, indent=2)
            write_secret(self.path, text)
