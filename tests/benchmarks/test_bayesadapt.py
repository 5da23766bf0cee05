"""The Bayesian Adaptation Gym's protocol, by stand-ins for its data and its trainer."""

import json
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from torch.utils.data import Dataset

EXAMPLE = Path(__file__).parents[2] / "examples" / "bayesadapt.py"


class Questions(Dataset):
    """Has the interface of the gym's data sets."""

    labels: ClassVar = ["A", "B", "C"]

    def __init__(self, split: str, n_items: int = 9) -> None:
        self.items = [
            {
                "prompt": f"{split} grows" + number % 4 * " Answer",
                "label": number % 3,
                "question_id": f"{split} {number}",
            }
            for number in range(n_items)
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.items[number]


def collate(tokenizer: Any, items: list[dict[str, Any]]) -> tuple[Any, ...]:
    """Join items as the gym does."""
    texts = [item["prompt"] for item in items]
    tokenizer.pad_token = "<pad>"
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    labels = torch.tensor([item["label"] for item in items])
    return inputs, labels, [item["question_id"] for item in items]


@pytest.fixture
def example(monkeypatch):
    gym: Any = ModuleType("gym_stand_in")
    gym.Questions, gym.collate = Questions, collate
    monkeypatch.setitem(sys.modules, "gym_stand_in", gym)
    return SimpleNamespace(**runpy.run_path(str(EXAMPLE)))


@pytest.fixture
def run(example, tiny_models, tmp_path):
    """Runs the example, and returns what it has written."""

    def command(*options: str) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        example.main(
            [
                "gym_stand_in.Questions",
                "--collate=gym_stand_in.collate",
                f"--model={tiny_models[True]}",
                f"--output={tmp_path}",
                '--options={"n_items": 12}',
                *options,
            ]
        )
        (metrics,) = json.loads((tmp_path / "metrics.json").read_text())
        return metrics, torch.load(tmp_path / "test_logits_seed0.pt")

    return command


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture
def tokenizer(tiny_models):
    return transformers.AutoTokenizer.from_pretrained(
        tiny_models[True], padding_side="left"
    )


@pytest.fixture
def model(example, tiny_models, tokenizer):
    """The model of answers, whose adapter looks trained."""
    answers = tokenizer.convert_tokens_to_ids(Questions.labels)
    torch.manual_seed(0)
    model = example.with_answers(load(tiny_models[True]), answers)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.3)
    return model.eval()


def test_stages_write_what_the_gym_writes(run):
    metrics, logits = run("--steps=4")
    questions = Questions("test", n_items=12)
    assert list(logits) == [item["question_id"] for item in questions]
    together = torch.stack(list(logits.values()))
    assert together.shape == (12, 1, 3)
    assert together.dtype == torch.float64
    labels = torch.tensor([item["label"] for item in questions])
    logits_of_mean = together[:, 0]
    is_right = logits_of_mean.argmax(-1) == labels
    assert set(metrics) == {"seed", "ACC", "ECE", "NLL", "Brier"}
    assert metrics["ACC"] == pytest.approx(is_right.double().mean().item())
    assert metrics["NLL"] == pytest.approx(cross_entropy(logits_of_mean, labels).item())


def test_a_checkpoint_of_the_gym_is_what_predicts(run, model, tokenizer, tmp_path):
    file = tmp_path / "state_dict.pt"
    trained = {name: w for name, w in model.state_dict().items() if "lora_" in name}
    torch.save(trained, file)
    _, logits = run(f"--checkpoint={file}")
    inputs, _, _ = collate(tokenizer, Questions("test").items)
    with torch.no_grad():
        expected = model(**inputs).logits[:, -1]
    found = torch.cat([logits[name] for name in list(logits)[: len(expected)]])
    assert_close(found.argmax(-1), expected.argmax(-1))
    torch.save({**trained, "lora_of_another": torch.zeros(1)}, file)
    with pytest.raises(SystemExit, match="of another model: lora_of_another"):
        run(f"--checkpoint={file}")


def test_the_head_keeps_the_answers(model, tokenizer, tiny_models):
    inputs, _, _ = collate(tokenizer, Questions("test").items)
    answers = tokenizer.convert_tokens_to_ids(Questions.labels)
    with torch.no_grad(), model.disable_adapter():
        expected = load(tiny_models[True])(**inputs).logits[..., answers]
        assert_close(model(**inputs).logits, expected)
