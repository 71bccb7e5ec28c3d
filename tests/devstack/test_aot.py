"""The broker starts from classes that a run before it has kept."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jobs_lib.devstack.aot import SINCE, use_cache
from jobs_lib.devstack.java import Java, find_java
from jobs_lib.devstack.kafka import SMALL_JVM, KafkaBroker
from jobs_lib.devstack.places import cache_folder
from jobs_lib.errors import DevStackError

JAVA = Java(Path("/nowhere/bin/java"), SINCE, "PATH")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of jars."""
    monkeypatch.setenv("JOBS_LIB_CACHE_DIR", str(tmp_path))
    folder = cache_folder() / "jars"
    folder.mkdir()
    return folder


def write(options: tuple[str, ...]) -> None:
    """Write the cache that Java is to write at the end of a run."""
    place = options[0].partition("=")[2]
    Path(place).write_text("classes")


def list_kept(folder: Path) -> list[Path]:
    """The caches in a folder, and what a try has left; not the locks."""
    return [one for one in folder.glob("aot-*") if one.suffix != ".lock"]


@pytest.fixture
def needs_cache():
    if find_java().version < SINCE:
        pytest.skip(f"Java {SINCE} writes a cache, and this one is older")


def test_a_broker_starts_from_the_cache(needs_cache):
    # In this mode Java refuses to start without a cache that fits.
    with KafkaBroker.ephemeral(jvm=(*SMALL_JVM, "-XX:AOTMode=on")) as broker:
        command = Path(f"/proc/{broker.pid}/cmdline").read_text().split("\0")
        (option,) = (one for one in command if one.startswith("-XX:AOTCache="))
        assert Path(option.partition("=")[2]).parent == cache_folder() / "jars"
        assert "[aot" not in broker.log_file.read_text()


@pytest.mark.parametrize("content", ["classes", ""])
def test_a_broker_starts_although_the_cache_does_not_fit(
    needs_cache, folder, monkeypatch, content
):
    monkeypatch.delenv("JOBS_LIB_CACHE_DIR")
    for jars in (cache_folder() / "jars").iterdir():
        if jars.is_dir():
            (folder / jars.name).symlink_to(jars)
    monkeypatch.setenv("JOBS_LIB_CACHE_DIR", str(folder.parent))
    use_cache(find_java(), write)
    (kept,) = list_kept(folder)
    kept.write_text(content)
    with KafkaBroker.ephemeral() as broker:
        assert kept.read_text() == content
        assert "aot" not in broker.log_file.read_text()


def test_an_older_java_keeps_nothing(folder):
    older = Java(JAVA.program, SINCE - 1, JAVA.source)
    assert use_cache(older, write) == ()
    assert [*folder.iterdir()] == []


@pytest.mark.parametrize("error", [OSError("disk full"), DevStackError("it hangs")])
def test_a_cache_that_cannot_be_made_is_done_without(folder, error):
    def fail(options):
        write(options)
        raise error

    assert use_cache(JAVA, fail) == ()
    assert list_kept(folder) == []
    # The next start tries again.
    assert use_cache(JAVA, write) != ()


def test_a_java_that_writes_no_cache_is_asked_once(folder):
    asked: list[tuple[str, ...]] = []
    first = use_cache(JAVA, asked.append)
    assert use_cache(JAVA, asked.append) == first
    assert len(asked) == 1


def test_a_folder_that_cannot_be_written_is_no_error(folder):
    folder.rmdir()
    folder.write_text("a file")
    assert use_cache(JAVA, write) == ()


def test_starts_at_the_same_time_make_the_cache_once(folder):
    made: list[tuple[str, ...]] = []
    begun, others = threading.Event(), 4

    def slowly(options):
        made.append(options)
        begun.set()
        threading.Event().wait(0.2)
        write(options)

    with ThreadPoolExecutor(others + 1) as pool:
        first = pool.submit(use_cache, JAVA, slowly)
        assert begun.wait(30)
        rest = [pool.submit(use_cache, JAVA, slowly) for _ in range(others)]
        (given,) = {one.result(60) for one in (first, *rest)}
    assert len(made) == 1
    (kept,) = list_kept(folder)
    assert given[0] == f"-XX:AOTCache={kept}"


def test_a_cache_belongs_to_one_release_of_java(folder, tmp_path):
    given = set()
    for release in ("25.0.1", "25.0.2"):
        home = tmp_path / release
        (home / "bin").mkdir(parents=True)
        (home / "release").write_text(f'JAVA_VERSION="{release}"')
        given.add(use_cache(Java(home / "bin" / "java", SINCE, "PATH"), write))
    assert len(given) == 2
