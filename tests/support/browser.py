"""A browser without a window, where there is one."""

import shutil
import subprocess
from pathlib import Path

CHROMIUM = shutil.which("chromium")


def browse(page: Path, profile: Path, *options: str) -> str:
    """Open a page in a browser with a profile of its own; return what it prints."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        "--headless",
        # The sandbox and the graphics of a container are seldom there.
        "--no-sandbox",
        "--disable-gpu",
        # Nothing is to be asked for outside: it would take time, or fail.
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={profile}",
        *options,
        page.as_uri(),
    ]
    finished = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=120
    )
    return finished.stdout
