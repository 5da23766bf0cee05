"""The Bayesian Adaptation Gym's protocol, by stand-ins for its data and its trainer."""

import json
import runpy
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from torch.utils.data import DataLoader

EXAMPLE = Path(__file__).parents[2] / "examples" / "bayesadapt.py"


class Questions(list[dict[str, Any]]):
    """Has what is read of the gym's data sets."""

    labels: ClassVar = ["A", "B", "C"]

    def __init__(self, split: str, n_items: int) -> None:
        super().__init__(
            {
                "prompt": f"{split} is" + number % 4 * " Answer",
                "label": number % 3,
                "question_id": f"{split} {number}",
            }
            for number in range(n_items)
        )


def collate(tokenizer: Any, items: list[dict[str, Any]]) -> tuple[Any, ...]:
    """Join items as the gym does."""
    texts = [item["prompt"] for item in items]
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    labels = torch.tensor([item["label"] for item in items])
    return inputs, labels, [item["question_id"] for item in items]


@pytest.fixture
def example(monkeypatch):
    gym: Any = ModuleType("gym_stand_in")
    gym.Questions, gym.collate = Questions, collate
    monkeypatch.setitem(sys.modules, "gym_stand_in", gym)
    return SimpleNamespace(**runpy.run_path(str(EXAMPLE)))


@pytest.fixture
def run(example, decoder, tmp_path):
    """Runs the example, and returns what it has written."""

    def command(*options: str) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        paths = f"--model={decoder} --output={tmp_path}"
        given = f"gym_stand_in.Questions --collate=gym_stand_in.collate {paths}"
        example.main([*given.split(), '--options={"n_items": 12}', *options])
        (metrics,) = json.loads((tmp_path / "metrics.json").read_text())
        return metrics, torch.load(tmp_path / "test_logits_seed0.pt")

    return command


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


def test_a_checkpoint_of_the_gym_is_what_predicts(run, example, decoder, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(decoder)
    answers = tokenizer.convert_tokens_to_ids(Questions.labels)
    inputs, _, _ = collate(tokenizer, Questions("test", n_items=12))
    base = transformers.AutoModelForCausalLM.from_pretrained(decoder)
    with torch.no_grad():
        of_answers = base(**inputs).logits[..., answers]
    model = example.with_answers(base, answers).eval()
    with torch.no_grad(), model.disable_adapter():
        assert_close(model(**inputs).logits, of_answers)

    trained = {}
    for name, weight in model.named_parameters():
        if "lora_" in name:
            trained[name] = nn.init.normal_(weight.data, std=0.3)
    torch.save(trained, tmp_path / "state_dict.pt")
    _, logits = run(f"--checkpoint={tmp_path}/state_dict.pt")
    load = partial(DataLoader, batch_size=4, collate_fn=partial(collate, tokenizer))
    splits = [load(Questions(split, n_items=12)) for split in ("train", "validation")]
    asked = SimpleNamespace(checkpoint=tmp_path / "state_dict.pt")
    la = example.of_checkpoint(model, *splits, asked)
    test = map(example.with_labels, load(Questions("test", n_items=12)))
    expected = la.predict_proba(test)
    found = torch.cat(list(logits.values())).exp()
    assert_close(found, torch.from_numpy(expected).double())

    torch.save({**trained, "lora_of_another": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(SystemExit, match="of another model: lora_of_another"):
        run(f"--checkpoint={tmp_path}/other.pt")
