"""Guides whose blocks of Python run as they stand, one after the other."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.testing import assert_close

import laplace_lora_ext
from tests.support.models import N_CLASSES, lora_model, ragged_batches
from tests.support.trainers import trainer_of
from tests.test_readme import FENCE, PROMPTS, write_adapter
from tests.test_token_classification import token_classifier

DOCS = Path(__file__).parents[1] / "docs"


def run_section(page: str, title: str, names: dict[str, Any]) -> None:
    """Run the one block of a guide's section."""
    text = (DOCS / page).read_text("utf-8")
    section = re.search(rf"## {re.escape(title)}\n(.*?)\n## ", text, re.DOTALL)
    assert section is not None
    ((_, code),) = FENCE.findall(section[1])
    exec(compile(code, f"{page}, {title}", "exec"), names)


@pytest.mark.filterwarnings("ignore:.*(have only|no better than guessing)")
def test_answers_of_several_tokens(tmp_path):
    write_adapter(tmp_path, "gpt2")
    model = lora_model("gpt2", torch.float32)
    batches = ragged_batches(n_classes=2)
    names = {
        "laplace_lora_ext": laplace_lora_ext,
        "torch": torch,
        "transformers": transformers,
        "tokenizer": transformers.AutoTokenizer.from_pretrained(tmp_path),
        "model": model,
        "train_loader": batches,
        "batch": batches[0],
    }
    blocks = [
        code for kind, code in FENCE.findall((DOCS / "answers.md").read_text("utf-8"))
    ]
    assert len(blocks) == 3
    for number, code in enumerate(blocks):
        exec(compile(code, f"answers.md, block {number}", "exec"), names)
        probabilities = names["probs"]
        assert_close(probabilities.sum(1), torch.ones(len(probabilities)))
    loss = names["AnswerTrainer"].compute_loss(None, model, next(iter(names["loader"])))
    assert loss.requires_grad


@pytest.mark.filterwarnings("ignore:.*(have only|no better than guessing|best prior)")
def test_several_labels_and_labels_of_tokens(tmp_path):
    write_adapter(tmp_path, "bert")
    model = lora_model("bert", torch.float32)
    model.config.problem_type = "multi_label_classification"
    words = [prompt.split() for prompt in PROMPTS]
    names = {
        "laplace_lora_ext": laplace_lora_ext,
        "torch": torch,
        "transformers": transformers,
        "tokenizer": transformers.AutoTokenizer.from_pretrained(tmp_path),
        "model": model,
        "token_model": token_classifier(dtype=torch.float32),
        "train_texts": [
            (prompt, ["returns", "billing"][: n % 3])
            for n, prompt in enumerate(PROMPTS)
        ],
        "train_sentences": [
            (text, [n % N_CLASSES for n in range(len(text))]) for text in words
        ],
    }
    several, of_texts, tokens, of_tokens = [
        code for _, code in FENCE.findall((DOCS / "labels.md").read_text("utf-8"))
    ]

    def run(code: str) -> None:
        exec(compile(code, "labels.md", "exec"), names)

    def serve_loaders() -> dict[str, torch.Tensor]:
        loader = names["train_loader"]
        (batch,) = loader
        names.update(val_loader=loader, test_loader=loader, pool=loader, batch=batch)
        return batch

    run(several)
    labels = serve_loaders()["labels"]
    assert_close(labels[:3], torch.tensor([[0.0, 0, 0], [0, 0, 1], [1, 0, 1]]))
    run(of_texts)
    assert names["la"].likelihood == "multi_label_classification"
    prediction = names["prediction"]
    assert_close(names["probs"], prediction.probabilities)
    assert (prediction.labels == (prediction.probabilities > 0.5)).all()
    assert prediction.epistemic_entropy.shape == names["probs"].shape == labels.shape
    assert names["places"].shape == (2,)

    run(tokens)
    labels = serve_loaders()["labels"]
    assert (labels == -100).any()
    run(of_tokens)
    assert names["la"].likelihood == "token_classification"
    is_real = names["batch"]["attention_mask"].bool()
    assert_close(names["probs"][is_real].sum(-1), torch.ones(int(is_real.sum())))
    assert names["probs"].shape == (*labels.shape, N_CLASSES)
    assert (names["prediction"].labels[~is_real] == -100).all()
    assert (names["doubt"].isnan() == ~is_real).all()
    assert names["places"].shape == (2,)


@pytest.mark.filterwarnings(
    "ignore:.*(have only|no better than guessing|best prior|0 or 1)"
)
def test_numbers_with_their_noise(capsys):
    texts = ragged_batches()
    batches = [batch | {"labels": batch["labels"].double()} for batch in texts]
    names = {
        "laplace_lora_ext": laplace_lora_ext,
        "model": lora_model("bert", n_labels=1),
        "train_loader": batches,
        "val_loader": batches,
        "test_loader": batches,
    }
    run_section("priors.md", "Numbers with their noise", names)
    assert (names["low"] < names["median"]).all()
    assert (names["median"] < names["high"]).all()
    assert_close(names["median"], names["prediction"].mean)
    assert set(names["comparison"].posterior) == {"rmse", "nll", "coverage", "crps"}
    assert "coverage" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*(have only|no better than guessing)")
def test_new_data_without_the_old(tmp_path):
    model = lora_model("bert", torch.float32)
    la = laplace_lora_ext.Laplace(model)
    la.fit(ragged_batches())
    names = {
        "laplace_lora_ext": laplace_lora_ext,
        "la": la,
        "new_trainer": trainer_of(tmp_path, model=model),
        "new_loader": ragged_batches(seed=2),
    }
    run_section("priors.md", "New data, without the old", names)
    assert names["la_of_both"].n_data == 2 * la.n_data
    assert la.penalty() > 0  # the adapter that was trained is the posterior's


def test_losses_of_ones_own_are_explained_in_few_sentences():
    text = (DOCS / "priors.md").read_text("utf-8")
    section = re.search(r"## Class weights.*?\n(.*?)\n## ", text, re.DOTALL)
    assert section is not None
    assert section[1].count(". ") + section[1].count(".\n") == 3
