"""The README's example runs as it stands, on an adapter in a folder."""

import re
from pathlib import Path

import torch

from tests.tiny_models import base_model, lora_model, ragged_batches

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs_and_has_twelve_lines_at_most(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(example.strip().splitlines()) <= 12
    base_model("bert").save_pretrained(tmp_path / "base")
    model = lora_model("bert", torch.float32)
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    batches = ragged_batches()
    names = {"train_loader": batches, "batch": batches[0]}
    exec(example.replace("path/to/adapter", str(tmp_path / "adapter")), names)
    torch.testing.assert_close(names["probs"].sum(1), torch.ones(3))
