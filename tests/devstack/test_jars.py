"""The downloader, with a small repository on this machine."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from jobs_lib.devstack.jars import Jar, ensure_jars, kafka_jars, read_lock
from jobs_lib.devstack.kafka import KafkaBroker
from jobs_lib.devstack.ports import free_port
from jobs_lib.errors import DevStackError

CONTENT = {f"part{n}": f"content {n} ".encode() * 20_000 for n in range(5)}


def jar(name, content=None):
    content = CONTENT[name] if content is None else content
    return Jar("org.example", name, "1.0", hashlib.sha256(content).hexdigest())


@dataclass
class Repository:
    address: str
    #: The requests, each with its Range header.
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    #: The number of bytes after which each answer is cut.
    cut_after: int | None = None
    ranges: bool = True


@pytest.fixture
def repository(monkeypatch, tmp_path):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.split("/")[-3]
            wanted = self.headers["Range"]
            known.asked.append((name, wanted))
            content, status = CONTENT.get(name), 200
            if content is None:
                self.send_error(404)
                return
            if wanted and known.ranges:
                start = int(wanted.removeprefix("bytes=").rstrip("-"))
                if start >= len(content):
                    self.send_error(416)
                    return
                content, status = content[start:], 206
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: known.cut_after])

        def log_message(self, *arguments):
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        known = Repository(f"http://127.0.0.1:{server.server_port}/maven2/")
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        monkeypatch.setenv("JOBS_LIB_MAVEN_BASE_URL", known.address)
        monkeypatch.setenv("JOBS_LIB_CACHE_DIR", str(tmp_path / "cache"))
        yield known
        server.shutdown()
        thread.join()


def test_the_lock_file_pins_the_broker():
    jars = kafka_jars()
    assert ("org.apache.kafka", "kafka_2.13", "4.2.2") in {
        (jar.group, jar.artifact, jar.version) for jar in jars
    }
    assert len(jars) == len({(jar.group, jar.artifact) for jar in jars}) == 46
    assert any(jar.artifact == "slf4j-simple" for jar in jars)


@pytest.mark.parametrize("line", ["a:b:c", "a:b " + 64 * "0", "a:b:c 12", "a:b:c xy"])
def test_a_malformed_line_is_refused(line):
    with pytest.raises(DevStackError, match="line 2 "):
        read_lock(f"# comment\n{line}\n")


def test_jars_are_fetched_once(repository):
    steps = []
    wanted = [jar(name) for name in CONTENT]
    paths = ensure_jars(wanted, lambda there, total: steps.append((there, total)))
    assert [path.read_bytes() for path in paths] == list(CONTENT.values())
    assert steps == [(there, 5) for there in range(6)]
    assert len(repository.asked) == 5
    assert ensure_jars(wanted) == paths
    assert len(repository.asked) == 5


def test_a_corrupted_jar_is_fetched_again(repository):
    wanted = [jar("part1"), jar("part2")]
    damaged, _ = ensure_jars(wanted)
    damaged.write_bytes(b"damaged" + CONTENT["part1"])
    ensure_jars(wanted)
    assert damaged.read_bytes() == CONTENT["part1"]
    assert [name for name, _ in repository.asked].count("part2") == 1


def test_a_download_goes_on_where_it_stopped(repository):
    wanted, repository.cut_after = jar("part3"), 50_000
    (path,) = ensure_jars([wanted])
    assert path.read_bytes() == CONTENT["part3"]
    ranges = [asked for _, asked in repository.asked]
    assert ranges == [
        None if start == 0 else f"bytes={start}-"
        for start in range(0, len(CONTENT["part3"]), 50_000)
    ]


def test_a_download_begins_again_when_the_server_knows_no_ranges(repository):
    (path,) = ensure_jars([jar("part3")])
    path.rename(path.with_name(f"{path.name}.part"))
    path.with_name(f"{path.name}.part").write_bytes(b"the beginning of something else")
    repository.ranges = False
    ensure_jars([jar("part3")])
    assert path.read_bytes() == CONTENT["part3"]


def test_a_download_begins_again_when_its_beginning_was_wrong(repository):
    (path,) = ensure_jars([jar("part3")])
    part = path.with_name(f"{path.name}.part")
    path.unlink()
    for wrong in (b"wrong", b"wrong" * 100_000):
        part.write_bytes(wrong)
        ensure_jars([jar("part3")])
        assert path.read_bytes() == CONTENT["part3"]
        path.unlink()


def test_a_download_that_does_not_match_the_lock_file_is_never_stored(
    repository, tmp_path
):
    with pytest.raises(DevStackError, match="SHA-256") as told:
        ensure_jars([jar("part1", b"what was expected")])
    assert f"{repository.address}org/example/part1/1.0/part1-1.0.jar" in str(told.value)
    assert not list(tmp_path.rglob("*.jar*"))


def test_a_missing_jar_is_named_with_address_and_place(repository, tmp_path):
    with pytest.raises(DevStackError, match="HTTP 404") as told:
        ensure_jars([jar("absent", b"")])
    place = tmp_path / "cache/jars/org/example/absent/1.0/absent-1.0.jar"
    assert f"put it at {place}" in str(told.value)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(b"")  # a user has added it by hand
    assert ensure_jars([jar("absent", b"")]) == [place]


def test_the_first_start_without_a_network_names_the_jars_to_bring(
    monkeypatch, tmp_path
):
    base = f"http://127.0.0.1:{free_port()}/maven2"
    monkeypatch.setenv("JOBS_LIB_MAVEN_BASE_URL", base)
    monkeypatch.setenv("JOBS_LIB_CACHE_DIR", str(tmp_path / "cache"))
    broker = KafkaBroker.ephemeral()
    with pytest.raises(DevStackError, match=rf"from {base}/.*refused.*by hand"):
        broker.start()


ONE_OF_SEVERAL = """
import sys
from jobs_lib.devstack.jars import Jar, ensure_jars
ensure_jars([Jar("org.example", "part4", "1.0", sys.argv[1])])
"""


def test_several_processes_at_once_fetch_a_jar_once(repository):
    argv = [sys.executable, "-c", ONE_OF_SEVERAL, jar("part4").sha256]
    runs = [subprocess.Popen(argv, env=os.environ) for _ in range(3)]
    assert [run.wait(60) for run in runs] == [0, 0, 0]
    assert len(repository.asked) == 1
