"""The experiment on costs at its smallest, its rivals, and what becomes of those that fail."""

import sys

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.methods import METHODS, posterior
from benchmarks.options import CONTESTANTS
from benchmarks.random_models import random_llama, random_loader
from tests.benchmarks.support import flat, is_picture, run, small_shape

SMALL = {
    "hidden_sizes": 32,
    "layers": 1,
    "dtypes": "float32",
    "batch_size": 2,
    "batches": 1,
    "length": 6,
    "classes": 3,
    "repetitions": 2,
}


def test_the_benchmark_writes_table_figures_and_plot(tmp_path, capsys):
    keys = ["bare", "lowrank_kron", "stock_kron"]
    folder = tmp_path / "results"
    options = {**SMALL, "contestants": keys, "prediction_batch_sizes": [1, 2]}
    figures, printed, _ = run(capsys, folder, "cost", **options)
    phases = {
        key: {row["phase"]: row for row in figures["measurements"] if row["contestant"] == key}
        for key in keys
    }
    assert not figures["failures"]
    for key in keys:
        assert list(phases[key]) == ["fit", "predict 1", "predict 2"]
        for measured in phases[key].values():
            assert 0 < measured["minimum"] <= measured["median"] <= measured["maximum"]
            assert measured["repetitions"] == len(measured["seconds"]) == 2
            assert measured["peak_megabytes"] >= 0
            assert measured["in_bare_loops"] > 0
    assert phases["bare"]["fit"]["in_bare_loops"] == 1
    # Per layer, two dense factors of each of lora_A and lora_B, with q and v: 32 and 8 wide.
    kept = phases["stock_kron"]["fit"]["posterior_megabytes"]
    assert kept == 4 * 4 * (32**2 + 8**2) / 1e6
    assert 0 < phases["lowrank_kron"]["fit"]["posterior_megabytes"] < 0.02
    for series in figures["growth"]:
        assert len(series["seconds"]) == len(series["sizes"])
        assert series["name"] in printed
    assert "random" in figures["weights"]
    assert all(f"| {METHODS[key].title} " in printed for key in keys)
    assert is_picture(folder / "cost.png")


def test_contestants_over_the_limit_of_time_are_listed_and_stop_nothing(tmp_path, capsys):
    keys = ["lowrank_kron", "stock_diag"]
    options = {**SMALL, "limit": 0.01, "contestants": keys, "prediction_batch_sizes": 2}
    figures, printed, _ = run(capsys, tmp_path, "cost", **options)
    reason = "stopped: took longer than the limit of 0.01 s"
    assert f"- lowrank_kron (32, float32), {reason}" in printed
    assert f"- Stock diag (32, float32), {reason}" in printed
    assert figures["growth"]
    assert is_picture(tmp_path / "cost.png")


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux alone")
def test_what_needs_more_memory_fails_with_a_reason(tmp_path, capsys):
    options = {**SMALL, "hidden_sizes": 512, "memory_limit": 30, "contestants": "stock_kron"}
    figures, _, _ = run(capsys, tmp_path, "cost", **options, prediction_batch_sizes=8)
    assert "memory" in figures["failures"][0]["reason"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"contestants": "nobody"}, "invalid choice: 'nobody'"),
        ({"layers": [1, 1, 1]}, "cost: give 1 numbers of layers and batches"),
        ({"classes": 1}, "--classes must be from 2 to 1000"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, capsys, options, message):
    with pytest.raises(SystemExit) as error:
        main(["cost", *flat({**SMALL, "output": tmp_path, **options})])
    assert message in f"{error.value} {capsys.readouterr().err}"


def test_random_models_are_of_the_shape_and_dtype():
    shape = small_shape(dtype="bfloat16", target_modules=("q_proj", "v_proj", "lm_head"))
    model = random_llama(shape, "cpu", 0)
    frozen = [p for p in model.model.parameters() if not p.requires_grad]
    assert {p.dtype for p in frozen} == {torch.bfloat16}
    trainable = [p for p in model.model.parameters() if p.requires_grad]
    assert len(trainable) == len(model.lora_weights) == 6
    assert all(p.any() for p in trainable)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("key", CONTESTANTS)
def test_every_rival_predicts_a_distribution_broader_than_the_models(key):
    shape = small_shape(layers=2)
    (batch,) = random_loader(shape, 1, "cpu", 1, batch_size=5)
    model = random_llama(shape, "cpu", 0)
    expected = model.logits([batch]).softmax(-1)
    la = posterior(key).build(model)
    la.fit(random_loader(shape, 2, "cpu", 0))
    probabilities = la(batch, pred_type="glm", link_approx="probit").detach()
    if key == "bare":
        torch.testing.assert_close(probabilities, expected)
        return
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(5))
    assert not torch.allclose(probabilities, expected, rtol=1e-6, atol=0)
    assert (probabilities.max(-1).values <= expected.max(-1).values + 1e-6).all()


def test_the_bare_loop_runs_one_forward_and_so_many_backward_passes():
    shape = small_shape()
    model = random_llama(shape, "cpu", 0)
    calls = {"forward": 0, "backward": 0}
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default"

    def after_forward(module, inputs, output):
        calls["forward"] += 1
        output.register_hook(lambda _: calls.update(backward=calls["backward"] + 1))

    model.model.get_submodule(name).register_forward_hook(after_forward)
    bare = posterior("bare").build(model)
    bare.fit(random_loader(shape, 2, "cpu", 0))
    assert calls == {"forward": 2, "backward": 2 * (shape.classes - 1)}
    bare(next(iter(random_loader(shape, 1, "cpu", 0))))
    assert calls == {"forward": 3, "backward": 2 * (shape.classes - 1) + shape.classes}
