"""Free text: its tasks, its measures, its rivals, and a run on a tiny model."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from benchmarks.experiments import text_measures as measures
from benchmarks.methods.free_text import (
    Predictor,
    posterior,
    scaled,
    tokens_of,
    training_free,
)
from benchmarks.tasks.free_text import read
from tests.benchmarks.support import parsed, rows_by, rows_with, run, values_of
from tests.support.models import lora_model
from tests.support.texts import fitted_text, text_batches

SMALL = {
    "train_examples": 10,
    "validation_examples": 4,
    "test_examples": 6,
    "files_per_library": 4,
}


def test_methods_detectors_and_costs_are_measured(tiny_models, tmp_path):
    options = {"epochs": 1, "draws": 2, "grid_size": 3, "cache": tmp_path / "cache"}
    model = tiny_models[True]
    finished = run(tmp_path, "text --quiet", **SMALL, **options, model=model)
    methods = rows_by(finished.figures["methods"], "name", "chosen_by")
    assert list(methods) == [
        ("MAP", ""),
        ("Temperature scaling", "validation"),
        ("TFB", "training texts"),
        ("Posterior", "evidence"),
        ("Posterior", "validation"),
    ]
    for row in methods.values():
        assert math.isfinite(row["nll"])
        assert 0 <= row["ece"] <= 1
    of_map = rows_with(finished.figures["detectors"], name="MAP")
    assert values_of(of_map, "score") == ["log-probability", "summed entropy"]
    assert "Area under risk-coverage" in finished.printed
    (costs,) = finished.figures["costs"]
    assert 0 <= costs["wrong_answers"] <= 6
    assert costs["fit_ratio"] > 0
    assert costs["score_ratio"] > 0


@pytest.mark.parametrize("task", ["functions", "parameters", "types"])
def test_tasks_have_short_texts_of_their_own(task):
    sets = read(parsed("text --quiet", task=task, **SMALL), 0)
    assert [len(texts) for texts in sets] == [10, 4, 6]
    everything = [text for texts in sets for text in texts]
    assert all(text.prompt.endswith(":") for text in everything)
    assert all(text.answer.startswith(" ") for text in everything)
    # Not even a capital tells two prompts apart.
    assert len({text.prompt.casefold() for text in everything}) == 20


# --- measures -------------------------------------------------------------------------

WRONG = torch.tensor([True, False, True, False])


@pytest.mark.parametrize(
    ("sign", "auroc"),
    [
        pytest.param([3.0, 1.0, 2.0, 0.5], 1, id="knowing"),
        pytest.param([0.0, 1.0, 0.1, 2.0], 0, id="mistaken"),
        pytest.param([1.0, 1.0, 1.0, 1.0], 0.5, id="guessing"),
    ],
)
def test_a_sign_detects_wrong_answers_as_far_as_it_is_higher_for_them(sign, auroc):
    assert measures.detects(torch.tensor(sign), WRONG)["auroc"] == auroc


def test_a_sign_that_knows_all_wrong_answers_keeps_the_right_ones_first():
    found = measures.detects(torch.tensor([3.0, 1.0, 2.0, 0.5]), WRONG)
    # Of one to four answers.
    assert found["aurc"] == pytest.approx((0 + 0 + 1 / 3 + 2 / 4) / 4)


def test_nothing_detects_wrong_answers_where_all_are_wrong():
    found = measures.detects(torch.ones(2), torch.tensor([True, True]))
    assert found["auroc"] is None


# --- rivals ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def la():
    """A posterior over a model of texts, which the rivals share."""
    model = lora_model("gpt2", torch.float32)
    return fitted_text(model.eval(), prior_precision=50.0)


# Texts that the posterior is not fitted to.
BATCHES = text_batches(seed=7)


def test_the_quality_of_the_model_and_of_a_temperature(la):
    of_model = measures.quality(Predictor(la), BATCHES)
    parts = [tokens_of(la, batch) for batch in BATCHES]
    f, y = (torch.cat(each) for each in zip(*parts, strict=True))
    assert of_model["tokens"] == len(y)
    assert of_model["nll"] == pytest.approx(cross_entropy(f, y).item(), rel=1e-5)
    is_right = f.argmax(-1) == y
    assert of_model["token_accuracy"] == is_right.double().mean().item()
    predictor = scaled(la, BATCHES)
    # The model is too sure of texts that it has not seen.
    assert predictor.temperature > 1
    assert measures.quality(predictor, BATCHES)["nll"] < of_model["nll"]


def test_the_posterior_has_the_same_draws_each_time(la):
    drawn = measures.quality(posterior(la, draws=3), BATCHES)
    assert drawn == measures.quality(posterior(la, draws=3), BATCHES)
    assert drawn["nll"] != measures.quality(Predictor(la), BATCHES)["nll"]


def test_noise_of_tfb_changes_next_to_no_token(la):
    batches = text_batches()
    predictor = training_free(la, draws=3, texts=batches)
    moved = []
    for batch in batches:
        f, drawn, _ = predictor(batch)
        p = f.softmax(-1)
        mixture = torch.stack([logits.softmax(-1) for logits in drawn]).mean(0)
        # Of 20 tokens, one would be 5 %.
        assert torch.equal(mixture.argmax(-1), p.argmax(-1))
        moved.append((mixture - p).abs().max())
    assert max(moved) > 1e-4
