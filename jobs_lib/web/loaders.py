"""Load re-exports in threads of this process, and tell how that goes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from jobs_lib import reexport as api
from jobs_lib import telemetry
from jobs_lib.masking import describe

if TYPE_CHECKING:
    from jobs_lib.postgres.database import Database


class _Loader:
    """One thread, and how it has ended."""

    def __init__(self, database: Database, begun: api.Begun) -> None:
        self._database = database
        self._begun = begun
        self.state = "running"
        self.error: str | None = None
        # A daemon: a process that is to end does so at once. Another start goes on.
        self._thread = threading.Thread(
            target=self._run, name=f"re-export {begun.id}", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        try:
            api.load(self._database, self._begun, api.SqlEngine())
        except BaseException as error:
            self.state, self.error = "failed", describe(error)
            telemetry.emit("loop.failed", loop=self._thread.name, error=error)
        else:
            self.state = "ended"

    def as_dict(self) -> dict[str, Any]:
        return {"state": self.state, "error": self.error}


class Loaders:
    """The loaders of this process, one for each re-export."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[int, _Loader] = {}

    def load(self, database: Database, begun: api.Begun) -> None:
        """Load what is not loaded, unless a thread of this process does so already."""
        with self._lock:
            known = self._found.get(begun.id)
            if known is None or known.state != "running":
                self._found[begun.id] = _Loader(database, begun)
            for number in [*self._found][:-100]:
                if self._found[number].state != "running":
                    del self._found[number]

    def find(self, reexport: int) -> dict[str, Any] | None:
        """How it goes in this process; None if it was not begun here."""
        found = self._found.get(reexport)
        return None if found is None else found.as_dict()
