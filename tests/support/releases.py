"""A next release: these migrations, and some more of them."""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING

from jobs_lib.postgres import revisions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_REVISION = '''
from alembic import op

revision = "{revision}"
down_revision = "{before}"

def upgrade():
    op.execute("""{statement}""")
'''


class NextRelease:
    """The migrations of this release, and then one more for each statement."""

    def __init__(self, folder: Path, statements: Sequence[str]) -> None:
        self.path = folder / "migrations"
        shutil.copytree(revisions.migrations_path(), self.path)
        self.version = before = revisions.known_versions()[-1]
        for statement in statements:
            self.version = f"{int(before[:4]) + 1:04}_next"
            source = _REVISION.format(
                revision=self.version, before=before, statement=statement
            )
            (self.path / "versions" / f"{self.version}.py").write_text(source)
            before = self.version

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Meanwhile this process has the migrations of that release."""
        before = revisions.migrations_path
        revisions.migrations_path = lambda: self.path
        try:
            yield
        finally:
            revisions.migrations_path = before
