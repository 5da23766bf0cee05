"""Free text: its tasks, its measures, its rivals, and a run on a tiny model."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from benchmarks.experiments import text_measures as measures
from benchmarks.methods.free_text import Predictor, posterior, scaled, training_free
from benchmarks.tasks.free_text import read
from tests.benchmarks.support import parsed, run
from tests.support.models import lora_model
from tests.support.texts import fitted_text, text_batches

SMALL = {
    "train_examples": 10,
    "validation_examples": 4,
    "test_examples": 6,
    "written_examples": 2,
    "files_per_library": 4,
}


@pytest.fixture(scope="module")
def la():
    return fitted_text(lora_model("gpt2", torch.float32).eval(), prior_precision=50.0)


def test_a_run_measures_every_method(capsys, tmp_path, tiny_models):
    finished = run(
        capsys,
        tmp_path,
        "text --quiet",
        **SMALL,
        model=tiny_models[True],
        cache=tmp_path / "cache",
        epochs=1,
        draws=2,
        grid_size=3,
    )
    figures = finished.figures
    names = [(row["name"], row["chosen_by"]) for row in figures["methods"]]
    assert names == [
        ("MAP", ""),
        ("Temperature scaling", "validation"),
        ("TFB", "training texts"),
        ("Posterior", "evidence"),
        ("Posterior", "agreement"),
        ("Posterior", "validation"),
    ]
    for row in figures["methods"]:
        assert math.isfinite(row["nll"])
        assert 0 <= row["ece"] <= 1
    of_map = [one["score"] for one in figures["detectors"] if one["name"] == "MAP"]
    assert of_map == ["log-probability", "summed entropy"]
    (costs,) = figures["costs"]
    assert 0 <= costs["wrong_answers"] <= 6
    assert costs["fit_ratio"] > 0 < costs["score_ratio"]
    assert "Area under risk-coverage" in finished.printed


@pytest.mark.parametrize("task", ["functions", "parameters", "types"])
def test_tasks_have_short_texts_of_their_own(task):
    sets = read(parsed("text --quiet", task=task, **SMALL), 0)
    texts = [one for part in sets for one in part]
    assert [len(part) for part in sets] == [10, 4, 6]
    assert len({one.prompt.casefold() for one in texts}) == 20
    assert all(one.prompt.endswith(":") for one in texts)
    assert all(one.answer.startswith(" ") for one in texts)


def test_a_sign_that_knows_all_wrong_answers_detects_them():
    wrong = torch.tensor([True, False, True, False])
    knows = measures.detects(torch.tensor([3.0, 1.0, 2.0, 0.5]), wrong)
    assert knows["auroc"] == 1
    assert knows["aurc"] == pytest.approx((0 + 0 + 1 / 3 + 2 / 4) / 4)
    mistakes = measures.detects(torch.tensor([0.0, 1.0, 0.1, 2.0]), wrong)
    assert mistakes["auroc"] == 0
    guesses = measures.detects(torch.ones(4), wrong)
    assert guesses["auroc"] == 0.5
    all_are_wrong = measures.detects(torch.ones(2), torch.tensor([True, True]))
    assert all_are_wrong["auroc"] is None


def test_qualities_of_the_model_its_temperature_and_its_posterior(la):
    batches = text_batches(seed=7)
    of_model = measures.quality(Predictor(la), batches)
    pairs = [la.tokens(batch) for batch in batches]
    logits = torch.cat([logits for logits, _ in pairs])
    tokens = torch.cat([tokens for _, tokens in pairs])
    is_right = logits.argmax(-1) == tokens
    assert of_model["tokens"] == len(tokens)
    assert of_model["nll"] == pytest.approx(
        cross_entropy(logits, tokens).item(), rel=1e-5
    )
    assert of_model["token_accuracy"] == is_right.double().mean().item()
    predictor = scaled(la, batches)
    assert predictor.temperature > 1
    assert measures.quality(predictor, batches)["nll"] < of_model["nll"]
    drawn = measures.quality(posterior(la, draws=3), batches)
    again = measures.quality(posterior(la, draws=3), batches)
    assert drawn == again
    assert drawn["nll"] != of_model["nll"]


def test_noise_of_tfb_changes_next_to_no_token(la):
    batches = text_batches()
    predictor = training_free(la, draws=3, texts=batches)
    moved = []
    for batch in batches:
        f, drawn, _ = predictor(batch)
        p = f.softmax(-1)
        mixture = torch.stack([logits.softmax(-1) for logits in drawn]).mean(0)
        # Of 20 tokens, one would be 5 %.
        assert torch.equal(mixture.argmax(-1), f.argmax(-1))
        moved.append((mixture - p).abs().max())
    assert max(moved) > 1e-4
