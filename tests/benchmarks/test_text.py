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
from tests.benchmarks.support import (
    parsed,
    rows_by,
    rows_with,
    run,
    values_of,
)
from tests.support.models import lora_model
from tests.support.texts import fitted_text, text_batches

SMALL = {
    "train_examples": 10,
    "validation_examples": 4,
    "test_examples": 6,
    "files_per_library": 4,
}


# --- the experiment -------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_models):
    """A run of a tiny model."""
    folder = tmp_path_factory.mktemp("text")
    return run(
        folder,
        "text --quiet",
        **SMALL,
        model=tiny_models[True],
        cache=folder / "cache",
        epochs=1,
        draws=2,
        grid_size=3,
    )


def test_every_method_is_measured(finished):
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


def test_doubts_of_the_model_are_measured_as_signs_of_wrong_answers(finished):
    detectors = finished.figures["detectors"]
    of_map = rows_with(detectors, name="MAP")
    scores = values_of(of_map, "score")
    assert scores == ["log-probability", "summed entropy"]
    assert "Area under risk-coverage" in finished.printed


def test_costs_are_measured(finished):
    (costs,) = finished.figures["costs"]
    assert 0 <= costs["wrong_answers"] <= 6
    assert costs["fit_ratio"] > 0
    assert costs["score_ratio"] > 0


# --- tasks ----------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["functions", "parameters", "types"])
def test_tasks_have_short_texts_of_their_own(task):
    options = parsed("text --quiet", task=task, **SMALL)
    train, validation, test = read(options, 0)
    assert len(train) == 10
    assert len(validation) == 4
    assert len(test) == 6
    # Not even a capital tells two prompts apart.
    prompts = set()
    for text in (*train, *validation, *test):
        prompts.add(text.prompt.casefold())
        assert text.prompt.endswith(":")
        assert text.answer.startswith(" ")
    assert len(prompts) == 20


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
    found = measures.detects(torch.tensor(sign), WRONG)
    assert found["auroc"] == auroc


def test_a_sign_that_knows_all_wrong_answers_keeps_the_right_ones_first():
    knowing = torch.tensor([3.0, 1.0, 2.0, 0.5])
    found = measures.detects(knowing, WRONG)
    # Of one to four answers.
    risks = [0, 0, 1 / 3, 2 / 4]
    assert found["aurc"] == pytest.approx(sum(risks) / 4)


def test_nothing_detects_wrong_answers_where_all_are_wrong():
    sign = torch.ones(2)
    all_wrong = torch.tensor([True, True])
    found = measures.detects(sign, all_wrong)
    assert found["auroc"] is None


# --- rivals ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def la():
    """A posterior over a model of texts, which the rivals share."""
    model = lora_model("gpt2", torch.float32)
    return fitted_text(model.eval(), prior_precision=50.0)


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
        of_batch, labels = tokens_of(la, batch)
        logits.append(of_batch)
        tokens.append(labels)
    f = torch.cat(logits)
    y = torch.cat(tokens)
    assert of_model["tokens"] == len(y)
    nll = cross_entropy(f, y).item()
    assert of_model["nll"] == pytest.approx(nll, rel=1e-5)
    is_right = f.argmax(-1) == y
    accuracy = is_right.double().mean()
    assert of_model["token_accuracy"] == accuracy.item()


def test_a_temperature_makes_the_model_better(la, batches, of_model):
    predictor = scaled(la, batches)
    # The model is too sure of texts that it has not seen.
    assert predictor.temperature > 1
    tempered = measures.quality(predictor, batches)
    assert tempered["nll"] < of_model["nll"]


def test_the_posterior_has_the_same_draws_each_time(la, batches, of_model):
    first = posterior(la, draws=3)
    second = posterior(la, draws=3)
    drawn = measures.quality(first, batches)
    again = measures.quality(second, batches)
    assert drawn == again
    assert drawn["nll"] != of_model["nll"]


def test_noise_of_tfb_changes_next_to_no_token(la):
    batches = text_batches()
    predictor = training_free(la, draws=3, texts=batches)
    moved = []
    for batch in batches:
        f, drawn, _ = predictor(batch)
        p = f.softmax(-1)
        of_draws = [logits.softmax(-1) for logits in drawn]
        mixture = torch.stack(of_draws).mean(0)
        # Of 20 tokens, one would be 5 %.
        assert torch.equal(mixture.argmax(-1), p.argmax(-1))
        change = (mixture - p).abs()
        moved.append(change.max())
    assert max(moved) > 1e-4
