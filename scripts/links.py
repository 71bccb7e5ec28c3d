"""Find dead relative links and anchors in the project's Markdown files.

Addresses on the web are not checked: a foreign page that is down must not stop the
tests.
"""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from markdown_it import MarkdownIt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from markdown_it.token import Token

ROOT = Path(__file__).parents[1]
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//")
HTML_ANCHOR = re.compile(r"<[^>]+\b(?:id|name)=\"([^\"]+)\"")
FOLDERS_OF_OTHERS = {"build", "dist", "node_modules", "site-packages"}

_parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])


def main() -> int:
    """Print each dead link; return 1 if there is one."""
    pages = sorted(markdown_files(ROOT))
    dead = [line for page in pages for line in dead_links(page, ROOT)]
    for line in dead:
        print(line, file=sys.stderr)
    print(f"{len(pages)} Markdown files, {len(dead)} dead links")
    return 1 if dead else 0


def markdown_files(root: Path) -> Iterator[Path]:
    """The project's own Markdown files, without those in hidden folders."""
    for path in root.rglob("*.md"):
        folders = path.relative_to(root).parts[:-1]
        hidden = any(folder.startswith(".") for folder in folders)
        if not hidden and not FOLDERS_OF_OTHERS.intersection(folders):
            yield path


def dead_links(page: Path, root: Path) -> Iterator[str]:
    """A message for each link of the page that leads nowhere."""
    for line, link in links(page):
        if ELSEWHERE.match(link):
            continue
        where, _, anchor = unquote(link).partition("#")
        base = root if where.startswith("/") else page.parent
        target = (base / where.lstrip("/")).resolve() if where else page
        place = f"{page.relative_to(root)}:{line}"
        if not target.is_relative_to(root.resolve()):
            yield f"{place}: {link} leads out of the project"
        elif not target.exists():
            yield f"{place}: {link} is not there"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{place}: {link}: that page has no such heading"


def links(page: Path) -> Iterator[tuple[int, str]]:
    """The targets of a page's links and pictures, each after its line."""
    for block in _parse(page):
        line = block.map[0] + 1 if block.map else 0
        for token in block.children or ():
            for name in ("href", "src"):
                if link := token.attrGet(name):
                    yield line, str(link)


def anchors(page: Path) -> set[str]:
    """The anchors of a page: headings as GitHub names them, and HTML ids."""
    found = set(HTML_ANCHOR.findall(page.read_text(encoding="utf-8")))
    tokens = _parse(page)
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open":
            name, number = slug(inline), 0
            while (numbered := f"{name}-{number}" if number else name) in found:
                number += 1
            found.add(numbered)
    return found


def slug(heading: Token) -> str:
    """A heading's anchor, as GitHub makes it from the text."""
    text = "".join(
        token.content
        for token in heading.children or ()
        if token.type in {"text", "code_inline"}
    )
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def _parse(page: Path) -> list[Token]:
    return _parser.parse(page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
