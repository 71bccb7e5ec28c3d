"""The wheel holds all that a service needs, and claims only its own names."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_migrations_are_inside_the_wheel(tmp_path, postgres_server):
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "-w",
            tmp_path,
            ".",
        ],
        cwd=ROOT,
        env={**os.environ, "PROJECT_URL": "https://example.org/team/jobs_lib"},
        check=True,
    )
    (wheel,) = tmp_path.glob("jobs_lib-*.whl")
    installed = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    tops = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert tops == {"jobs_lib", "spark_bridge"}
    assert (installed / "jobs_lib" / "py.typed").is_file()
    assert (installed / "jobs_lib" / "devstack" / "kafka.lock").is_file()
    (declared,) = installed.glob("jobs_lib-*.dist-info/entry_points.txt")
    assert "[pytest11]\njobs_lib = jobs_lib.testing.plugin" in declared.read_text()
    (described,) = installed.glob("jobs_lib-*.dist-info/METADATA")
    metadata = described.read_text()
    assert "Project-URL: Source, https://example.org/team/jobs_lib\n" in metadata
    assert "](docs/" not in metadata
    name = f"wheel_{uuid4().hex[:12]}"
    with psycopg.connect(postgres_server.url, autocommit=True) as admin:
        admin.execute(f"create database {name}")
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                (
                    f"import sys; sys.path.insert(0, {str(installed)!r})\n"
                    "from jobs_lib.postgres import migrate\n"
                    f"assert migrate.__file__.startswith({str(installed)!r})\n"
                    f"print(migrate.migrate({postgres_server.url_of(name)!r}))"
                ),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        admin.execute(f"drop database {name} with (force)")
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.strip()
        == sorted(path.stem for path in (ROOT / "migrations/versions").glob("0*.py"))[
            -1
        ]
    )
