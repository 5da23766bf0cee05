"""The experiment on training in stages at its smallest; its mixtures are those of `in_stages`."""

import pytest
import torch
import transformers

import laplace_lora_ext
from benchmarks.experiments.stages import Trial
from benchmarks.fine_tuning import MEMBER_SEEDS, TEST, prepare, untrained
from benchmarks.options import Stages
from laplace_lora_ext.metrics import negative_log_likelihood
from tests.benchmarks.support import is_picture, run


@pytest.fixture
def options(tiny_models, tmp_path):
    sizes = {"train_examples": 20, "test_examples": 12, "shifted_examples": 8, "steps": 10}
    files = {"files_per_library": 30, "cache": tmp_path / "cache"}
    return {"task": "choices", "model": tiny_models[True], "learning_rate": 0.01, **sizes, **files}


def test_every_row_is_measured_and_every_training_is_shared(options, tmp_path, capsys):
    folder = tmp_path / "results"
    smoothing = {"smoothing": (0.2,), "members": 2}
    figures, _, progress = run(capsys, folder, "stages", **options, **smoothing)
    rows = {(row["method"], row["prior"]): row for row in figures["methods"]}
    assert len(rows) == len(figures["methods"])
    both = ("training_texts", "swapped")
    assert rows.keys() == {
        ("map", ""),
        ("temperature_scaling", "validation"),
        *((key, "validation_elsewhere") for key in ("temperature_scaling", "lowrank_kron")),
        ("second_mixture", "validation_elsewhere"),
        *((f"staged_map_{n}", prior) for n in (1, 2) for prior in ("", "held_out_temperature")),
        *((f"staged_{n}", "held_out") for n in (1, 2)),
        *((f"staged_1_{kind}", prior) for kind in ("amortized", "student") for prior in both),
        *((f"staged_2_{kind}", "swapped") for kind in ("amortized", "student")),
        ("staged_map_1_student", "swapped"),
        ("label_smoothing", "held_out"),
    }
    assert all(0 < row["nll"] < 10 for row in rows.values())
    assert rows["staged_2", "held_out"]["trainings"] == pytest.approx(2.1)
    # The ordinary one; two stages of two members, the second of whom is a second training too.
    smoothed = 1 + (rows["label_smoothing", "held_out"]["chosen"] > 0)
    assert len(list((tmp_path / "cache").glob("fine-tuned-*.pt"))) == 1 + 2 * 2 + smoothed
    assert is_picture(folder / "reliability.png")
    assert "Reading" in progress


def test_a_mixture_is_that_of_in_stages(options, monkeypatch):
    student = "benchmarks.experiments.stages.predict_with_student"
    monkeypatch.setattr(student, lambda *args: {TEST: torch.full((12, 4), 0.25)})
    asked = Stages(quiet=True, members=2, **options)
    pretrained = prepare(asked, 0)
    trial = Trial(pretrained, 0)
    trial.seconds = {"bare": 1.0, "exact": 1.0}

    def train(model, examples, share):
        name = model.active_adapter
        number = 0 if name == "default" else int(name.removeprefix("member_"))
        trial.train(model, list(examples), share, number)

    how = {"likelihood": "classification", "class_token_ids": pretrained.class_token_ids}
    loader = pretrained.loader("train")
    model = untrained(pretrained, 0)
    transformers.set_seed(MEMBER_SEEDS)  # decides the second member's first weights
    mixture = laplace_lora_ext.in_stages(train, model, loader, members=2, **how)
    test = pretrained.loader(TEST)
    found = torch.cat([mixture(batch, link_approx="mean_field").detach() for batch in test])
    labels = torch.tensor([record["labels"] for record in test.dataset])
    rows = {(row["method"], row["prior"]): row for row in trial.in_stages()}
    nll = negative_log_likelihood(found, labels)
    assert rows["staged_2", "held_out"]["nll"] == pytest.approx(nll, rel=1e-6)
