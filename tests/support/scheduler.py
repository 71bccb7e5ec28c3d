"""Hand out the files of a run, and hand them out anew when a process ended early.

The files of some folders go to one process together: they share servers of their own,
which each further process would start, too.

xdist 3.8 hands out everything that the process ever had: files that are done, and the
test that ended it. A process that gets nothing but done files waits for ever, and so
does the run. A test that ends its process ends the next one too. Both are known there:
issues 1323, 1327, 1362, 1371 and 1378 of pytest-dev/pytest-xdist.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    from collections.abc import Collection

    import pytest
    from xdist.remote import Producer
    from xdist.workermanage import WorkerController


class FileScheduler(LoadFileScheduling):  # type: ignore[misc] # xdist has no types
    """xdist's `--dist loadfile`, for a run that outlives any of its processes.

    Args:
        config: of the run.
        log: of xdist.
        folders: whose files go to one process, by their paths from the project's root,
            with a slash at the end.
    """

    def __init__(
        self, config: pytest.Config, log: Producer, folders: Collection[str] = ()
    ) -> None:
        super().__init__(config, log)
        self._folders = folders

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return next((one for one in self._folders if file.startswith(one)), file)

    def remove_node(self, node: WorkerController) -> str | None:
        """Take back what a process had and has not run; return what it ran last."""
        files = self.assigned_work.pop(node)
        # The collection of a dead process counts as one that all others wait for.
        if not self.collection_is_completed:
            self.registered_collections.pop(node, None)
        waiting = (test for tests in files.values() for test in _not_run(tests))
        ended_by = next(waiting, None)
        if ended_by is None:
            return None
        files[self._split_scope(ended_by)][ended_by] = True
        for file, tests in files.items():
            if _not_run(tests):
                self.workqueue[file] = tests
        for other in self.nodes:
            self._reschedule(other)
        return ended_by

    def _assign_work_unit(self, node: WorkerController) -> None:
        # A process that has just ended is heard of later, and its tests come back then.
        with suppress(OSError):
            super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        # A process in the place of another one may still be collecting.
        if node.shutting_down or node not in self.registered_collections:
            return
        # A process starts a test when it knows the next one, or that there is none.
        while self.workqueue and self._pending_of(self.assigned_work[node]) <= 2:
            self._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()


def _not_run(tests: dict[str, bool]) -> list[str]:
    return [test for test, has_run in tests.items() if not has_run]
