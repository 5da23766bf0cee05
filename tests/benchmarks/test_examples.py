"""The notebooks have been executed, and run on tiny settings too."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import matplotlib as mpl
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs_after_the_others(path, tiny_models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOUR_STEPS", "6")
    monkeypatch.setenv("TOUR_FILES", "40")
    monkeypatch.setenv("TOUR_MODEL", str(tiny_models[True]))
    mpl.use("Agg")
    notebook = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, object] = {}
    with warnings.catch_warnings():  # a notebook sets filters of its own
        for number, cell in enumerate(notebook["cells"]):
            if cell["cell_type"] == "code":
                assert cell["execution_count"]
                source = "".join(cell["source"])
                # A failure is then told with its cell.
                code = compile(source, f"{path.name}, cell {number}", "exec")
                exec(code, names)
