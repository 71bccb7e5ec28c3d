"""Where the embedded stack keeps things, and the account PostgreSQL runs under."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from jobs_lib.devstack.process import Account, as_account
from jobs_lib.errors import DevStackError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CACHE_VARIABLE = "JOBS_LIB_CACHE_DIR"

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL
# PostgreSQL refuses to run as root. Every POSIX system has this account, and it owns
# nothing. Using it changes nothing on the machine (no `useradd`).
_UNPRIVILEGED = "nobody"


def cache_folder() -> Path:
    """The folder for downloads: JOBS_LIB_CACHE_DIR, else `jobs-lib` in the user's."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jobs-lib"


def postgres_account() -> Account | None:
    """The account for PostgreSQL: None, the current user, unless that user is root.

    Raises DevStackError as root on a machine without an unprivileged account.
    """
    if os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwnam(_UNPRIVILEGED)
    except KeyError:
        raise DevStackError(
            "PostgreSQL does not run as root, and this machine has no user "
            f"{_UNPRIVILEGED!r} to run it as: run this command as an ordinary user"
        ) from None
    return Account(entry.pw_uid, entry.pw_gid)


def can_enter(account: Account | None, folder: Path) -> bool:
    """Whether `account` can reach `folder` and write in it.

    This tries to write and does not read mode bits, because access lists and mount
    options count as well.
    """
    return _succeeds(
        account, "/bin/sh", "-c", 'cd -- "$1" && test -w .', "sh", str(folder)
    )


def can_run(account: Account | None, program: Path) -> bool:
    """Whether `account` can execute `program` (tried with `--version`)."""
    return _succeeds(account, str(program), "--version")


def temporary_folder(account: Account | None, prefix: str) -> Path:
    """A new empty folder that belongs to `account` and that it can enter."""
    for parent in dict.fromkeys([tempfile.gettempdir(), "/tmp", "/var/tmp"]):
        try:
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        except OSError:
            continue
        give(account, folder)
        if account is None or can_enter(account, folder):
            return folder
        folder.rmdir()
    raise DevStackError(
        "no temporary folder that the account of PostgreSQL can enter: "
        "set TMPDIR to one that every user can"
    )


def shared_folder() -> Path:
    """A folder that every user can enter, for root: root's own folders are closed.

    Raises DevStackError when another user has taken the folder's name.
    """
    folder = Path("/var/tmp") / f"jobs-lib-{os.geteuid()}"
    folder.mkdir(mode=0o755, exist_ok=True)
    found = folder.lstat()
    # /var/tmp is open to all users: do not trust a folder that another one made there.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise DevStackError(f"{folder} belongs to another user: remove it")
    folder.chmod(0o755)  # the umask may have closed it
    return folder


def data_folder(account: Account | None, wanted: Path) -> Path:
    """The folder to keep a server's data in: `wanted`, if `account` can enter it.

    Otherwise it is a folder in :func:`shared_folder`, always the same one for the same
    `wanted`. This function changes the permissions of that folder only.
    """
    wanted.mkdir(parents=True, exist_ok=True)
    if account is None:
        return wanted
    name = hashlib.sha256(str(wanted.resolve()).encode()).hexdigest()[:16]
    if not (Path("/var/tmp") / f"jobs-lib-{os.geteuid()}" / "data" / name).exists():
        give(account, wanted)
        if can_enter(account, wanted):
            return wanted
    with contextlib.suppress(OSError):  # an empty folder is of no use
        wanted.rmdir()
    parent = shared_folder() / "data"
    parent.mkdir(exist_ok=True)
    parent.chmod(0o755)
    folder = parent / name
    folder.mkdir(mode=0o700, exist_ok=True)
    give(account, folder)
    return folder


def shared_copy(root: Path, parts: Sequence[str], name: str) -> Path:
    """A copy of `parts`, which are folders in `root`, that every user can enter.

    It is made once. `name` distinguishes versions. The copy has the layout of `root`.
    """
    key = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:8]
    copy = shared_folder() / f"{name}-{key}"
    if copy.exists():
        return copy
    draft = Path(tempfile.mkdtemp(prefix=f"{copy.name}.", dir=copy.parent))
    for part in parts:
        shutil.copytree(root / part, draft / part, symlinks=True)
    for path in (draft, *draft.rglob("*")):
        if not path.is_symlink():
            runs = path.is_dir() or path.stat().st_mode & stat.S_IXUSR
            path.chmod(0o755 if runs else 0o644)
    try:
        draft.rename(copy)
    except OSError:  # another process was faster, and its copy is as good
        shutil.rmtree(draft)
    return copy


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold a lock between processes. If this one dies, the kernel releases the lock."""
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def close(folder: Path) -> None:
    """Close a folder, even an existing one, to all users but its owner."""
    folder.chmod(0o700)


def write_secret(file: Path, text: str) -> None:
    """Write a file that no other user can read at any moment."""
    draft = file.with_name(f"{file.name}.new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, _NEW, 0o600), "w", encoding="utf-8") as output:
        output.write(f"{text}\n")
    draft.replace(file)


def give(account: Account | None, folder: Path) -> None:
    """Make `account` the owner of `folder`, but not of what is inside it."""
    if account is not None:
        os.chown(folder, account.uid, account.gid)


def _succeeds(account: Account | None, *argv: str) -> bool:
    try:
        tried = subprocess.run(
            argv,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
            **as_account(account),
        )
    except OSError:
        return False
    return tried.returncode == 0
