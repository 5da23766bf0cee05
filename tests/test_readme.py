"""The README's examples run as they stand, on an adapter in a folder."""

import re
from pathlib import Path

import torch

from tests.support.models import base_model, lora_model, ragged_batches

README = Path(__file__).parent.parent / "README.md"


def test_the_examples_run_and_have_twelve_lines_at_most(tmp_path, monkeypatch):
    text = README.read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 2
    assert all(len(example.strip().splitlines()) <= 12 for example in examples)
    monkeypatch.chdir(tmp_path)
    base_model("bert").save_pretrained(tmp_path / "base")
    model = lora_model("bert", torch.float32)
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    batches = ragged_batches()
    names = {"train_loader": batches, "batch": batches[0], "validation_loader": batches}
    exec(examples[0].replace("path/to/adapter", str(tmp_path / "adapter")), names)
    torch.testing.assert_close(names["probs"].sum(1), torch.ones(3))
    exec(examples[1], names)
    torch.testing.assert_close(names["probs"].sum(1), torch.ones(8))
    assert len(names["folders"]) == 5
    assert set(names["shares"]) == {"bert.encoder.layer.0", "bert.encoder.layer.1"}
