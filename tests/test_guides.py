"""Guides whose blocks of Python run as they stand, one after the other."""

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from tests.support.models import N_CLASSES, lora_model, ragged_batches
from tests.support.pages import (
    GIVEN,
    PROMPTS,
    assert_probabilities,
    blocks_of,
    run,
    run_section,
    write_adapter,
)
from tests.support.posteriors import another_training
from tests.support.tasks import token_classifier
from tests.support.trainers import trainer_of

# What is said of models that are not trained, and of a few texts.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(have only|no better than guessing|best prior|looks trained|second fit)"
)


# --- answers --------------------------------------------------------------------------


def test_answers_of_several_tokens(tmp_path):
    write_adapter(tmp_path, "gpt2")
    batches = ragged_batches(n_classes=2)
    names = GIVEN | {
        "tokenizer": transformers.AutoTokenizer.from_pretrained(tmp_path),
        "model": lora_model("gpt2", torch.float32),
        "train_loader": batches,
        "batch": batches[0],
    }
    blocks = blocks_of("answers.md")
    # A block that was not found would not fail either.
    assert len(blocks) == 3
    for code in blocks:
        run(code, names, "answers.md")
        assert_probabilities(names["probs"])
    batch, *_ = names["loader"]
    compute_loss = names["AnswerTrainer"].compute_loss
    loss = compute_loss(None, names["model"], batch)
    # Otherwise nothing would be learnt from it.
    assert loss.requires_grad
    # As evaluations ask for it.
    loss, outputs = compute_loss(None, names["model"], batch, return_outputs=True)
    assert_close(loss, cross_entropy(outputs["logits"], batch["labels"]))


# --- labels ---------------------------------------------------------------------------


def test_labels(tmp_path):
    write_adapter(tmp_path, "bert")
    model = lora_model("bert", torch.float32)
    model.config.problem_type = "multi_label_classification"
    sentences = [prompt.split() for prompt in PROMPTS]
    held = [[], ["returns"], ["returns", "billing"]] * 2
    names = GIVEN | {
        "tokenizer": transformers.AutoTokenizer.from_pretrained(tmp_path),
        "model": model,
        "token_model": token_classifier(dtype=torch.float32),
        "train_texts": list(zip(PROMPTS, held, strict=True)),
        # All classes by turns.
        "train_sentences": [
            (words, [place % N_CLASSES for place in range(len(words))])
            for words in sentences
        ],
    }
    several, of_texts, tokens, of_tokens = blocks_of("labels.md")

    def predict(load: str, use: str) -> tuple:
        run(load, names, "labels.md")
        loader = names["val_loader"] = names["test_loader"] = names["train_loader"]
        (names["batch"],) = loader
        run(use, names, "labels.md")
        return names["la"].likelihood, names["batch"]["labels"], names["prediction"]

    likelihood, labels, prediction = predict(several, of_texts)
    assert likelihood == "multi_label_classification"
    # In the order of the guide's list of labels.
    assert labels[:3].tolist() == [[0, 0, 0], [0, 0, 1], [1, 0, 1]]
    assert prediction.probabilities.shape == labels.shape
    assert_close(names["probs"], prediction.probabilities)

    likelihood, labels, prediction = predict(tokens, of_tokens)
    assert likelihood == "token_classification"
    is_real = names["batch"]["attention_mask"].bool()
    assert names["probs"].shape == (*labels.shape, N_CLASSES)
    assert_probabilities(names["probs"][is_real])
    assert torch.equal(prediction.labels == -100, ~is_real)
    assert torch.equal(names["doubt"].isnan(), ~is_real)


# --- priors ---------------------------------------------------------------------------


def test_recipes(tmp_path, monkeypatch):
    # They read and write beside where they run.
    monkeypatch.chdir(tmp_path)
    write_adapter(tmp_path / "path" / "to" / "adapter", "bert")
    batches = ragged_batches()
    names = GIVEN | {
        "trainer": trainer_of(tmp_path / "trained"),
        "train_loader": batches,
        "validation_loader": batches,
        "test_loader": batches,
        "batch": batches[0],
    }
    *recipes, afterwards = blocks_of("priors.md", "The recipes")
    posteriors = []
    for code in recipes:
        run(code, names, "priors.md")
        assert_probabilities(names["probs"])
        posteriors.append(names["la"])
    assert len(posteriors) == 3
    # The last recipe has a model of its own, without a trainer.
    names["la"] = posteriors[1]
    run(afterwards, names, "priors.md")
    assert_probabilities(names["probs"])
    assert names["name"] in names["trainer"].model.peft_config


def test_numbers_with_their_noise(capsys):
    batches = ragged_batches()
    for batch in batches:
        batch["labels"] = batch["labels"].double()
    names = GIVEN | {
        "model": lora_model("bert", n_labels=1),
        "train_loader": batches,
        "val_loader": batches,
        "test_loader": batches,
    }
    run_section("priors.md", "Numbers with their noise", names)
    median = names["median"]
    assert ((names["low"] < median) & (median < names["high"])).all()
    assert_close(median, names["prediction"].mean)
    figures = names["comparison"].posterior
    assert set(figures) == {"rmse", "nll", "coverage", "crps"}
    assert "coverage" in capsys.readouterr().out


def test_one_adapter_out_of_several(tmp_path, capsys):
    model = lora_model("bert", torch.float32)
    trainer = trainer_of(tmp_path, model=model)
    names = GIVEN | {
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
