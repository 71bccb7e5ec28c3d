"""A release names its repository, and its README links to files there."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.links import ELSEWHERE, links
from scripts.metadata import NAME, AddressHook, make_absolute

ROOT = Path(__file__).parents[2]
ADDRESS = "https://example.org/team/jobs_lib"


@pytest.fixture
def metadata():
    """The metadata before the hook."""
    return {"name": "jobs-lib", "version": "1.2.3"}


@pytest.fixture
def hook():
    """The hook, as the build calls it."""
    return AddressHook(str(ROOT), {})


def test_a_release_has_urls_and_a_readme_without_relative_links(
    hook, metadata, monkeypatch, tmp_path
):
    monkeypatch.setenv(NAME, ADDRESS)
    hook.update(metadata)
    assert metadata["urls"]["Source"] == ADDRESS
    assert metadata["urls"]["Issues"] == f"{ADDRESS}/issues"
    text = metadata["readme"]["text"]
    assert f"]({ADDRESS}/blob/1.2.3/docs/outbox.md)" in text
    page = tmp_path / "README.md"
    page.write_text(text)
    relative = [link for _, link in links(page) if not ELSEWHERE.match(link)]
    assert not relative
    # The same links as before, and nothing else.
    assert text.replace(f"{ADDRESS}/blob/1.2.3/", "") == (ROOT / "README.md").read_text(
        encoding="utf-8"
    )


def test_without_an_address_the_readme_stays_as_it_is(hook, metadata, monkeypatch):
    monkeypatch.delenv(NAME, raising=False)
    hook.update(metadata)
    assert "urls" not in metadata
    assert metadata["readme"]["text"] == (ROOT / "README.md").read_text("utf-8")


def test_code_and_links_to_the_web_stay_as_they_are():
    text = "```\nf[x](y)\n```\n[a](https://a.org/b) [c](#d) [e](f/g.md#h)\n"
    assert make_absolute(text, "https://x.org/y") == (
        "```\nf[x](y)\n```\n[a](https://a.org/b) [c](#d) [e](https://x.org/y/f/g.md#h)\n"
    )


@pytest.mark.parametrize(
    "address", ["nothing", "http://x.org/a", "https://x.org", f"{ADDRESS}/", " "]
)
def test_an_address_that_is_none_is_refused_with_its_value(
    hook, metadata, monkeypatch, address
):
    monkeypatch.setenv(NAME, address)
    with pytest.raises(ValueError, match="give one such as https://") as refused:
        hook.update(metadata)
    assert f"{NAME}={address!r}" in str(refused.value)
