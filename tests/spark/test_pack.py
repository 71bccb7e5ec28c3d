"""The packed library is whole, and only a fitting one is sent."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from jobs_lib.cli.pack import pack as command
from jobs_lib.errors import ReexportError
from spark_bridge import pack
from tests.support.pages import ROOT

BARE = Path(sys.base_prefix, "bin", "python3")
"""The Python below the virtual environment, which has no packages of ours."""


def make(path, name, content):
    with tarfile.open(path, "w:gz") as archive:
        about = tarfile.TarInfo(name)
        about.size = len(content)
        archive.addfile(about, io.BytesIO(content))
    return str(path)


@pytest.mark.slow
@pytest.mark.guarantee("X13")
def test_a_python_without_packages_has_all_that_tasks_need(tmp_path, database):
    packed = tmp_path / "it's packed.tar.gz"
    size = pack.pack(packed)
    assert size == packed.stat().st_size < 200e6
    assert not [*tmp_path.glob("*.part")]
    folder = tmp_path / "unpacked"
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    text = (
        "from spark_bridge import loader, partitioner, workers\n"
        "from jobs_lib.reexport import load_range\n"
        "import sys, numpy, pyarrow\n"
        "loader.Target(sys.argv[1], 'jobs_lib').database().connect('t').close()\n"
        "print(loader.__file__)"
    )
    done = subprocess.run(
        [BARE, "-c", text, database.url],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"},
        cwd=tmp_path,  # Python also imports from where it starts
    )
    assert done.stdout.strip() == str(folder / "spark_bridge" / "loader.py"), done
    settings = pack.add_packed({pack.ARCHIVES: "a.zip", pack.PATH: "mine"}, str(packed))
    assert settings == {
        pack.ARCHIVES: f"a.zip,{packed.as_uri()}#jobs_lib_packed",
        pack.PATH: "jobs_lib_packed:mine",
    }


@pytest.mark.guarantee("X13")
def test_two_that_pack_the_same_file_at_once_both_write_it_whole(tmp_path, monkeypatch):
    path, describe = tmp_path / "packed.tar.gz", pack._describe_here
    monkeypatch.setattr(pack, "_find_files", lambda: iter([("a", Path(__file__))]))

    def pack_meanwhile():
        # The outer one has opened its file.
        monkeypatch.setattr(pack, "_describe_here", describe)
        pack.pack(path)
        return describe()

    monkeypatch.setattr(pack, "_describe_here", pack_meanwhile)
    pack.pack(path)
    with tarfile.open(path) as archive:
        assert archive.getnames()[1:] == ["a"]
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.guarantee("X13")
def test_the_files_are_those_that_tasks_need_and_no_others():
    files = dict(pack._find_files())
    for name in (
        *("jobs_lib/version.py", "jobs_lib/sql/claim.sql", "spark_bridge/loader.py"),
        *("numpy/__init__.py", "pyarrow/__init__.py", "psycopg/__init__.py"),
        # What is needed by what we need, and what psycopg takes if it is there.
        *("typing_extensions.py", "psycopg_binary/__init__.py"),
        # The states of DataFrames need these, too.
        *("pandas/__init__.py", "dateutil/__init__.py", "fastavro/__init__.py"),
    ):
        assert name in files, name
    assert [name for name in files if name.endswith(".so")]
    for name, file in files.items():
        parts = name.split("/")
        assert not {"__pycache__", "tests", "include", ".."} & {*parts}, name
        assert not name.startswith("/"), name
        assert file.is_file(), name
    # Spark brings its own, and the tests of a service are nobody's business.
    packages = {name.split("/")[0] for name in files}
    assert not packages & {"pyspark", "pytest", "tests", "bin"}
    # Ours are taken from their folders alone, although a wheel lists them, too.
    ours = [name for name in files if name.startswith(("jobs_lib/", "spark_bridge/"))]
    root = Path(pack.__file__).parents[1]
    assert {files[name] for name in ours} == {root / name for name in ours}


@pytest.mark.guarantee("X13")
def test_modules_of_the_application_are_packed_if_they_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(pack, "_find_files", lambda: [])
    monkeypatch.chdir(tmp_path)
    for name in ("shopmod.py", "store/__init__.py", "store/states/planes.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    options = ["--module", "shopmod", "--module", "store.states"]
    done = CliRunner().invoke(command, ["a.tar.gz", *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    with tarfile.open(tmp_path / "a.tar.gz") as archive:
        assert archive.getnames()[1:] == [
            *("shopmod.py", "store/__init__.py", "store/states/planes.py")
        ]
    for name in ("absentmod", "sys", "..shopmod", ""):
        with pytest.raises(ReexportError, match=f"no module '{name}' here"):
            pack.pack(tmp_path / "b.tar.gz", [name])
    assert not [*tmp_path.glob("b.*")]


def test_caches_and_tests_of_ours_stay_here(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(pack, "_OURS", ("ours",))
    for name in ("__init__.py", "sql/a.sql", "__pycache__/a.pyc", "tests/test_a.py"):
        file = tmp_path / "ours" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    ours = [name for name, _ in pack._find_files() if name.startswith("ours/")]
    assert sorted(ours) == ["ours/__init__.py", "ours/sql/a.sql"]


@pytest.mark.guarantee("X13")
def test_the_file_says_first_who_has_packed_it(tmp_path, monkeypatch):
    monkeypatch.setattr(pack, "_find_files", lambda: [("a/b.py", Path(__file__))])
    packed = tmp_path / "a.tar.gz"
    pack.pack(packed)
    with tarfile.open(packed) as archive:
        assert archive.getnames() == ["jobs_lib_packed.json", "a/b.py"]
        opened = archive.extractfile("a/b.py")
        assert opened is not None
        assert opened.read() == Path(__file__).read_bytes()
    assert pack.PATH in pack.add_packed({}, str(packed))


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        (b'{"python": "3.7", "machine": "m", "jobs_lib": "0"}', "packed by Python 3.7"),
        (b"{}", "packed by Python None"),
        (b"[", "was not made by"),
        (b"[]", "was not made by"),
    ],
)
def test_a_file_of_another_python_or_of_nobody_is_refused(tmp_path, facts, told):
    path = make(tmp_path / "a.tar.gz", "jobs_lib_packed.json", facts)
    with pytest.raises(ReexportError, match=told):
        pack.add_packed({}, path)


@pytest.mark.parametrize("fact", ["python", "machine", "jobs_lib"])
def test_a_file_that_differs_in_one_fact_is_refused(tmp_path, fact):
    facts = pack._describe_here() | {fact: "another"}
    path = make(
        tmp_path / "a.tar.gz", "jobs_lib_packed.json", json.dumps(facts).encode()
    )
    with pytest.raises(ReexportError, match="pack it again"):
        pack.add_packed({}, path)


def test_a_file_that_is_no_packed_library_is_refused(tmp_path):
    other = make(tmp_path / "other.tar.gz", "readme", b"{}")
    text = tmp_path / "text.tar.gz"
    text.write_bytes(b"\x1f\x8b no archive")
    for path, told in (
        (other, "was not made by"),
        (str(text), "was not made by"),
        (str(tmp_path), "was not made by"),
        (str(tmp_path / "none.tar.gz"), "there is no file"),
    ):
        with pytest.raises(ReexportError, match=told):
            pack.add_packed({}, path)


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    def run(path):
        CliRunner().invoke(command, [path], catch_exceptions=False)

    with pytest.raises(ReexportError, match=r"by \.tar\.gz, not 'a\.zip'"):
        run(str(tmp_path / "a.zip"))
    with pytest.raises(ReexportError, match="cannot be written: No such file"):
        run(str(tmp_path / "none" / "a.tar.gz"))


def test_a_file_that_is_written_in_part_does_not_stay(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    monkeypatch.setattr(pack, "_find_files", lambda: [("gone", gone)])
    with pytest.raises(ReexportError, match="cannot be written: No such file"):
        pack.pack(tmp_path / "a.tar.gz")
    assert not [*tmp_path.iterdir()]


def test_a_package_that_is_missing_here_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(pack, "_NEEDED", ("absent-package",))
    with pytest.raises(ReexportError, match="absent-package"):
        pack.pack(tmp_path / "a.tar.gz")
    assert not [*tmp_path.iterdir()]


def test_all_that_the_extra_installs_is_packed():
    with (ROOT / "pyproject.toml").open("rb") as opened:
        extras = tomllib.load(opened)["project"]["optional-dependencies"]
    assert "jobs-lib[postgres]" in extras["spark"]
    wanted = {
        re.split(r"[\[<>=]", one)[0] for one in (*extras["postgres"], *extras["spark"])
    }
    assert set(pack._NEEDED) == wanted - {"pyspark"}
