"""The site: every page of its menu is there, and shows what it should."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium")
WIDEST = 80  # letters of a line of code that a laptop shows
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Words(HTMLParser):
    """Gathers the words of a page's article, and counts its pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.n_pictures = 0
        self._depth = 0

    def handle_starttag(
        self,
        tag: str,
        attrs: list[tuple[str, str | None]],
    ) -> None:
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
    stem = page.rpartition(".")[0]
    return stem.removesuffix("README") if stem.endswith("README") else stem + "/"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "--quiet",
            "--site-dir",
            folder,
        ],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=600,
    )
    return folder


def document_of(file: Path, profile: Path) -> str:
    """Read a page, after its scripts have run where there is a browser."""
    if CHROMIUM is None:
        return file.read_text(encoding="utf-8")
    return subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            f"--user-data-dir={profile}",
            "--dump-dom",
            file.as_uri(),
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout


def test_every_page_of_the_menu_has_something_to_read(site, tmp_path):
    from mkdocs.config import load_config

    pages = list(pages_of(load_config(str(ROOT / "mkdocs.yml")).nav))
    assert len(pages) > 15
    for page in pages:
        document = document_of(site / place_of(page) / "index.html", tmp_path)
        found = Words()
        found.feed(document)
        assert len(found.words) > 100, page
        if page.endswith(".ipynb"):
            assert document.count("jp-CodeCell") > 3, page
            assert '"cells":' not in document[:10_000], page
        if "quick_tour" in page or page == "README.md":
            assert found.n_pictures, page


def test_code_fits_into_its_box():
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for block in FENCE.findall(path.read_text(encoding="utf-8")):
            for line in block.splitlines():
                assert len(line) <= WIDEST, f"{path.name}: {line}"
    for path in (ROOT / "examples").glob("*.ipynb"):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                for line in "".join(cell["source"]).splitlines():
                    assert len(line) <= WIDEST, f"{path.name}: {line}"
