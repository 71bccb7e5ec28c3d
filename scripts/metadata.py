"""Write the repository's address into the metadata of a release.

Where the repository lives is known when a release is built, not here: the variable
PROJECT_URL gives its address. The package index shows the README without the files
beside it, so its links become links to the files of this release.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

NAME = "PROJECT_URL"
LINK = re.compile(r"\]\((?![a-z][a-z0-9+.-]*:|#|//)([^)\s]+)\)")
FENCE = "```"


class AddressHook(MetadataHookInterface):
    """Adds the project's URLs, if the address is given."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the README and the URLs.

        Raises:
            ValueError: the given address is none.
        """
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        address = os.environ.get(NAME, "")
        if address:
            check(address)
            text = make_absolute(text, f"{address}/blob/{metadata['version']}")
            metadata["urls"] = urls(address)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def check(address: str) -> None:
    """Refuse an address that links cannot begin with."""
    if not re.fullmatch(r"https://[^\s/?#]+(/[^\s/?#]+)+", address):
        raise ValueError(
            f"{NAME}={address!r} is no address of a repository: give one such as "
            "https://example.org/team/jobs_lib, without a slash at its end"
        )


def urls(address: str) -> dict[str, str]:
    """The links that the package index shows beside the README."""
    return {
        "Source": address,
        "Documentation": f"{address}/blob/main/docs/README.md",
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def make_absolute(text: str, base: str) -> str:
    """Let all relative links outside code lead to files below ``base``."""
    lines, is_code = [], False
    for line in text.splitlines(keepends=True):
        is_code ^= line.startswith(FENCE)
        lines.append(line if is_code else LINK.sub(rf"]({base}/\1)", line))
    return "".join(lines)
