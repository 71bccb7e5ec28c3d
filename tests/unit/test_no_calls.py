"""What a consumer keeps is asked here: no read model asks its owner."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import jobs_lib.consuming

_CALLERS = {"http", "urllib", "requests", "httpx", "aiohttp", "socket", "grpc"}
MODULES = sorted(Path(jobs_lib.consuming.__file__).parent.glob("*.py"))


@pytest.mark.guarantee("W75")
@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_no_part_of_a_consumer_calls_another_service(module):
    imported = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert not imported & _CALLERS
