"""Start, watch and end one server process.

A server is started in one of two ways, both through a few lines of `sh`:

- *guarded*: it is a child of this process. A watchdog beside it waits on a pipe that
  only this process holds. When this process dies, for any reason, the pipe closes. Then
  the watchdog ends the server and removes its folder. (`PR_SET_PDEATHSIG` would not
  work: it fires when the *thread* that forked ends, and a change of user clears it.)
- *detached*: it is no child of this process, and outlives it.

The process table is read here, and not through psutil: servers of the system are
started without the extra that installs it. Besides, psutil computes the time of a start
from the clock, which may be set in the meantime.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_POLL_SECONDS = 0.01
_KILL_SECONDS = 10
"""Within this time a killed process ends, even one with much memory."""

# $1 is the signal, $2 the folder to remove. The watchdog is in the server's process
# group, so the kernel gives the server's number to no other process while it waits. If
# it reads a line, all is well and it ends. At end of file our process is dead.
_GUARDED = """
ending=$1; folder=$2; shift 2
exec 3<&0 </dev/null
(
    read -r _ <&3 && exit
    kill -s "$ending" $$ 2>/dev/null
    tries=0
    while kill -0 $$ 2>/dev/null && [ $tries -lt 200 ]; do
        tries=$((tries + 1)); sleep 0.05
    done
    kill -s KILL $$ 2>/dev/null
    [ -z "$folder" ] || rm -rf -- "$folder"
) >/dev/null 2>&1 &
exec 3<&-
exec "$@"
"""

_DETACHED = '"$@" >&2 </dev/null & echo $!'


class PopenUser(TypedDict, total=False):
    """The arguments of Popen that change the user."""

    user: int
    group: int
    extra_groups: list[int]


@dataclass(frozen=True)
class Account:
    """The user that a server runs as, if not the current one."""

    uid: int
    gid: int


def as_account(account: Account | None) -> PopenUser:
    """Popen's arguments for running as `account`; None is the current user."""
    if account is None:
        return {}
    return {"user": account.uid, "group": account.gid, "extra_groups": []}


class ServerProcess:
    """A running server: a child (guarded), or known by its number (detached)."""

    def __init__(
        self,
        pid: int,
        started: str,
        child: subprocess.Popen[bytes] | None = None,
        pipe: int | None = None,
    ) -> None:
        self.pid = pid
        #: When the kernel started it. With the pid, this names one process for ever.
        self.started = started
        self._child = child
        self._pipe = pipe

    @classmethod
    def guarded(
        cls,
        argv: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str],
        account: Account | None = None,
        ending: signal.Signals = signal.SIGKILL,
        remove: Path | None = None,
    ) -> ServerProcess:
        """Start a server that must not outlive this process.

        If this process dies, the server gets `ending` and `remove` is deleted.
        """
        reader, writer = os.pipe()
        try:
            with log.open("ab") as output:
                child = subprocess.Popen(
                    [
                        *("/bin/sh", "-c", _GUARDED, "sh"),
                        *(ending.name.removeprefix("SIG"), str(remove or ""), *argv),
                    ],
                    stdin=reader,
                    stdout=output,
                    stderr=output,
                    cwd="/",
                    env=env,
                    start_new_session=True,
                    **as_account(account),
                )
        except BaseException:
            os.close(writer)
            raise
        finally:
            os.close(reader)
        return cls(child.pid, start_of(child.pid) or "", child, writer)

    @classmethod
    def detached(
        cls,
        argv: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str],
        account: Account | None = None,
    ) -> ServerProcess:
        """Start a server that outlives this process."""
        with log.open("ab") as output:
            launched = subprocess.run(
                ["/bin/sh", "-c", _DETACHED, "sh", *argv],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                cwd="/",
                env=env,
                start_new_session=True,
                check=True,
                **as_account(account),
            )
        pid = int(launched.stdout)
        return cls(pid, start_of(pid) or "")

    def alive(self) -> bool:
        """Whether it still runs, and its number does not name another process now."""
        if self._child is not None:
            return self._child.poll() is None
        return bool(self.started) and start_of(self.pid) == self.started

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, seconds: float) -> bool:
        """Wait for its end, `seconds` at most; return whether it has ended."""
        if not _await(lambda: not self.alive(), seconds):
            return False
        self._release()
        return True

    def kill(self) -> None:
        """SIGKILL it and all its children, as if the machine lost power.

        It returns when all have ended: PostgreSQL does not start while a child of the
        last server is in its shared memory.
        """
        # Pause it first, so that it cannot start more children between the two steps.
        self.signal(signal.SIGSTOP)
        self._release()
        _await(lambda: not self.alive() or _is_paused(self.pid))
        children = [
            ServerProcess(pid, start_of(pid) or "")
            for pid in (children_of(self.pid) if self.alive() else ())
        ]
        for process in (*children, self):
            process.signal(signal.SIGKILL)
        for process in (*children, self):
            process.wait(_KILL_SECONDS)

    def _release(self) -> None:
        if self._pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._pipe, b"\n")
            os.close(self._pipe)
            self._pipe = None


def start_of(pid: int) -> str | None:
    """When process `pid` started, as the system writes it; None if it has ended."""
    if not Path("/proc/self/stat").exists():
        return _start_by_ps(pid)
    fields = _stat(pid)
    return None if fields is None or fields[0] in "ZX" else fields[19]


def exists(pid: int) -> bool:
    """Whether the process table has `pid`, even as a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _await(condition: Callable[[], bool], seconds: float = _KILL_SECONDS) -> bool:
    """Wait for a condition, and return whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _is_paused(pid: int) -> bool:
    """Whether it was stopped by a signal; true on systems that do not say it."""
    fields = _stat(pid)
    return fields is None or fields[0] in "Tt"


def children_of(pid: int) -> list[int]:
    """The direct children of `pid` on Linux; an empty list on other systems."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(entry.name))
        if fields is not None and int(fields[1]) == pid:
            found.append(int(entry.name))
    return found


def _stat(pid: int) -> list[str] | None:
    # The name in parentheses may hold any text, even blanks and parentheses.
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def _start_by_ps(pid: int) -> str | None:
    shown = subprocess.run(
        ["ps", "-o", "stat=,lstart=", "-p", str(pid)],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split(maxsplit=1)
    return shown[1].strip() if len(shown) == 2 and shown[0][0] != "Z" else None
