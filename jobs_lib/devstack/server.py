"""What the two servers share: how they start, run and stop."""

from __future__ import annotations

import os
import shutil
import signal
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from jobs_lib.devstack.ports import free_port, is_free, owner_of
from jobs_lib.devstack.process import ServerProcess
from jobs_lib.errors import DevStackError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from jobs_lib.devstack.process import Account

START_SECONDS = 180.0
_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.02
_LOG_LINES = 12
# Another process can take a free port before the server binds it. Then the start tries
# another port.
_ATTEMPTS = 5


class PortTakenError(DevStackError):
    """Another process has taken the server's port."""


class Server(ABC):
    """One server on 127.0.0.1, with a folder for its data and its log.

    Without a folder it is ephemeral: it gets a temporary folder, and `stop` deletes
    that. However this process ends, neither the server nor the folder outlives it.

    An object is for one thread at a time. It is also a context manager: it starts on
    entry and stops on exit.
    """

    #: The name for people.
    name: ClassVar[str]
    _port_option: ClassVar[str]
    _stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    _abandon_signal: ClassVar[signal.Signals] = signal.SIGKILL

    def __init__(
        self, folder: Path | None, *, port: int | None, detached: bool
    ) -> None:
        if detached and folder is None:
            raise ValueError("a detached server needs a folder")
        self.temporary = folder is None
        self._wanted = None if folder is None else Path(folder).absolute()
        # Given, or chosen by the first start. From then on clients know it.
        self._required_port = port
        self._preferred_port: int | None = None
        self._detached = detached
        self._folder: Path | None = None
        self._port: int | None = None
        self._process: ServerProcess | None = None
        self._log_start = 0
        self._came_up = False
        #: Whether a start has given a password to a server that had none.
        self.secured = False
        #: Called as soon as there is a process, before it answers, to record it.
        self.on_launch: Callable[[], None] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        """Whether the server's process lives."""
        return self._process is not None and self._process.alive()

    @property
    def process(self) -> ServerProcess:
        """The running process. Raises DevStackError before `start`."""
        if self._process is None:
            raise DevStackError(f"{self.name} is not started")
        return self._process

    @property
    def pid(self) -> int:
        """The number of the running process."""
        return self.process.pid

    @property
    def port(self) -> int:
        """The port on 127.0.0.1. Raises DevStackError before the first `start`."""
        if self._port is None:
            raise DevStackError(f"{self.name} is not started")
        return self._port

    @property
    def folder(self) -> Path:
        """The folder of data and log. Raises DevStackError before the first `start`."""
        if self._folder is None:
            raise DevStackError(f"{self.name} is not started")
        return self._folder

    @property
    def log_file(self) -> Path:
        """The file with what the server writes for people to read."""
        return self.folder / "server.log"

    def prefer_port(self, port: int) -> None:
        """Take `port` at the first start if it is free, else any other."""
        self._preferred_port = port

    def adopt(self, process: ServerProcess, *, port: int, folder: Path) -> None:
        """Take charge of a server that another process started."""
        self._process, self._port, self._folder = process, port, folder

    def start(self) -> Self:
        """Start the server and wait until it answers, 180 s at most.

        The port is the same at every start of this object. If the server does not
        start, this raises DevStackError with the last lines of the log.
        """
        deadline = time.monotonic() + START_SECONDS
        if self.running:
            self._wait_until_ready(self.port, deadline)
            self._settle()
            return self
        try:
            self._start_anew(deadline)
            self._settle()
        except OSError as error:
            self._discard()
            raise DevStackError(f"{self.name} cannot be started: {error}") from error
        except BaseException:
            self._discard()
            raise
        return self

    def stop(self, *, keep_data: bool = False) -> None:
        """Stop it properly. Unless kept, the data of an ephemeral server go too."""
        if self._process is not None:
            end(self._process, self._stop_signal, self.name)
            self._process = None
        if self.temporary and not keep_data and self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def kill(self) -> None:
        """SIGKILL the server and its children; keep the data for the next `start`."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def restart(self) -> Self:
        """Stop it properly and start it with the same data and port."""
        self.stop(keep_data=True)
        return self.start()

    def log_tail(self, lines: int = _LOG_LINES) -> str:
        """The last lines that the server has written since its last start."""
        try:
            with self.log_file.open("rb") as log:
                log.seek(self._log_start)
                text = log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    @property
    @abstractmethod
    def address(self) -> str:
        """The address that clients connect to."""

    @abstractmethod
    def _make_folder(self) -> Path:
        """Find or create the folder."""

    @abstractmethod
    def _prepare(self, port: int) -> None:
        """Prepare the folder, so that the server can be launched."""

    @abstractmethod
    def _command(self, port: int) -> Sequence[str]:
        """The server's command line."""

    @abstractmethod
    def _answers(self, port: int) -> bool:
        """Whether the server answers a real request now."""

    @abstractmethod
    def _settle(self) -> None:
        """Finish the start once the server answers."""

    def _account(self) -> Account | None:
        return None

    def _environment(self) -> dict[str, str]:
        return dict(os.environ)

    def _start_anew(self, deadline: float) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            if self._folder is None:
                self._folder = self._make_folder()
            port = self._choose_port(again=attempt > 1)
            self._prepare(port)
            self._launch(port)
            try:
                self._wait_until_ready(port, deadline)
            except PortTakenError:
                if attempt == _ATTEMPTS or port == self._required_port:
                    raise
            else:
                self._required_port, self._came_up = port, True
                return

    def _choose_port(self, *, again: bool) -> int:
        if (required := self._required_port) is not None:
            if not is_free(required):
                raise PortTakenError(self._taken(required))
            return required
        if (preferred := self._preferred_port) and not again and is_free(preferred):
            return preferred
        return free_port()

    def _taken(self, port: int) -> str:
        owner = owner_of(port) or "another process"
        return (
            f"port {port} for {self.name} is taken by {owner}: end that, "
            f"or choose another port ({self._port_option})"
        )

    def _launch(self, port: int) -> None:
        log = self.log_file
        self._log_start = log.stat().st_size if log.exists() else 0
        argv, env, account = self._command(port), self._environment(), self._account()
        self._port = port
        if self._detached:
            self._process = ServerProcess.detached(
                argv, log=log, env=env, account=account
            )
        else:
            self._process = ServerProcess.guarded(
                argv,
                log=log,
                env=env,
                account=account,
                ending=self._abandon_signal,
                remove=self.folder if self.temporary else None,
            )
        if self.on_launch is not None:
            self.on_launch()

    def _wait_until_ready(self, port: int, deadline: float) -> None:
        process = self.process
        while process.alive():
            if self._answers(port):
                return
            if time.monotonic() >= deadline:
                raise DevStackError(
                    f"{self.name} did not answer on port {port} within "
                    f"{START_SECONDS:.0f} s:\n{self.log_tail()}"
                )
            time.sleep(_POLL_SECONDS)
        process.wait(0)
        self._process = None
        if "Address already in use" in self.log_tail(200):
            raise PortTakenError(self._taken(port))
        raise DevStackError(f"{self.name} ended at its start:\n{self.log_tail()}")

    def _discard(self) -> None:
        """Leave nothing behind after a failed start."""
        self.kill()
        if self.temporary and not self._came_up and self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def end(process: ServerProcess, number: signal.Signals, name: str) -> None:
    """Ask a server to stop with a signal, wait, and SIGKILL it if it does not stop.

    Raises DevStackError if the server belongs to another user and lives on.
    """
    try:
        process.signal(number)
        if not process.wait(_STOP_SECONDS):
            process.kill()
    except PermissionError:
        raise DevStackError(
            f"{name} (pid {process.pid}) belongs to another user: "
            f"stop it as that user or as root"
        ) from None
