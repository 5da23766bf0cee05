"""The experiment on stages at its smallest: its mixtures are `in_stages`'s."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import nll_loss

import laplace_lora_ext
from benchmarks.experiments import stages
from benchmarks.experiments.stages import FIRST_STAGE, Trial
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
from laplace_lora_ext.metrics import negative_log_likelihood
from laplace_lora_ext.tuning.gridsearch import scale_penalty
from tests.benchmarks.support import parsed, rows_by, run

# Methods and priors of all rows, and what tells foreign texts beside the probabilities.
ROWS = """\
map: mahalanobis
temperature_scaling validation:
temperature_scaling validation_elsewhere:
lowrank_kron validation_elsewhere: variances
second_mixture validation_elsewhere: variances
mc_dropout:
staged_map_1:
staged_map_1 held_out_temperature:
staged_map_1 held_out_penalised:
staged_1 held_out: variances
staged_1_amortized swapped:
staged_1_student swapped:
staged_map_1_student swapped:
staged_map_2: epistemic_entropy
staged_map_2 held_out_temperature: epistemic_entropy
staged_map_2 held_out_penalised: epistemic_entropy
staged_2 held_out: variances
staged_1 held_out_prior: variances
staged_diag held_out:
staged_kron held_out:
label_smoothing held_out:
"""
SIGNS = ["entropy", "maximum"]
VARIANCES = "epistemic_entropy summed_variance largest_variance"


def n_trainings(folder) -> int:
    return len(list(folder.glob("cache/fine-tuned-*.pt")))


def test_every_row_is_measured_and_every_training_is_shared(choices, tmp_path):
    command = "stages --members 2 --posteriors diag kron --rivals mc_dropout"
    figures = run(f"{command} --smoothing 0.2 {choices}", tmp_path / "results")
    rows = rows_by(figures["methods"], "method", "prior")
    expected = [line.split(":") for line in ROWS.splitlines()]
    assert [" ".join(keys).strip() for keys in rows] == [keys for keys, _ in expected]
    for row, (_, signs) in zip(rows.values(), expected, strict=True):
        assert 0 < row["nll"] < 10
        assert row["forward_passes"] > 0
        of_shifted = row["shifted"]["matplotlib"]
        others = signs.replace("variances", VARIANCES).split()
        assert set(of_shifted["auroc"]) == {*SIGNS, *others}
        # Its texts have labels, of another library.
        assert 0 < of_shifted["nll"] < 10
    trainings = {keys: row["trainings"] for keys, row in rows.items()}
    assert trainings["map", ""] == 1
    assert trainings["lowrank_kron", "validation_elsewhere"] == pytest.approx(1.8)
    assert trainings["staged_1_student", "swapped"] == pytest.approx(1.35)
    assert trainings["staged_2", "held_out"] == pytest.approx(2.1)
    assert trainings["label_smoothing", "held_out"] == pytest.approx(1.85)
    kept = {keys: row["megabytes"] for keys, row in rows.items()}
    adapter = kept["map", ""]
    assert adapter > 0
    assert kept["staged_map_2", ""] == 2 * adapter
    assert kept["staged_1_student", "swapped"] == adapter
    posterior = kept["staged_1", "held_out"]
    assert posterior > adapter
    assert kept["staged_2", "held_out"] == pytest.approx(2 * posterior)
    assert kept["staged_1_amortized", "swapped"] > posterior
    # No smoothing is the first member's first stage; any other amount has a first stage
    # of its own, and a second one if held-out texts choose it. The first stage is the
    # second training, too.
    smoothed = 2 if rows["label_smoothing", "held_out"]["chosen"] > 0 else 1
    assert n_trainings(tmp_path) == 1 + 2 * 2 + smoothed


def test_more_labels_choose_temperatures_of_the_model_that_has_all_texts(
    grammar, monkeypatch
):
    monkeypatch.setattr(stages, "MORE_LABELS", (4, 8, 16))
    asked = parsed(f"stages --quiet {grammar}")
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
    grammar += " --steps 120 --learning-rate 0.05"
    command = "stages --members 2 --no-ordinary --no-students --smoothing"
    command += f" --posteriors lowrank_kron head {grammar}"
    figures = run(command, tmp_path / "results")
    rows = rows_by(figures["methods"], "method", "prior")
    assert all(method.startswith("staged") for method, _ in rows)
    assert n_trainings(tmp_path) == 4
    # Ours by the list's way is ours.
    ours = rows["staged_1", "held_out"]
    by_list = rows["staged_lowrank_kron", "held_out"]
    for figure in ("nll", "chosen", "trainings"):
        assert by_list[figure] == pytest.approx(ours[figure], rel=1e-4)
    assert rows["staged_head", "held_out"]["nll"] != ours["nll"]
    asked = parsed(f"stages --quiet {grammar}")
    trial = Trial(prepare(asked, 0), asked, 0)
    model = trial._first_stage(0.0)
    logits = [model.logits(trial.held_loaders[HELD])]
    trial._add_member(model.model, 1)
    trial.train(model.model, trial.rest, FIRST_STAGE, 1)
    logits.append(model.logits(trial.held_loaders[HELD]))
    log_scales = np.log(np.geomspace(0.04, 20, 2000))

    def weight(members: list[Tensor], log_scale: float) -> float:
        scaled = math.exp(log_scale) * torch.stack(members)
        log_p = scaled.softmax(-1).mean(0).log()
        nll = nll_loss(log_p, trial.held_labels, reduction="sum").item()
        return math.exp(-nll - scale_penalty(log_scale))

    for count in (1, 2):
        weights = [weight(logits[:count], log_scale) for log_scale in log_scales]
        mean = np.average(log_scales, weights=weights)
        found = rows[f"staged_map_{count}", "held_out_penalised"]["chosen"]
        assert found == pytest.approx(math.exp(-mean), rel=0.02)
        # Otherwise it could be the scale itself.
        assert abs(math.log(found)) > 0.1


def test_a_mixture_is_that_of_in_stages(choices):
    asked = parsed(f"stages --quiet {choices}")
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
