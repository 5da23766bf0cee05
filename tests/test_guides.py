"""Guides whose blocks of Python run as they stand, one after the other."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.testing import assert_close

import laplace_lora_ext
from tests.support.models import N_CLASSES, Batch, lora_model, ragged_batches
from tests.support.pages import FENCE, PROMPTS, write_adapter
from tests.support.posteriors import another_training
from tests.support.tokens import token_classifier
from tests.support.trainers import trainer_of

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# What a guide's blocks read and make, by its name.
Names = dict[str, Any]


# What is said of models that are not trained, and of a few texts.
OF_TINY_MODELS = "have only|no better than guessing"


def ignoring(messages: str) -> pytest.MarkDecorator:
    """Let warnings pass in which one of these is said."""
    return pytest.mark.filterwarnings(f"ignore:.*({messages})")


def text_of(page: str) -> str:
    path = DOCS / page
    return path.read_text("utf-8")


def blocks_of(text: str) -> list[str]:
    """Find the blocks of code of a guide, or of a part of one."""
    return [code for _, code in FENCE.findall(text)]


def section_of(page: str, title: str) -> str:
    """Find a section by the beginning of its title."""
    section = re.search(
        rf"## {re.escape(title)}.*?\n(.*?)\n## ", text_of(page), re.DOTALL
    )
    assert section is not None
    return section[1]


def run(code: str, names: Names, place: str) -> None:
    """Run a block, with its place in what an error says."""
    block = compile(code, place, "exec")
    exec(block, names)


def run_section(page: str, title: str, names: Names) -> None:
    """Run the one block of a guide's section."""
    section = section_of(page, title)
    (code,) = blocks_of(section)
    run(code, names, f"{page}, {title}")


def assert_probabilities(p: Tensor) -> None:
    """Check that the last dimension adds up to one."""
    sums = p.sum(-1)
    assert_close(sums, torch.ones_like(sums))


# --- answers --------------------------------------------------------------------------


@ignoring(OF_TINY_MODELS)
def test_answers_of_several_tokens(tmp_path):
    write_adapter(tmp_path, "gpt2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    model = lora_model("gpt2", torch.float32)
    batches = ragged_batches(n_classes=2)
    first, *_ = batches
    names = {
        "laplace_lora_ext": laplace_lora_ext,
        "torch": torch,
        "transformers": transformers,
        "tokenizer": tokenizer,
        "model": model,
        "train_loader": batches,
        "batch": first,
    }
    blocks = blocks_of(text_of("answers.md"))
    # A block that was not found would not fail either.
    assert len(blocks) == 3
    for number, code in enumerate(blocks):
        run(code, names, f"answers.md, block {number}")
        assert_probabilities(names["probs"])
    batch, *_ = names["loader"]
    trainer = names["AnswerTrainer"]
    loss = trainer.compute_loss(None, model, batch)
    # Otherwise nothing would be learnt from it.
    assert loss.requires_grad


# --- labels ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Labels:
    """The guide's four blocks, two for each likelihood, and what they have made."""

    several: str
    of_texts: str
    tokens: str
    of_tokens: str
    names: Names

    def run(self, code: str) -> None:
        run(code, self.names, "labels.md")

    def load(self, code: str) -> Batch:
        """Run a block that makes a loader, and take it for all data; return a batch."""
        self.run(code)
        loader = self.names["train_loader"]
        (batch,) = loader
        self.names.update(val_loader=loader, test_loader=loader, batch=batch)
        return batch


def some_labels_of_texts() -> list[tuple[str, list[str]]]:
    """Give texts none of two labels, the first, or both, by turns."""
    both = ["returns", "billing"]
    return [(prompt, both[: number % 3]) for number, prompt in enumerate(PROMPTS)]


def labels_of_words() -> list[tuple[list[str], list[int]]]:
    """Give the words of texts all classes by turns."""
    sentences = [prompt.split() for prompt in PROMPTS]
    return [
        (words, [place % N_CLASSES for place, _ in enumerate(words)])
        for words in sentences
    ]


@pytest.fixture
def labels_guide(tmp_path: Path) -> Labels:
    write_adapter(tmp_path, "bert")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    model = lora_model("bert", torch.float32)
    model.config.problem_type = "multi_label_classification"
    token_model = token_classifier(dtype=torch.float32)
    names = {
        "laplace_lora_ext": laplace_lora_ext,
        "torch": torch,
        "transformers": transformers,
        "tokenizer": tokenizer,
        "model": model,
        "token_model": token_model,
        "train_texts": some_labels_of_texts(),
        "train_sentences": labels_of_words(),
    }
    text = text_of("labels.md")
    several, of_texts, tokens, of_tokens = blocks_of(text)
    return Labels(
        several=several,
        of_texts=of_texts,
        tokens=tokens,
        of_tokens=of_tokens,
        names=names,
    )


@ignoring(f"{OF_TINY_MODELS}|best prior")
def test_several_labels(labels_guide):
    batch = labels_guide.load(labels_guide.several)
    labels = batch["labels"]
    # In the order of the guide's list of labels.
    expected = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 1.0]])
    assert_close(labels[:3], expected)

    labels_guide.run(labels_guide.of_texts)
    names = labels_guide.names
    assert names["la"].likelihood == "multi_label_classification"
    prediction = names["prediction"]
    p = prediction.probabilities
    assert p.shape == labels.shape
    assert_close(names["probs"], p)
    is_yes = p > 0.5
    assert torch.equal(prediction.labels, is_yes.long())
    assert prediction.epistemic_entropy.shape == labels.shape


