"""A tablespace on a small disk, which a test can fill."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import psycopg


class SmallDisk:
    """The tablespace ``small`` of a server, on a disk of 32 MiB.

    Making it skips the test where nobody may mount a disk.

    Args:
        admin: in autocommit mode, as a superuser.
    """

    def __init__(self, admin: psycopg.Connection[Any]) -> None:
        self._admin = admin
        self._folder = Path(tempfile.mkdtemp())
        self._ballast = self._folder / "ballast"
        mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(self._folder)]
        if os.geteuid() or subprocess.run(mount, check=False).returncode:
            self._folder.rmdir()
            pytest.skip("a small disk needs root")
        (data,) = admin.execute("show data_directory").fetchall()[0]
        space = self._folder / "space"
        space.mkdir(mode=0o700)
        os.chown(space, Path(data).stat().st_uid, Path(data).stat().st_gid)
        self._folder.chmod(0o755)
        admin.execute(f"create tablespace small location '{space}'")

    def fill(self) -> None:
        """Leave no room on it."""
        with (
            contextlib.suppress(OSError),
            self._ballast.open("wb", buffering=0) as ballast,
        ):
            while True:
                ballast.write(b"x" * 4_096)

    def empty(self) -> None:
        """Make room again."""
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove it; no table may lie on it any more."""
        self._admin.execute("drop tablespace small")
        subprocess.run(["umount", str(self._folder)], check=True)
        self._folder.rmdir()
