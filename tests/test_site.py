"""The site: every page of its menu is there, and shows what it should."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import laplace_lora_ext as package
from tests.support.browser import CHROMIUM, browse

ROOT = Path(__file__).parents[1]


class Words(HTMLParser):
    """Gathers the words of a page's article, and counts its pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.n_pictures = 0
        self._depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._depth += tag == "article"
        self.n_pictures += tag == "img" and self._depth > 0

    def handle_endtag(self, tag: str) -> None:
        self._depth -= tag == "article"

    def handle_data(self, data: str) -> None:
        if self._depth:
            self.words += data.split()


def pages_of(nav: list[Any]) -> Iterator[str]:
    """List the files of a menu."""
    for entry in nav:
        for value in entry.values():
            if isinstance(value, str):
                yield value
            else:
                yield from pages_of(value)


def place_of(page: str) -> str:
    """Say where in the site a file of the menu stands."""
    stem, _, _ = page.rpartition(".")
    # A folder's README is the folder's own page.
    if stem.endswith("README"):
        return stem.removesuffix("README")
    return stem + "/"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    # A link that leads nowhere is an error.
    build = ["-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir"]
    subprocess.run(
        [sys.executable, *build, folder],
        cwd=ROOT,
        env={
            **os.environ,
            "NO_MKDOCS_2_WARNING": "1",
            # The reference is made of the docstrings of this very package.
            "PYTHONPATH": str(ROOT),
        },
        check=True,
        timeout=600,
    )
    return folder


def document_of(file: Path, profile: Path) -> str:
    """Read a page, after its scripts have run where there is a browser."""
    if CHROMIUM is None:
        return file.read_text(encoding="utf-8")
    return browse(file, profile, "--dump-dom")


def test_every_page_of_the_menu_has_something_to_read(site, tmp_path):
    from mkdocs.config import load_config

    config = load_config(str(ROOT / "mkdocs.yml"))
    pages = list(pages_of(config.nav))
    # A menu that was not read would have no page to fail.
    assert len(pages) > 15
    for page in pages:
        file = site / place_of(page) / "index.html"
        document = document_of(file, tmp_path)
        found = Words()
        found.feed(document)
        assert len(found.words) > 100, page
        if page.endswith(".ipynb"):
            assert document.count("jp-CodeCell") > 3, page
            # A notebook that was copied and not drawn begins with its own JSON.
            assert '"cells":' not in document[:10_000], page
        if "quick_tour" in page or page == "README.md":
            assert found.n_pictures, page


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
    words = re.compile(r"<text[^>]*>([^<]+)</text>")
    again = tmp_path / "idea.svg"
    script = "from docs.idea import draw; from pathlib import Path; import sys"
    subprocess.run(
        [sys.executable, "-c", f"{script}; draw(Path(sys.argv[1]))", again],
        cwd=ROOT,
        check=True,
    )
    drawn, kept = (
        words.findall(path.read_text(encoding="utf-8"))
        for path in (again, ROOT / "docs" / "idea.svg")
    )
    assert "posterior, broad prior" in kept
    assert drawn == kept
