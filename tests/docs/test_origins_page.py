"""A page explains origins and the home topic before it uses the words."""

from __future__ import annotations

import importlib
import re
import sys

import pytest

from jobs_lib.testing import Jobs, make_record
from tests.support.pages import ROOT, read_blocks, write_modules

PAGE = "docs/origins.md"
GENERATED = {"settings.md", "guarantees.md"}
"""Pages made from the sentences of other files."""
FIGURES = {"measured.md", "example.md"}
"""Pages that are not for users."""
PAGES = sorted(
    path.name
    for path in (ROOT / "docs").glob("*.md")
    if path.name not in {"origins.md", "README.md"} | GENERATED | FIGURES
)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_that_says_origin_or_home_topic_links_to_their_page_first(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    # Output and code show the words as they are, and headings take no links.
    prose = re.sub(r"```.*?```|`[^`\n]*`|^#.*?$", "", text, flags=re.DOTALL | re.M)
    for word in (r"\borigins?\b", r"\bhome topic\b"):
        used = re.search(word, prose, re.IGNORECASE)
        linked = re.search(r"\]\(origins\.md", prose)
        if used:
            assert linked, f"{page} uses {used[0]!r} and never links to origins.md"
            paragraph = prose[: used.start()].count("\n\n")
            assert prose[: linked.start()].count("\n\n") <= paragraph, (
                f"{page} uses {used[0]!r} before it links to origins.md"
            )


def test_the_index_has_the_page_before_all_pages_that_use_the_words():
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    linked = re.findall(r"^\| \[(\w+\.md)\]", index, re.MULTILINE)
    assert linked[:2] == ["tutorial.md", "origins.md"]
    tutorial = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    assert "origin" not in tutorial


def test_the_service_of_the_page_gives_jobs_of_a_customer_one_place(
    tmp_path, database_url, monkeypatch
):
    assert write_modules(PAGE, tmp_path) == ["shop.py"]
    monkeypatch.syspath_prepend(tmp_path)
    try:
        shop = importlib.import_module("shop")
    finally:
        sys.modules.pop("shop", None)
    assert (shop.app.home, len(read_blocks(PAGE, "python"))) == ("checkouts", 1)
    with Jobs(shop.app, database_url) as jobs:
        for order in range(3):
            record = make_record({"customer": "ada", "order": order}, partition=order)
            jobs.handle(shop.place_order, record)
        with jobs.transaction() as conn:
            places = conn.execute(
                "select distinct origin from jobs_lib.jobs"
            ).fetchall()
    # The origin is that of the group, and not of the record's partition.
    assert len(places) == 1
