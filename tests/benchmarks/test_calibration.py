"""The experiment on calibration at its smallest, and its summaries."""

from types import SimpleNamespace

import pytest
import torch

import laplace_lora_ext
from benchmarks.experiments import calibration
from benchmarks.experiments.calibration import CONTESTANTS, Trial, chosen_methods
from benchmarks.experiments.calibration_report import FIGURES, summarize
from benchmarks.methods import METHODS
from benchmarks.methods.method import Posterior
from benchmarks.methods.priors import (
    BY_TRAINING,
    DESCENT,
    ELSEWHERE,
    GRID_SEARCH,
    LINKS,
    LINKS_OF_DESCENT,
    SEVERAL,
    TEMPERATURE,
)
from tests.benchmarks.support import is_picture, run
from tests.support.dense import jacobian, logits_of, unpadded
from tests.support.models import lora_model, ragged_batches

LAPLACE = [key for key in CONTESTANTS if isinstance(METHODS[key], Posterior)]
ENSEMBLES = {"mc_dropout", "checkpoint_ensemble", "deep_ensemble", "tfb", "blob", "ivon"}
BY_DATA = [key for key in LAPLACE if METHODS[key].on_training]


def test_the_benchmark_measures_every_method_and_draws_its_figures(tmp_path, capsys, tiny_models):
    sizes = {"train_examples": 10, "test_examples": 12, "shifted_examples": 8}
    training = {"steps": 3, "checkpoints": 2, "samples": 20, "trainings": 2}
    files = {"files_per_library": 30, "cache": tmp_path / "cache"}
    folder = tmp_path / "results"
    options = {"task": "choices", "model": tiny_models[True], **sizes, **training, **files}
    figures, _, progress = run(capsys, folder, "calibration", "--curves", **options)
    rows = figures["methods"]
    with_split = [row for row in rows if row["protocol"] == "80/20 split"]
    without = {row["method"] for row in rows if row["protocol"] == "whole training set"}
    assert without == {"map", *ENSEMBLES, "temperature_scaling", *LAPLACE}
    assert {row["method"] for row in with_split} == {"map", "temperature_scaling", *LAPLACE}
    reading = {key for key, prior in BY_TRAINING.items() if prior.reads}
    by_evidence = [row for row in rows if row["prior"] in BY_TRAINING.keys() - reading]
    assert len(by_evidence) == len(LAPLACE) * len(LINKS) * 2
    with_data = [row for row in rows if row["prior"] in reading]
    kinds = len(LINKS) * len(reading)
    assert [row["method"] for row in with_data[::kinds]] == BY_DATA
    for key in LAPLACE:  # validation data prefer one link of each structure
        own = [row for row in with_split if row["method"] == key]
        scalar, layerwise = (
            {row["link"]: row["is_choice"] for row in own if row["prior"] == prior.key}
            for prior in (GRID_SEARCH, DESCENT)
        )
        assert len(scalar) == len(LINKS)
        assert sum(scalar.values()) == 1
        assert set(layerwise) == (set() if key in ("diag", "kron") else set(LINKS_OF_DESCENT))
        assert sum(layerwise.values()) == bool(layerwise)
    chosen = {}  # by validation data, for their own training and for the other
    for row in rows:
        if row["prior"] in (GRID_SEARCH.key, TEMPERATURE.key, ELSEWHERE.key):
            chosen.setdefault((row["method"], row["link"]), []).append(row["chosen"])
    assert len(chosen) == len(LAPLACE) * len(LINKS) + 1
    for elsewhere, own in chosen.values():
        assert elsewhere == pytest.approx(own, rel=1e-6)
    several = [row for row in rows if row["prior"] == SEVERAL.key]
    assert [(row["method"], row["link"]) for row in several] == [("lowrank_kron", "mean_field")]
    for row in (*rows, *figures["along_training"]):
        assert 0 < row["nll"] < 50
        assert row["fit_seconds"] >= 0 < row["predict_seconds"]
        assert 0 <= row["shifted"]["matplotlib"]["shift_auroc"] <= 1
        assert 0 <= row["shifted"]["matplotlib"]["accuracy"] <= 1
    assert {row["step"] for row in figures["along_training"]} == {1, 3}
    assert sum(figures["variance_by_layer"].values()) == pytest.approx(1)
    groups = figures["jacobians_by_margin"]
    margins = [group["margin"] for group in groups]
    assert margins == sorted(margins)
    assert margins[0] >= 0
    assert all(group["squared_norm"] > 0 for group in groups)
    for figure in ("calibration_reliability", "selective_accuracy", "along_training", "layers"):
        assert is_picture(folder / f"{figure}.png")
    assert "Training" in progress


