"""Who the members of consumer groups are, and what this client may do with a group.

A process of its own asks the groups' coordinators; it deletes groups, too. Where a
coordinator dies while it is asked, librdkafka aborts the whole process
(confluentinc/librdkafka issue 4605), and no other question gives the members of all
kinds of groups. Then the process is started again, and nothing else ends.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError

from jobs_lib.kafka.configuration import configure
from jobs_lib.kafka.refusal import find_refusal, no_answer

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from jobs_lib.settings import Settings

_SCRIPT = Path(__file__).with_name("members_process.py")
_STARTS = 3
"""How often the process is started for one question."""
_SPARE_SECONDS = 5.0
"""How long the process may take beside the time for the answer."""
_START_SECONDS = 15.0
"""How long it may take to start: the machine may be busy with all that starts."""
_CHUNK = 65_536
_logger = logging.getLogger("jobs_lib.kafka")


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A member of a consumer group, as its coordinator describes it."""

    client_id: str
    host: str
    instance: str | None
    """Its group.instance.id."""
    partitions: frozenset[tuple[str, int]]
    """Those that it is assigned: topics and numbers."""


@dataclass(frozen=True, slots=True)
class Group:
    """A consumer group, as its coordinator describes it."""

    state: str
    """Such as ``STABLE``."""
    members: tuple[GroupMember, ...]
    rights: frozenset[str]
    """What this client may do with the group, such as ``READ``. Empty if it was not
    asked for, or if the broker is too old to know."""


class MembersClient:
    """Asks for groups by a process of its own, which it starts when it is needed.

    Any thread may ask; one question is asked at a time. The process ends by itself if
    nobody asks for half a minute, and when this process ends.
    """

    def __init__(self, rests_after: float | None = None) -> None:
        """Prepare.

        Args:
            rests_after: seconds without a question after which the process is ended,
                and leaves nothing behind; None if questions come all the time.
        """
        self._rests_after = rests_after
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def close(self) -> None:
        """End the process; a question that is open fails, and so do all later ones."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._end()

    def describe(
        self,
        settings: Settings,
        groups: Collection[str],
        timeout: float,
        *,
        rights: bool = False,
    ) -> Mapping[str, Group | KafkaError]:
        """Describe groups; an unknown one has no members.

        Args:
            settings: where Kafka is.
            groups: by their names in Kafka.
            timeout: seconds for the answer.
            rights: whether to ask for the rights of this client, too.

        Returns:
            each group, or the error that there is instead.

        Raises:
            AccessError: Kafka does not let this client in.
            ConfigurationError: a setting would be unsafe.
            UnavailableError: the process that asks has died each time.
        """
        return self._put(settings, groups, timeout, rights=rights)

    def delete(
        self, settings: Settings, groups: Collection[str], timeout: float
    ) -> Mapping[str, Group | KafkaError]:
        """Delete groups without members; takes, returns and raises the same."""
        return self._put(settings, groups, timeout, deletes=True)

    def _put(
        self,
        settings: Settings,
        groups: Collection[str],
        timeout: float,
        *,
        rights: bool = False,
        deletes: bool = False,
    ) -> Mapping[str, Group | KafkaError]:
        question = {
            "configuration": configure(settings),
            "groups": sorted(groups),
            "rights": rights,
            "deletes": deletes,
        }
        with self._lock:
            answer = self._ask(settings, question, timeout)
            self._rest_later()
        for level, text in answer["log"]:
            _logger.log(level, "%s", text)
        found = {group: _read(one) for group, one in answer["groups"].items()}
        if any(isinstance(one, KafkaError) for one in found.values()):
            for code, text in answer["errors"]:
                refusal = find_refusal(KafkaError(code, text), settings)
                if refusal is not None:
                    raise refusal
        return found

    def _rest_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._rests_after is not None:
            self._timer = threading.Timer(self._rests_after, self._rest)
            self._timer.daemon = True
            self._timer.start()

    def _rest(self) -> None:
        with self._lock:
            # A question may have come meanwhile, and has a timer of its own.
            if threading.current_thread() is self._timer:
                self._end()

    def _ask(
        self, settings: Settings, question: dict[str, Any], timeout: float
    ) -> dict[str, Any]:
        until = time.monotonic() + timeout
        how = ""
        for _ in range(_STARTS):
            left = max(0.1, until - time.monotonic())
            if self._is_closed or (how and time.monotonic() >= until):
                break
            line = json.dumps(question | {"timeout": left}).encode() + b"\n"
            spare = _SPARE_SECONDS + (0 if self._is_running() else _START_SECONDS)
            try:
                answer = self._exchange(line, left + spare)
            except TimeoutError:
                self._end()
                how = f"has said nothing for {left + spare:.0f} s"
                continue
            if answer is not None:
                found: dict[str, Any] = json.loads(answer)
                return found
            how = self._end()
        raise no_answer(
            settings,
            f"the process that asks for the members of groups {how or 'is closed'}",
        )

    def _exchange(self, line: bytes, timeout: float) -> bytes | None:
        """Send a question and read the answer; None if the process has ended.

        Raises:
            TimeoutError: there is none in time.
        """
        until = time.monotonic() + timeout
        process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except OSError:
            return None
        # Not `select.select`, which fails where the process has 1,024 descriptors.
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        answer = bytearray()
        while not answer.endswith(b"\n"):
            left = max(0.0, until - time.monotonic())
            if not poll.poll(left * 1_000):
                raise TimeoutError
            chunk = os.read(process.stdout.fileno(), _CHUNK)
            if not chunk:
                return None
            answer += chunk
        return bytes(answer)

    def _is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _start(self) -> subprocess.Popen[bytes]:
        if not self._is_running():
            # Nobody has asked for a while, or not yet.
            self._end()
        if self._process is None:
            path = os.pathsep.join(filter(None, sys.path))
            # The configuration may have secrets: it comes with each question, and not
            # by arguments or the environment, which others can read.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": path},
            )
        return self._process

    def _end(self) -> str:
        """End the process; returns how it has ended."""
        process, self._process = self._process, None
        if process is None:
            return ""
        process.kill()
        status = process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:
                # A question that it has not read cannot be flushed any more.
                continue
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        return f"has ended, {how}"


# Services ask at their start, and then need no other process.
_shared = MembersClient(rests_after=2.0)


def describe_groups(
    settings: Settings,
    groups: Collection[str],
    timeout: float,
    *,
    rights: bool = False,
) -> Mapping[str, Group | KafkaError]:
    """Describe groups now and then: see :meth:`MembersClient.describe`."""
    return _shared.describe(settings, groups, timeout, rights=rights)


def delete_groups(
    settings: Settings, groups: Collection[str], timeout: float
) -> Mapping[str, Group | KafkaError]:
    """Delete groups without members: see :meth:`MembersClient.delete`."""
    return _shared.delete(settings, groups, timeout)


def _read(answer: dict[str, Any]) -> Group | KafkaError:
    if "error" in answer:
        return KafkaError(*answer["error"])
    members = tuple(
        GroupMember(
            one["client_id"],
            one["host"],
            one["instance"],
            frozenset((topic, number) for topic, number in one["partitions"]),
        )
        for one in answer["members"]
    )
    return Group(answer["state"], members, frozenset(answer["rights"]))
