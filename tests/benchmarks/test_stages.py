"""The experiment on training in stages at its smallest; its mixtures are those of `in_stages`."""

import pytest
import torch
import transformers

import laplace_lora_ext
from benchmarks.experiments.stages import Seconds, Trial
from benchmarks.fine_tuning import MEMBER_SEEDS, TEST, TRAIN, prepare, untrained
from benchmarks.methods.method import labels_of
from benchmarks.options import Stages
from laplace_lora_ext.metrics import negative_log_likelihood
from tests.benchmarks.support import is_picture, run


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
    ("staged_1_amortized", "training_texts"),
    ("staged_1_student", "training_texts"),
    ("staged_1_amortized", "swapped"),
    ("staged_1_student", "swapped"),
    ("staged_map_1_student", "swapped"),
    ("staged_1", "held_out_prior"),
    ("staged_map_2", ""),
    ("staged_map_2", "held_out_temperature"),
    ("staged_2", "held_out"),
    ("staged_2_amortized", "swapped"),
    ("staged_2_student", "swapped"),
    ("label_smoothing", "held_out"),
]


def test_every_row_is_measured_and_every_training_is_shared(options, tmp_path, capsys):
    folder = tmp_path / "results"
    finished = run(capsys, folder, "stages", **options, smoothing=[0.2])
    rows = {(row["method"], row["prior"]): row for row in finished.figures["methods"]}
    assert len(rows) == len(finished.figures["methods"])
    assert list(rows) == EXPECTED_ROWS
    assert all(0 < row["nll"] < 10 for row in rows.values())
    assert rows["staged_2", "held_out"]["trainings"] == pytest.approx(2.1)
    ordinary = 1
    staged = 2 * 2  # two stages of two members; the first of the second is a second training too
    # No smoothing is the first member's first stage; any other amount has a first stage of its
    # own, and a second one if held-out texts choose it.
    smoothed = 1
    if rows["label_smoothing", "held_out"]["chosen"] > 0:
        smoothed = 2
    trainings = list((tmp_path / "cache").glob("fine-tuned-*.pt"))
    assert len(trainings) == ordinary + staged + smoothed
    assert is_picture(folder / "reliability.png")
    assert "Reading" in finished.progress


def test_a_mixture_is_that_of_in_stages(options, monkeypatch):
    def untaught(*args):
        return {TEST: torch.full((12, 4), 0.25)}

    monkeypatch.setattr("benchmarks.experiments.stages.predict_with_student", untaught)
    pretrained = prepare(Stages(quiet=True, **options), 0)
    trial = Trial(pretrained, 0)
    trial.seconds = Seconds(bare=1.0, exact=1.0)

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
    batches = pretrained.loader(test)
    predictions = [mixture(batch, link_approx="mean_field").detach() for batch in batches]
    nll = negative_log_likelihood(torch.cat(predictions), labels_of(test))
    rows = {(row["method"], row["prior"]): row for row in trial.in_stages(members=2)}
    assert rows["staged_2", "held_out"]["nll"] == pytest.approx(nll, rel=1e-6)
