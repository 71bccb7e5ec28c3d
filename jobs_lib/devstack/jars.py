"""The broker's jars: named by a lock file, downloaded once, verified at every start.

The cache has the layout of a Maven repository, so that you can add a jar by hand.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

from jobs_lib.devstack.places import cache_folder, locked
from jobs_lib.errors import DevStackError

if TYPE_CHECKING:
    from pathlib import Path

#: Where jars come from unless JOBS_LIB_MAVEN_BASE_URL says otherwise.
DEFAULT_BASE_URL = "https://repo.maven.apache.org/maven2"
BASE_URL_VARIABLE = "JOBS_LIB_MAVEN_BASE_URL"
LOCK_FILE = "kafka.lock"

_THREADS = 8
_TRIES = 3
_TIMEOUT_SECONDS = 30
_CHUNK_BYTES = 1 << 16

#: Called as (jars present, all jars) while jars are fetched.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Jar:
    """One line of the lock file."""

    group: str
    artifact: str
    version: str
    sha256: str

    @property
    def path(self) -> str:
        """Its path in a Maven repository, which is also its path in the cache."""
        file = f"{self.artifact}-{self.version}.jar"
        return f"{self.group.replace('.', '/')}/{self.artifact}/{self.version}/{file}"

    @property
    def file(self) -> str:
        """Its name without folders."""
        return self.path.rpartition("/")[2]


class _RefusedError(Exception):
    """This attempt failed; the message says why."""


def read_lock(text: str) -> list[Jar]:
    """The jars that a lock file names. Raises DevStackError for a malformed line."""
    jars = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            coordinates, sha256 = line.split()
            group, artifact, version = coordinates.split(":")
            if len(bytes.fromhex(sha256)) != hashlib.sha256().digest_size:
                raise ValueError
        except ValueError:
            raise DevStackError(
                f"line {number} of the lock file is not "
                f"'group:artifact:version sha256': {line!r}"
            ) from None
        jars.append(Jar(group, artifact, version, sha256.lower()))
    return jars


def kafka_jars() -> list[Jar]:
    """The jars of the Kafka broker."""
    return read_lock(_lock_text())


def lock_digest() -> str:
    """A name for exactly this set of jars, in hexadecimal."""
    return hashlib.sha256(_lock_text().encode()).hexdigest()


def _lock_text() -> str:
    return files("jobs_lib.devstack").joinpath(LOCK_FILE).read_text(encoding="utf-8")


def ensure_jars(jars: list[Jar], progress: Progress | None = None) -> list[Path]:
    """The files of the jars, verified; missing or damaged ones are fetched.

    Several processes may call this at once: one downloads, the others wait for it.
    If anything has to be fetched, `progress` is called, from this thread only. Raises
    DevStackError that names the file, its address and its place in the cache.
    """
    folder = cache_folder() / "jars"
    if _wanting(jars, folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder / ".lock"):
                _fetch_all(_wanting(jars, folder), len(jars), folder, progress)
        except OSError as error:
            raise DevStackError(
                f"the jars of Kafka cannot be stored: {error} "
                "(JOBS_LIB_CACHE_DIR chooses another folder)"
            ) from error
    return [folder / jar.path for jar in jars]


def _wanting(jars: list[Jar], folder: Path) -> list[Jar]:
    # Hashing releases the interpreter's lock, so threads make it faster.
    with ThreadPoolExecutor(_THREADS) as pool:
        sums = pool.map(_sha256, (folder / jar.path for jar in jars))
        return [
            jar for jar, found in zip(jars, sums, strict=True) if found != jar.sha256
        ]


def _fetch_all(
    wanting: list[Jar], total: int, folder: Path, progress: Progress | None
) -> None:
    base = os.environ.get(BASE_URL_VARIABLE) or DEFAULT_BASE_URL
    there = total - len(wanting)
    if progress and wanting:
        progress(there, total)
    pool = ThreadPoolExecutor(_THREADS)
    try:
        for _ in pool.map(lambda jar: _fetch(jar, base.rstrip("/"), folder), wanting):
            there += 1
            if progress:
                progress(there, total)
    finally:
        pool.shutdown(cancel_futures=True)


def _fetch(jar: Jar, base: str, folder: Path) -> None:
    url, target = f"{base}/{jar.path}", folder / jar.path
    part = target.with_name(f"{target.name}.part")
    target.parent.mkdir(parents=True, exist_ok=True)
    reason, tries = "", 0
    while tries < _TRIES:
        tries, before = tries + 1, _size(part)
        try:
            _download(url, part)
        except _RefusedError as error:
            reason = str(error)
            if _size(part) > before:  # a poor network is slow, but it makes progress
                tries = 0
            continue
        if (found := _sha256(part)) == jar.sha256:
            part.replace(target)
            return
        # The part may have begun with bytes of another file: fetch it from the start.
        part.unlink()
        reason = f"what came has SHA-256 {found}, expected {jar.sha256}"
    raise DevStackError(
        f"{jar.file} could not be fetched from {url}: {reason}. Try again with a "
        f"network, or set {BASE_URL_VARIABLE} to a mirror, or bring the file by hand: "
        f"put it at {target}"
    )


def _download(url: str, part: Path) -> None:
    """Fetch `url` into `part`; continue where an earlier download stopped."""
    have = _size(part)
    headers = {"User-Agent": "jobs-lib"}
    if have:
        headers["Range"] = f"bytes={have}-"
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
            continued = have and response.status == http.HTTPStatus.PARTIAL_CONTENT
            with part.open("ab" if continued else "wb") as output:
                shutil.copyfileobj(response, output, _CHUNK_BYTES)
            if response.length:  # bytes that were announced and did not arrive
                raise _RefusedError(
                    f"the connection was lost, {response.length} bytes short"
                )
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # nothing is left to fetch: the sum shows whether the file is right
        raise _RefusedError(f"HTTP {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise _RefusedError(str(error.reason)) from error
    except (http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise _RefusedError(f"the connection was lost ({error!r})") from error


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _sha256(file: Path) -> str | None:
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except FileNotFoundError:
        return None
