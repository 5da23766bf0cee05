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
    HELD,
    MEMBER_SEEDS,
    TEST,
    TRAIN,
    fine_tune,
    labels_of,
    prepare,
    untrained,
)
from benchmarks.methods.method import fit_temperature
from benchmarks.options import Stages
from laplace_lora_ext.metrics import negative_log_likelihood
from laplace_lora_ext.tuning.gridsearch import PENALTY
from tests.benchmarks.support import rows_by, run

OF_VARIANCES = {"epistemic_entropy", "summed_variance", "largest_variance"}
OF_MEMBERS = {"epistemic_entropy"}
# Each row, and what tells foreign texts beside entropy and maximum.
ROWS = {
    ("map", ""): {"mahalanobis"},
    ("temperature_scaling", "validation"): set(),
    ("temperature_scaling", "validation_elsewhere"): set(),
    ("lowrank_kron", "validation_elsewhere"): OF_VARIANCES,
    ("second_mixture", "validation_elsewhere"): OF_VARIANCES,
    ("mc_dropout", ""): set(),
    ("staged_map_1", ""): set(),
    ("staged_map_1", "held_out_temperature"): set(),
    ("staged_1", "held_out"): OF_VARIANCES,
    ("staged_1_amortized", "swapped"): set(),
    ("staged_1_student", "swapped"): set(),
    ("staged_map_1_student", "swapped"): set(),
    ("staged_map_2", ""): OF_MEMBERS,
    ("staged_map_2", "held_out_temperature"): OF_MEMBERS,
    ("staged_2", "held_out"): OF_VARIANCES,
    ("staged_map_1", "held_out_penalised"): set(),
    ("staged_1", "held_out_prior"): OF_VARIANCES,
    ("staged_diag", "held_out"): set(),
    ("staged_kron", "held_out"): set(),
    ("label_smoothing", "held_out"): set(),
}


def n_trainings(options) -> int:
    return len(list(options["cache"].glob("fine-tuned-*.pt")))


def test_every_row_is_measured_and_every_training_is_shared(choices, tmp_path):
    command = "stages --members 2 --posteriors diag kron --rivals mc_dropout"
    finished = run(tmp_path / "results", command, **choices, smoothing=[0.2])
    rows = rows_by(finished.figures["methods"], "method", "prior")
    assert list(rows) == list(ROWS)
    for keys, row in rows.items():
        assert 0 < row["nll"] < 10
        assert row["forward_passes"] > 0
        of_shifted = row["shifted"]["matplotlib"]
        assert set(of_shifted["auroc"]) == {"entropy", "maximum"} | ROWS[keys]
        # Its texts have labels, of another library.
        assert 0 < of_shifted["nll"] < 10
    trainings = {keys: row["trainings"] for keys, row in rows.items()}
    assert trainings["map", ""] == 1
    assert trainings["lowrank_kron", "validation_elsewhere"] == pytest.approx(1.8)
    assert trainings["staged_1_student", "swapped"] == pytest.approx(1.35)
    assert trainings["staged_2", "held_out"] == pytest.approx(2.1)
    assert trainings["label_smoothing", "held_out"] == pytest.approx(1.85)
    # No smoothing is the first member's first stage; any other amount has a first stage
    # of its own, and a second one if held-out texts choose it. The first stage is the
    # second training, too.
    smoothed = 2 if rows["label_smoothing", "held_out"]["chosen"] > 0 else 1
    assert n_trainings(choices) == 1 + 2 * 2 + smoothed
    assert "Reading" in finished.progress


def test_more_labels_choose_temperatures_of_the_model_that_has_all_texts(
    grammar, monkeypatch
):
    monkeypatch.setattr(stages, "MORE_LABELS", (4, 8, 16))
    asked = Stages(quiet=True, **grammar)
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


def test_stages_alone_have_a_temperature_with_the_penalty_and_other_posteriors(
    grammar, tmp_path
):
    # Until the model is surer than right.
    grammar |= {"steps": 120, "learning_rate": 0.03}
    command = "stages --members 1 --no-ordinary --no-students --smoothing"
    command += " --posteriors lowrank_kron head"
    finished = run(tmp_path / "results", command, **grammar)
    rows = rows_by(finished.figures["methods"], "method", "prior")
    for method, _ in rows:
        assert method.startswith("staged")
        assert "student" not in method
        assert "amortized" not in method
    assert n_trainings(grammar) == 2
    # Ours by the list's way is ours.
    ours = rows["staged_1", "held_out"]
    by_list = rows["staged_lowrank_kron", "held_out"]
    for figure in ("nll", "chosen", "trainings"):
        assert by_list[figure] == pytest.approx(ours[figure], rel=1e-4)
    assert rows["staged_head", "held_out"]["nll"] != ours["nll"]
    asked = Stages(quiet=True, **grammar)
    trial = Trial(prepare(asked, 0), asked, 0)
    logits = trial._first_stage(0.0).logits(trial.held_loaders[HELD])

    def objective(scale: float) -> float:
        nll = cross_entropy(scale * logits, trial.held_labels, reduction="sum").item()
        return nll + PENALTY * max(math.log(scale), 0) ** 2

    best = min(np.geomspace(0.04, 20, 2000), key=objective)
    found = rows["staged_map_1", "held_out_penalised"]["chosen"]
    assert found == pytest.approx(1 / best, rel=0.02)
    # Otherwise it could be the scale itself.
    assert abs(math.log(found)) > 0.1


def test_a_mixture_is_that_of_in_stages(choices):
    asked = Stages(quiet=True, no_students=True, **choices)
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
    test = pretrained.data[TEST]
    of_batches = [
        mixture(batch, link_approx="mean_field") for batch in pretrained.loader(test)
    ]
    p = torch.cat(of_batches).detach()
    expected = negative_log_likelihood(p, labels_of(test))
    rows = rows_by(list(trial.in_stages(members=2)), "method", "prior")
    assert rows["staged_2", "held_out"]["nll"] == pytest.approx(expected, rel=1e-6)
