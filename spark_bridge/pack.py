"""Pack what a worker needs besides Python into one file that Spark sends along.

The packages have compiled parts, which cannot be imported from a zip file. So Spark
unpacks the file on each worker, and the worker's Python finds them by its path.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
import platform
import re
import sys
import tarfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs_lib.errors import ReexportError
from jobs_lib.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

FOLDER = "jobs_lib_packed"
"""Where Spark unpacks the file, in a worker's own folder."""
ARCHIVES, PATH = "spark.archives", "spark.executorEnv.PYTHONPATH"
_FACTS = "jobs_lib_packed.json"
_OURS = ("jobs_lib", "spark_bridge")
_OF_THE_DATABASE = ("alembic", "psycopg", "psycopg-pool", "sqlalchemy")
_NEEDED = ("jobs-lib", *_OF_THE_DATABASE, "numpy", "pandas", "pyarrow")
"""What `jobs-lib[spark]` installs, but for Spark itself: the cluster has that."""
_IF_THERE = ("fastavro", "psycopg-binary", "psycopg-c")
_LEFT_OUT = {"__pycache__", "tests", "include"}
_NAME = re.compile(r"[\w.-]+")
_COMPRESSION = 3
"""Higher levels take much longer for a few per cent."""


def pack(path: Path, modules: Iterable[str] = ()) -> int:
    """Pack the library, and the packages that it needs, as they are installed here.

    Args:
        path: of the file.
        modules: of the application, whose types a DataFrame's states are checked by.

    Returns the size of the file in bytes.

    Raises:
        ReexportError: a package or module is missing here, or the file cannot be
            written.
    """
    if not path.name.endswith((".tar.gz", ".tgz")):
        raise ReexportError(f"Spark knows a packed file by .tar.gz, not {path.name!r}")
    files = dict(_find_files())
    for module in modules:
        files |= dict(_find_module(module))
    # Renamed into place: a file that is written in part must not be sent, and another
    # process may pack the same one.
    written = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with tarfile.open(written, "w:gz", compresslevel=_COMPRESSION) as archive:
            facts = json.dumps(_describe_here()).encode()
            about = tarfile.TarInfo(_FACTS)
            about.size = len(facts)
            archive.addfile(about, io.BytesIO(facts))
            for name in sorted(files):
                archive.add(files[name], name, recursive=False)
        written.replace(path)
        return path.stat().st_size
    except OSError as error:
        raise ReexportError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        written.unlink(missing_ok=True)


def add_packed(settings: Mapping[str, str], path: str) -> dict[str, str]:
    """Return the settings with those that send a packed file to the workers.

    Raises:
        ReexportError: it is none, or was packed by another Python or release.
    """
    here, there = _describe_here(), _read_facts(path)
    if here != there:
        raise ReexportError(
            f"{path} was packed by {_tell(there)}, and this is {_tell(here)}: pack it "
            "again, by `jobs-lib reexport pack`"
        )
    archive = f"{Path(path).absolute().as_uri()}#{FOLDER}"
    return {
        **settings,
        ARCHIVES: ",".join(filter(None, (settings.get(ARCHIVES), archive))),
        PATH: ":".join(filter(None, (FOLDER, settings.get(PATH)))),
    }


def _describe_here() -> dict[str, str]:
    return {
        "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "machine": f"{platform.system()} {platform.machine()}",
        "jobs_lib": __version__,
    }


def _read_facts(path: str) -> dict[str, Any]:
    try:
        with tarfile.open(path) as archive:
            first = archive.next()
            opened = archive.extractfile(first) if first else None
            if first is not None and first.name == _FACTS and opened is not None:
                found = json.load(opened)
                if isinstance(found, dict):
                    return found
    except FileNotFoundError:
        raise ReexportError(
            f"there is no file {path}: `jobs-lib reexport pack {path}` makes it"
        ) from None
    except (OSError, tarfile.TarError, ValueError, EOFError):
        pass
    raise ReexportError(f"{path} was not made by `jobs-lib reexport pack`")


def _tell(facts: Mapping[str, Any]) -> str:
    return (
        f"Python {facts.get('python')} on {facts.get('machine')} with jobs_lib "
        f"{facts.get('jobs_lib')}"
    )


def _find_files() -> Iterator[tuple[str, Path]]:
    """Yield the name of each file in the archive, and where it lies here."""
    # Our own by their folders: one that is installed as editable lists no files.
    for package in _OURS:
        yield from _find_module(package)
    for distribution in _find_distributions():
        for listed in distribution.files or ():
            inside = listed.parts[0] not in ("..", "/", *_OURS)
            file = Path(str(listed.locate()))
            if inside and not _LEFT_OUT & set(listed.parts[:-1]) and file.is_file():
                yield listed.as_posix(), file


def _find_module(name: str) -> Iterator[tuple[str, Path]]:
    """Yield the files of a module, or of the whole package that it lies in."""
    # As for the app itself, the working folder counts.
    if "" not in sys.path:
        sys.path.insert(0, "")
    whole = name.partition(".")[0]
    spec = importlib.util.find_spec(whole) if whole.isidentifier() else None
    folders = None if spec is None else spec.submodule_search_locations
    if spec is None or (folders is None and not spec.has_location):
        raise ReexportError(
            f"there is no module {name!r} here that could be packed: name one that "
            "Python imports from a file, as in shop.states"
        )
    if folders is None:
        file = Path(str(spec.origin))
        yield file.name, file
    for folder in map(Path, folders or ()):
        for file in folder.rglob("*"):
            inside = file.relative_to(folder.parent)
            if file.is_file() and not _LEFT_OUT & set(inside.parts[:-1]):
                yield inside.as_posix(), file


def _find_distributions() -> Iterator[importlib.metadata.Distribution]:
    """Yield what is installed here and needed there, each once."""
    seen: set[str] = set()
    waiting = [*_NEEDED, *_IF_THERE]
    while waiting:
        name = waiting.pop()
        if (key := re.sub("[-_.]+", "-", name).lower()) in seen:
            continue
        seen.add(key)
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            if name in _NEEDED:
                raise ReexportError(
                    f"the package {name!r} is not installed here, so it cannot be "
                    "packed: pip install 'jobs-lib[spark]'"
                ) from None
            continue  # an optional one, or one of another platform
        yield found
        for requirement in found.requires or ():
            named, _, marker = requirement.partition(";")
            # What another platform needs is not installed, so it is left out.
            if "extra" not in marker and (name_ := _NAME.match(named)):
                waiting.append(name_[0])
