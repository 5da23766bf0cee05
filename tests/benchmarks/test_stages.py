"""The experiment on stages at its smallest: its mixtures are `in_stages`'s."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy

import laplace_lora_ext
from benchmarks.experiments import stages
from benchmarks.experiments.stages import Trial
from benchmarks.fine_tuning import (
    MEMBER_SEEDS,
    TEST,
    TRAIN,
    fine_tune,
    prepare,
    untrained,
)
from benchmarks.held_out import HELD
from benchmarks.methods.method import fit_temperature, labels_of
from benchmarks.options import Stages
from laplace_lora_ext.metrics import negative_log_likelihood
from laplace_lora_ext.tuning.gridsearch import PENALTY
from tests.benchmarks.support import rows_by, run, write_grammar


@pytest.fixture
def options(tiny_models, tmp_path):
    return {
        "task": "choices",
        "model": tiny_models[True],
        "train_examples": 20,
        "test_examples": 12,
        "shifted_examples": 8,
        "files_per_library": 30,
        "steps": 10,
        "learning_rate": 0.01,
        "cache": tmp_path / "cache",
        "members": 2,
    }


EXPECTED_ROWS = [
    ("map", ""),
    ("temperature_scaling", "validation"),
    ("temperature_scaling", "validation_elsewhere"),
    ("lowrank_kron", "validation_elsewhere"),
    ("second_mixture", "validation_elsewhere"),
    ("staged_map_1", ""),
    ("staged_map_1", "held_out_temperature"),
    ("staged_1", "held_out"),
    ("staged_1_amortized", "swapped"),
    ("staged_1_student", "swapped"),
    ("staged_map_1_student", "swapped"),
    ("staged_map_2", ""),
    ("staged_map_2", "held_out_temperature"),
    ("staged_2", "held_out"),
    ("staged_map_1", "held_out_penalised"),
    ("staged_1", "held_out_prior"),
    ("staged_diag", "held_out"),
    ("staged_kron", "held_out"),
    ("label_smoothing", "held_out"),
]
OF_VARIANCES = {"epistemic_entropy", "summed_variance", "largest_variance"}
# What tells foreign texts, beside entropy and maximum.
SIGNS = {
    ("map", ""): {"mahalanobis"},
    ("lowrank_kron", "validation_elsewhere"): OF_VARIANCES,
    ("second_mixture", "validation_elsewhere"): OF_VARIANCES,
    ("staged_1", "held_out"): OF_VARIANCES,
    ("staged_1", "held_out_prior"): OF_VARIANCES,
    ("staged_map_2", ""): {"epistemic_entropy"},
    ("staged_map_2", "held_out_temperature"): {"epistemic_entropy"},
    ("staged_2", "held_out"): OF_VARIANCES,
}


def test_every_row_is_measured_and_every_training_is_shared(options, tmp_path):
    folder = tmp_path / "results"
    command = "stages --posteriors diag kron"
    finished = run(folder, command, **options, smoothing=[0.2])
    rows = rows_by(finished.figures["methods"], "method", "prior")
    assert list(rows) == EXPECTED_ROWS
    for keys, row in rows.items():
        assert 0 < row["nll"] < 10
        assert 0 <= row["aurc"] <= 1
        assert 0 <= row["share_at_realised"] <= 1
        of_shifted = row["shifted"]["matplotlib"]
        signs = {"entropy", "maximum"} | SIGNS.get(keys, set())
        assert set(of_shifted["auroc"]) == signs
        assert of_shifted["auroc"]["entropy"] == of_shifted["shift_auroc"]
        # Its texts have labels, of another library.
        assert 0 < of_shifted["nll"] < 10
    assert rows["staged_2", "held_out"]["trainings"] == pytest.approx(2.1)
    ordinary = 1
    # Two stages of two members; the first of the second is a second training too.
    staged = 2 * 2
    # No smoothing is the first member's first stage; any other amount has a first stage
    # of its own, and a second one if held-out texts choose it.
    smoothed = 1
    if rows["label_smoothing", "held_out"]["chosen"] > 0:
        smoothed = 2
    trainings = list((tmp_path / "cache").glob("fine-tuned-*.pt"))
    assert len(trainings) == ordinary + staged + smoothed
    assert "Reading" in finished.progress


@pytest.fixture
def of_encoder(tiny_models, tmp_path):
    write_grammar(tmp_path)
    return {
        "task": "cola",
        "data": tmp_path,
        "model": tiny_models[False],
        "members": 1,
        "steps": 20,
        "learning_rate": 0.01,
        "batch_size": 8,
        "cache": tmp_path / "cache",
    }


def test_posteriors_of_the_list_take_part_without_a_further_training(
    of_encoder, tmp_path
):
    command = "stages --no-students --smoothing --posteriors lowrank_kron head"
    finished = run(tmp_path / "results", command, **of_encoder)
    rows = rows_by(finished.figures["methods"], "method", "prior")
    for method, _ in rows:
        assert "student" not in method
        assert "amortized" not in method
    assert ("label_smoothing", "held_out") not in rows
    # Ours by the list's way is ours.
    ours = rows["staged_1", "held_out"]
    by_list = rows["staged_lowrank_kron", "held_out"]
    for figure in ("nll", "chosen", "trainings"):
        assert by_list[figure] == pytest.approx(ours[figure], rel=1e-4)
    assert rows["staged_head", "held_out"]["nll"] != ours["nll"]
    trainings = list((tmp_path / "cache").glob("fine-tuned-*.pt"))
    assert len(trainings) == 4  # as usual, a second time, and two stages


def test_more_labels_choose_temperatures_of_the_model_that_has_all_texts(
    of_encoder, monkeypatch
):
    monkeypatch.setattr(stages, "MORE_LABELS", (4, 8, 16))
    asked = Stages(quiet=True, **of_encoder)
    pretrained = prepare(asked, 0)
    # Half of those that are asked for last.
    further = pretrained.task.test[:8]
    task = replace(pretrained.task, further=further)
    trial = Trial(replace(pretrained, task=task), asked, 0)
    rows = rows_by(list(trial.ordinary()), "method", "prior")
    assert ("temperature_scaling", "further_4") in rows
    assert ("temperature_scaling", "further_16") not in rows
    model = fine_tune(pretrained, pretrained.data[TRAIN], 0)
    records = pretrained.records(further)
    logits = model.logits(pretrained.loader(records))
    temperature = fit_temperature(logits, labels_of(records))
    row = rows["temperature_scaling", "further_8"]
    assert row["chosen"] == pytest.approx(temperature)
    assert row["trainings"] == 1


def test_stages_alone_have_a_temperature_with_the_penalty(of_encoder, tmp_path):
    command = "stages --no-ordinary --no-students --smoothing"
    finished = run(tmp_path / "results", command, **of_encoder)
    rows = rows_by(finished.figures["methods"], "method", "prior")
    assert all(method.startswith("staged") for method, _ in rows)
    assert len(list((tmp_path / "cache").glob("fine-tuned-*.pt"))) == 2
    asked = Stages(quiet=True, **of_encoder)
    trial = Trial(prepare(asked, 0), asked, 0)
    logits = trial._first_stage(0.0).logits(trial.held_loaders[HELD])

    def objective(scale: float) -> float:
        nll = cross_entropy(scale * logits, trial.held_labels, reduction="sum").item()
        return nll + PENALTY * max(math.log(scale), 0) ** 2

    best = min(np.geomspace(0.04, 20, 2000), key=objective)
    found = rows["staged_map_1", "held_out_penalised"]["chosen"]
    assert found == pytest.approx(1 / best, rel=0.02)


def nll_of(la, pretrained):
    """Compute the mean negative log-likelihood of the test texts."""
    test = pretrained.data[TEST]
    predicted = [
        la(batch, link_approx="mean_field") for batch in pretrained.loader(test)
    ]
    probabilities = torch.cat(predicted).detach()
    return negative_log_likelihood(probabilities, labels_of(test))


def test_a_mixture_is_that_of_in_stages(options):
    asked = Stages(quiet=True, no_students=True, **options)
    pretrained = prepare(asked, 0)
    trial = Trial(pretrained, asked, 0)

    def train(model, examples, share):
        name = model.active_adapter
        number = 0 if name == "default" else int(name.removeprefix("member_"))
        trial.train(model, list(examples), share, number)

    model = untrained(pretrained, 0)
    transformers.set_seed(MEMBER_SEEDS)  # decides the second member's first weights
    mixture = laplace_lora_ext.in_stages(
        train,
        model,
        pretrained.loader(pretrained.data[TRAIN]),
        members=2,
        likelihood="classification",
        class_token_ids=pretrained.class_token_ids,
    )
    expected = nll_of(mixture, pretrained)
    rows = rows_by(list(trial.in_stages(members=2)), "method", "prior")
    assert rows["staged_2", "held_out"]["nll"] == pytest.approx(expected, rel=1e-6)
