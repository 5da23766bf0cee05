"""The report, as a browser draws it."""

import re
from pathlib import Path

from tests.support.browser import CHROMIUM, browse
from tests.support.commands import run


def take_picture(page: Path, width: int) -> Path:
    """Let a browser draw a page."""
    picture = page.with_name(f"{width}.png")
    browse(
        page,
        page.with_name("profile"),
        f"--window-size={width},900",
        f"--screenshot={picture}",
    )
    return picture


def test_the_report_is_one_page_without_any_outside_file(calibrated, refusal, tmp_path):
    # In a folder that is made.
    output = tmp_path / "reports" / "report.html"
    options = {"data": calibrated.test, "output": output, **calibrated.options}
    run("report", title="A < B", **options)
    document = output.read_text(encoding="utf-8")
    _, _, body = document.partition("<body>")
    assert re.match(r"<h1>A &lt; B</h1><p class=\S+>85% of the answers", body)
    assert document.count("<svg") == 2
    # Two tables: of three methods, and of twenty texts, with a head each.
    assert document.count("<tr>") == 1 + 3 + 1 + 20
    for mark in ("src=", "<link", "@import", "url(http"):
        assert mark not in document
    assert "exists" in refusal("report", **options)
    if CHROMIUM is not None:
        for width in (1280, 390):
            picture = take_picture(output, width)
            # An empty page's is smaller.
            assert picture.stat().st_size > 10_000