@ignoring(f"{OF_TINY_MODELS}|best prior")
def test_labels_of_tokens(labels_guide):
    batch = labels_guide.load(labels_guide.tokens)
    labels = batch["labels"]
    # Of a word in several pieces the first alone has a label, and padding has none.
    assert (labels == -100).any()

    labels_guide.run(labels_guide.of_tokens)
    names = labels_guide.names
    assert names["la"].likelihood == "token_classification"
    is_real = batch["attention_mask"].bool()
    p = names["probs"]
    assert p.shape == (*labels.shape, N_CLASSES)
    assert_probabilities(p[is_real])
    prediction = names["prediction"]
    of_padding = prediction.labels[~is_real]
    assert (of_padding == -100).all()
    has_no_doubt = names["doubt"].isnan()
    assert torch.equal(has_no_doubt, ~is_real)


# --- priors ---------------------------------------------------------------------------


@ignoring(f"{OF_TINY_MODELS}|best prior|looks trained|second fit")
def test_recipes(tmp_path, monkeypatch):
    # They read and write beside where they run.
    monkeypatch.chdir(tmp_path)
    write_adapter(tmp_path / "path" / "to" / "adapter", "bert")
    batches = ragged_batches()
    names = {
        "laplace_lora_ext": laplace_lora_ext,
        "trainer": trainer_of(tmp_path / "trained"),
        "train_loader": batches,
        "validation_loader": batches,
        "test_loader": batches,
        "batch": batches[0],
    }
    *recipes, afterwards = blocks_of(section_of("priors.md", "The recipes"))
    posteriors = []
    for number, code in enumerate(recipes):
        run(code, names, f"priors.md, recipe {number}")
        assert_probabilities(names["probs"])
        posteriors.append(names["la"])
    assert len(posteriors) == 3
    # The last recipe has a model of its own, without a trainer.
    names["la"] = posteriors[1]
    run(afterwards, names, "priors.md, afterwards")
    assert_probabilities(names["probs"])
    assert names["name"] in names["trainer"].model.peft_config


@ignoring(f"{OF_TINY_MODELS}|best prior|0 or 1")
def test_numbers_with_their_noise(capsys):
    batches = ragged_batches()
    for batch in batches:
        labels = batch["labels"]
        batch["labels"] = labels.double()
    model = lora_model("bert", n_labels=1)
    names = {
        "laplace_lora_ext": laplace_lora_ext,
        "model": model,
        "train_loader": batches,
        "val_loader": batches,
        "test_loader": batches,
    }
    run_section("priors.md", "Numbers with their noise", names)
    median = names["median"]
    is_above = median > names["low"]
    assert is_above.all()
    is_below = median < names["high"]
    assert is_below.all()
    prediction = names["prediction"]
    assert_close(median, prediction.mean)
    figures = names["comparison"].posterior
    assert set(figures) == {"rmse", "nll", "coverage", "crps"}
    printed = capsys.readouterr()
    assert "coverage" in printed.out


@ignoring(OF_TINY_MODELS)
def test_one_adapter_out_of_several(tmp_path, capsys):
    model = lora_model("bert", torch.float32)
    trainer = trainer_of(tmp_path, model=model)
    names = {
        "laplace_lora_ext": laplace_lora_ext,
        "model_of_one": model,
        "model_of_two": another_training().float(),
        "loader_of_one": ragged_batches(),
        "loader_of_two": ragged_batches(seed=2),
        "trainer_of_one": trainer,
        "held_out_texts": trainer.train_dataset,
    }
    run_section("priors.md", "One adapter out of several", names)
    assert set(model.peft_config) == {"default", *(f"both_{n}" for n in range(4))}
    assert capsys.readouterr().out.count("eval_loss") == 4
