"""The check of links finds dead links, and nothing else."""

from __future__ import annotations

import pytest

from scripts.links import anchors, dead_links, markdown_files

PAGE = """# Title

[page](other.md) [heading](other.md#two-words--more) [here](#title) [again](#same-1)
[root](/other.md) [web](https://example.org/none) [mail](mailto:a@example.org)
[space](a%20b.txt) ![picture](a%20b.txt) [ref] [html](other.md#by-hand)

[ref]: other.md

## Same
## Same

```
[code](none.md)
```
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "other.md").write_text(
        '# Two `words` & more\n\n<a id="by-hand"></a>\n', encoding="utf-8"
    )
    (tmp_path / "a b.txt").touch()
    return tmp_path


def dead(project, text):
    page = project / "page.md"
    page.write_text(text, encoding="utf-8")
    return list(dead_links(page, project))


def test_links_that_lead_somewhere_are_left_alone(project):
    assert dead(project, PAGE) == []


@pytest.mark.parametrize(
    ("link", "told"),
    [
        ("none.md", "is not there"),
        ("folder/", "is not there"),
        ("other.md#none", "no such heading"),
        ("#none", "no such heading"),
        ("../", "leads out of the project"),
    ],
)
def test_a_dead_link_is_reported_with_its_line(project, link, told):
    [line] = dead(project, f"text\n\nmore [text]({link})\n")
    assert line.startswith(f"page.md:3: {link}")
    assert told in line


def test_headings_have_the_anchors_that_github_gives_them(project):
    page = project / "page.md"
    page.write_text("# A *b* `c_d`: e-f?\n## Über uns\n## A\n## A\n", encoding="utf-8")
    assert anchors(page) == {"a-b-c_d-e-f", "über-uns", "a", "a-1"}


def test_pages_in_installed_and_built_folders_are_not_checked(project):
    for folder in (".venv", "build", "node_modules"):
        (project / folder).mkdir()
        (project / folder / "page.md").touch()
    assert list(markdown_files(project)) == [project / "other.md"]
