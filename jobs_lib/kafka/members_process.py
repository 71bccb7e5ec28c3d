"""The process that asks the coordinators of consumer groups, a question on each line.

It runs as a script, and imports nothing of the library, so that it starts quickly. It
may die at any question: see :mod:`jobs_lib.kafka.members`, which starts it.
"""

from __future__ import annotations

import json
import logging
import resource
import select
import signal
import sys
from typing import Any

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

_IDLE = 30.0
"""Seconds without a question after which it ends."""
_MOST_EVENTS = 100


class Asker:
    """Asks with one client, until it fails or the configuration is another one."""

    def __init__(self) -> None:
        self._configuration: dict[str, Any] | None = None
        self._admin: Any = None
        self._errors: list[tuple[int, str]] = []
        self._handler = _Handler()
        self._logger = logging.getLogger("members")
        self._logger.propagate = False
        self._logger.setLevel(logging.DEBUG)
        self._logger.addHandler(self._handler)

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answer one question; an error of a group is an answer, too."""
        admin = self._get(question["configuration"])
        names, timeout = question["groups"], question["timeout"]
        if question["deletes"]:
            futures = admin.delete_consumer_groups(names, request_timeout=timeout)
        else:
            futures = admin.describe_consumer_groups(
                names,
                include_authorized_operations=question["rights"],
                request_timeout=timeout,
            )
        groups = {group: _describe(future) for group, future in futures.items()}
        for _ in range(_MOST_EVENTS):
            if not admin.poll(0):
                break
        errors, self._errors[:] = [*self._errors], []
        lines, self._handler.lines = self._handler.lines, []
        if any("error" in one for one in groups.values()):
            # It may go on failing for long after its broker has come back.
            self._admin = self._configuration = None
        return {"groups": groups, "errors": errors, "log": lines}

    def _get(self, configuration: dict[str, Any]) -> Any:
        if configuration != self._configuration:
            self._admin = AdminClient(
                configuration | {"error_cb": self._note}, logger=self._logger
            )
            self._configuration = configuration
        return self._admin

    def _note(self, error: Any) -> None:
        self._errors.append((error.code(), error.str()))


class _Handler(logging.Handler):
    """Keeps log lines for the next answer."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line."""
        self.lines.append((record.levelno, record.getMessage()))


def _describe(future: Any) -> dict[str, Any]:
    try:
        found = future.result()
    except KafkaException as failure:
        error = failure.args[0]
        return {"error": [error.code(), error.str()]}
    if found is None:
        # It was deleted.
        return {"state": "DEAD", "members": [], "rights": []}
    members = [
        {
            "client_id": one.client_id,
            "host": one.host,
            "instance": one.group_instance_id,
            "partitions": [
                [at.topic, at.partition] for at in one.assignment.topic_partitions
            ],
        }
        for one in found.members
    ]
    rights = [one.name for one in found.authorized_operations or ()]
    return {"state": found.state.name, "members": members, "rights": rights}


def main() -> None:
    """Answer until nobody asks any more."""
    # The process that asks may be ended by Ctrl-C, and then ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # It may die often, and nobody needs its memory then.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    asker = Asker()
    while select.select([sys.stdin], [], [], _IDLE)[0]:
        line = sys.stdin.readline()
        if not line:
            return
        sys.stdout.write(json.dumps(asker.answer(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
