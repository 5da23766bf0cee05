"""The site: every page of its menu is there, and shows what it should."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import laplace_lora_ext as package

ROOT = Path(__file__).parents[1]


def pages_of(nav: list[Any]) -> Iterator[str]:
    """List the files of a menu."""
    for entry in nav:
        for value in entry.values():
            yield from [value] if isinstance(value, str) else pages_of(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    # A link that leads nowhere is an error.
    build = ["-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir"]
    # The reference is made of the docstrings of this very package.
    settings = {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, *build, folder],
        cwd=ROOT,
        env=os.environ | settings,
        check=True,
        timeout=600,
    )
    return folder


def test_every_page_of_the_menu_has_something_to_read(site):
    from bs4 import BeautifulSoup
    from mkdocs.config import load_config

    pages = list(pages_of(load_config(str(ROOT / "mkdocs.yml")).nav))
    # A menu that was not read would have no page to fail.
    assert len(pages) > 15
    for page in pages:
        # A folder's README is the folder's own page.
        folder = re.sub(r"(README)?\.\w+$", "", page)
        document = (site / folder / "index.html").read_text(encoding="utf-8")
        article = BeautifulSoup(document, "html.parser").article
        assert len(article.get_text().split()) > 100, page
        if page.endswith(".ipynb"):
            assert document.count("jp-CodeCell") > 3, page
        if "quick_tour" in page or page == "README.md":
            assert article.find("img"), page


def test_every_public_name_is_in_the_reference_once(site):
    heading = re.compile(rf'<h2 id="{package.__name__}\.(\w+)"')
    found: list[str] = []
    for page in (site / "reference").glob("*/index.html"):
        found += heading.findall(page.read_text(encoding="utf-8"))
    assert sorted(found) == sorted(package.__all__)


def test_options_of_commands_are_in_the_guide(site):
    page = site / "command_line" / "index.html"
    text = page.read_text(encoding="utf-8")
    assert "<!-- options" not in text
    assert '<code class="option">--train</code>' in text


def test_the_picture_is_drawn_by_its_script(tmp_path):
    from docs.idea import draw

    draw(tmp_path / "idea.svg")
    words = re.compile(r"<text[^>]*>([^<]+)</text>")
    drawn, kept = (
        words.findall(Path(folder, "idea.svg").read_text(encoding="utf-8"))
        for folder in (tmp_path, ROOT / "docs")
    )
    assert "posterior, broad prior" in kept
    assert drawn == kept