def test_whole_trains_on_all_texts_alone(tmp_path, capsys, tiny_models, monkeypatch):
    trained = []
    own = calibration.fine_tune
    monkeypatch.setattr(
        calibration, "fine_tune", lambda *given: trained.append(len(given[1])) or own(*given)
    )
    options = {"task": "choices", "model": tiny_models[True], "train_examples": 10, "samples": 5}
    options |= {"test_examples": 12, "shifted_examples": 8, "steps": 3, "checkpoints": 2}
    files = {"files_per_library": 30, "cache": tmp_path / "cache"}
    methods = {"methods": ("temperature_scaling", "kron")}
    arguments = tmp_path / "results", "calibration", "--whole"
    figures, *_ = run(capsys, *arguments, **options, **files, **methods)
    assert trained == [10]
    assert {row["method"] for row in figures["methods"]} == {"map", "kron"}


def test_methods_can_be_chosen_by_key_or_title():
    assert chosen_methods(None) == list(CONTESTANTS)
    assert chosen_methods(["Stock diag"]) == ["diag"]
    assert chosen_methods(["lowrank_kron", "MC dropout"]) == ["mc_dropout", "lowrank_kron"]
    with pytest.raises(SystemExit, match=r"No method is called 'Stock dig'; known are: map \(MAP"):
        chosen_methods(["Stock dig", "kron"])


def test_summaries_are_means_and_deviations_over_seeds():
    figures = dict.fromkeys(FIGURES, 0.5)
    rows = [
        {
            **{"protocol": "80/20 split", "name": "m", "chosen_by": "validation", "link": link},
            **{**figures, "nll": nll, "is_choice": chosen, "seed": seed, "shifted": {}},
        }
        for seed, link, nll, chosen in (
            (0, "mc", 1.0, True),
            (1, "mc", 3.0, False),
            (1, "p", 2.0, True),
        )
    ]
    summary = {row["link"]: row["nll"] for row in summarize(rows)}
    # "p" has one seed alone, so that there is nothing to spread.
    assert summary == {"mc": "2.000 ± 1.414", "preferred": "1.500 ± 0.707", "p": "2.000"}


def test_jacobians_of_margins_are_those_of_autograd():
    batch = ragged_batches(seed=5)[0]
    model, labels = lora_model("bert").eval(), batch["labels"]
    la = laplace_lora_ext.Laplace(
        lora_model("bert").eval(), "classification", "lora", "lowrank_kron"
    )
    la.fit(ragged_batches())
    texts = [unpadded(batch, row) for row in range(len(labels))]
    Js = torch.stack([jacobian(model, text) for text in texts])
    f_mu = torch.stack([logits_of(model, text).detach() for text in texts])
    trial = SimpleNamespace(
        _posterior_and_statistics=(la, la.predictive_statistics([batch])),
        _labels={"test": labels},
    )
    groups = Trial.jacobians_by_margin(trial)
    top = f_mu.topk(2)
    rows = torch.arange(len(f_mu))
    norms = (Js[rows, top.indices[:, 0]] - Js[rows, top.indices[:, 1]]).square().sum(1)
    margins = top.values[:, 0] - top.values[:, 1]
    order = margins.argsort()
    assert [group["margin"] for group in groups] == pytest.approx(margins[order].tolist())
    assert [group["squared_norm"] for group in groups] == pytest.approx(norms[order].tolist())
    right = (f_mu.argmax(1) == labels)[order].double().tolist()
    assert [group["accuracy"] for group in groups] == right
