"""Keep the broker's classes loaded and linked, so that its JVM starts in half the time.

Java 25 writes such a cache when a run ends, and maps it in later runs (JEP 483 and 514,
"ahead-of-time" cache). It passes over a cache that does not fit it, and then starts as
it would without one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from typing import TYPE_CHECKING

from jobs_lib.devstack.jars import lock_digest
from jobs_lib.devstack.places import cache_folder, locked
from jobs_lib.errors import DevStackError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from jobs_lib.devstack.java import Java

SINCE = 25
"""The first Java that writes a cache at the end of a run."""
# Otherwise Java tells in the broker's log what does not fit.
_QUIET = "-Xlog:aot*=off"


def use_cache(java: Java, run: Callable[[tuple[str, ...]], object]) -> tuple[str, ...]:
    """Give the options of a JVM that starts from the cache; none where there is none.

    The first call on a machine makes the cache, and others wait for it. It belongs to
    one release of Java, and to one set of jars where they are now.

    Args:
        java: runs the broker.
        run: starts a broker with these options in addition, and stops it in order.
    """
    if java.version < SINCE:
        return ()
    folder = cache_folder() / "jars"
    kept = folder / f"aot-{_identify(java, folder)}"
    lock = kept.with_name(f"{kept.name}.lock")
    if not kept.exists():
        # The broker starts without it, too: on a full disk, or where a machine is so
        # busy that this takes too long.
        with contextlib.suppress(OSError, DevStackError), locked(lock):
            if not kept.exists():
                _make(kept, run)
    return (f"-XX:AOTCache={kept}", _QUIET) if kept.exists() else ()


def _make(kept: Path, run: Callable[[tuple[str, ...]], object]) -> None:
    draft = kept.with_name(f"{kept.name}.{os.getpid()}")
    try:
        run((f"-XX:AOTCacheOutput={draft}", _QUIET))
        # An agent in JAVA_TOOL_OPTIONS, say, may keep Java from writing one. Then it
        # passes over an empty one, and the next start does not try again.
        draft.touch()
        draft.replace(kept)
    finally:
        # Java keeps what it has recorded here until the cache is written.
        for left in (draft, draft.with_name(f"{draft.name}.config")):
            left.unlink(missing_ok=True)


def _identify(java: Java, folder: Path) -> str:
    release = java.program.parent.parent / "release"
    which = release.read_bytes() if release.exists() else os.fsencode(java.program)
    parts = (which, lock_digest().encode(), os.fsencode(folder))
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
