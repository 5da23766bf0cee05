"""Free text: its tasks, its measures, its rivals, and a run on a tiny model."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from benchmarks.experiments import text_measures as measures
from benchmarks.methods.free_text import Predictor, posterior, scaled, training_free
from benchmarks.tasks.free_text import read
from tests.benchmarks.support import parsed, rows_by, rows_with, run
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
    methods = rows_by(figures["methods"], "name", "chosen_by")
    assert list(methods) == [
        ("MAP", ""),
        ("Temperature scaling", "validation"),
        ("TFB", "training texts"),
        ("Posterior", "evidence"),
        ("Posterior", "agreement"),
        ("Posterior", "validation"),
    ]
    for row in methods.values():
        assert math.isfinite(row["nll"])
        assert 0 <= row["ece"] <= 1
    of_map = rows_with(figures["detectors"], name="MAP")
    scores = [row["score"] for row in of_map]
    assert scores == ["log-probability", "summed entropy"]
    (costs,) = figures["costs"]
    assert 0 <= costs["wrong_answers"] <= 6
    assert costs["fit_ratio"] > 0
    assert costs["score_ratio"] > 0
    assert "Area under risk-coverage" in finished.printed


@pytest.mark.parametrize("task", ["functions", "parameters", "types"])
def test_tasks_have_short_texts_of_their_own(task):
    train, validation, test = read(parsed("text --quiet", task=task, **SMALL), 0)
    assert len(train) == 10
    assert len(validation) == 4
    assert len(test) == 6
    texts = [*train, *validation, *test]
    assert len({text.prompt.casefold() for text in texts}) == 20
    for text in texts:
        assert text.prompt.endswith(":")
        assert text.answer.startswith(" ")


def test_a_sign_that_knows_all_wrong_answers_detects_them():
    wrong = torch.tensor([True, False, True, False])
    knowing = torch.tensor([3.0, 1.0, 2.0, 0.5])
    found = measures.detects(knowing, wrong)
    assert found["auroc"] == 1
    # The right answers are kept first.
    assert found["aurc"] == pytest.approx((0 + 0 + 1 / 3 + 2 / 4) / 4)
    mistaken = torch.tensor([0.0, 1.0, 0.1, 2.0])
    assert measures.detects(mistaken, wrong)["auroc"] == 0
    guessing = torch.ones(4)
    assert measures.detects(guessing, wrong)["auroc"] == 0.5


def test_nothing_detects_wrong_answers_where_all_are_wrong():
    all_wrong = torch.tensor([True, True])
    assert measures.detects(torch.ones(2), all_wrong)["auroc"] is None


@pytest.fixture(scope="module")
def batches():
    """Texts that the posterior is not fitted to."""
    return text_batches(seed=7)


@pytest.fixture(scope="module")
def of_model(la, batches):
    """The quality of the model itself."""
    return measures.quality(Predictor(la), batches)


def test_the_quality_of_the_model(la, batches, of_model):
    logits = []
    tokens = []
    for batch in batches:
        of_batch, labels = la.tokens(batch)
        logits.append(of_batch)
        tokens.append(labels)
    f = torch.cat(logits)
    y = torch.cat(tokens)
    is_right = f.argmax(-1) == y
    assert of_model["tokens"] == len(y)
    nll = cross_entropy(f, y).item()
    assert of_model["nll"] == pytest.approx(nll, rel=1e-5)
    assert of_model["token_accuracy"] == is_right.double().mean().item()


def test_a_temperature_makes_the_model_better(la, batches, of_model):
    predictor = scaled(la, batches)
    assert predictor.temperature > 1
    assert measures.quality(predictor, batches)["nll"] < of_model["nll"]


def test_the_posterior_has_the_same_draws_each_time(la, batches, of_model):
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
        of_draws = torch.stack([logits.softmax(-1) for logits in drawn])
        mixture = of_draws.mean(0)
        # Of 20 tokens, one would be 5 %.
        assert torch.equal(mixture.argmax(-1), f.argmax(-1))
        moved.append((mixture - p).abs().max())
    assert max(moved) > 1e-4
