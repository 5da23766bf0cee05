"""The benchmarks of costs at their smallest, and what becomes of contestants that fail."""

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.growth import growth
from benchmarks.measuring import (
    SHARE_OF_LIMIT,
    growth_exponent,
    reason_of,
    repeated_seconds,
    run_limited,
)
from benchmarks.random_models import Shape, lora_weights, random_llama, random_loader
from benchmarks.rivals import NAMES, RIVALS, Trial, bare_loop, needed_megabytes
from laplace_lora_ext.models.logits_model import LogitsModel

SMALL = {
    "--hidden-sizes": 32,
    "--layers": 1,
    "--dtypes": "float32",
    "--batch-size": 2,
    "--batches": 1,
    "--length": 6,
    "--classes": 3,
    "--repetitions": 2,
    "--growth-widths": 32,
    "--threads": 1,
}


def flat(options):
    return [str(part) for option in options.items() for part in option]


def run_benchmark(command, options, *more):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", command, *flat(options), *more],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
    )


def small_shape(**changes):
    sizes = {
        "hidden_size": 32,
        "layers": 1,
        "intermediate_size": 40,
        "heads": 1,
        "vocabulary": 50,
        "rank": 4,
        "target_modules": ("q_proj", "v_proj"),
        "classes": 3,
        "batch_size": 2,
        "length": 6,
        "dtype": "float32",
    }
    return Shape(**(sizes | changes))


def small_trial(shape, prediction_batch_sizes=(8,)):
    return Trial(shape, 1, prediction_batch_sizes, 2, 60.0, "cpu", 1, 0)


def test_the_cost_benchmark_writes_table_figures_and_plot(tmp_path):
    contestants = ["bare", "lowrank_kron", "stock_kron", "bayesian_lora"]
    sizes = ["--prediction-batch-sizes", "1", "2"]
    options = SMALL | {"--output": tmp_path / "results"}
    run = run_benchmark("cost", options, "--contestants", *contestants, *sizes)
    assert run.returncode == 0, run.stderr
    figures = json.loads((tmp_path / "results" / "cost.json").read_text())
    (shape,) = figures["shapes"]
    rows = {row["contestant"]: row for row in shape["contestants"]}
    assert list(rows) == contestants
    for key in ("bare", "lowrank_kron", "stock_kron"):
        fit, predictions = rows[key]["fit"], rows[key]["predict"]
        assert not rows[key]["failures"]
        assert [prediction["batch_size"] for prediction in predictions] == [1, 2]
        for measured in (fit, *predictions):
            assert 0 < measured["minimum"] <= measured["median"] <= measured["maximum"]
            assert measured["repetitions"] == len(measured["seconds"]) == 2
            assert measured["peak_megabytes"] >= 0
            assert measured["in_bare_loops"] > 0
    assert rows["bare"]["fit"]["in_bare_loops"] == 1
    # Per layer, two dense factors of each of lora_A and lora_B, with q and v: 32 and 8 wide.
    assert rows["stock_kron"]["posterior_megabytes"] == 4 * 4 * (32**2 + 8**2) / 1e6
    assert 0 < rows["lowrank_kron"]["posterior_megabytes"] < 0.02

    # Version 0.0.6 cannot predict for one text; all else that it does is measured.
    package = rows["bayesian_lora"]
    if find_spec("bayesian_lora") is None:
        assert "bayesian-lora" in package["failures"][0]["reason"]
    else:
        assert package["fit"]["median"] > 0
        assert [prediction["batch_size"] for prediction in package["predict"]] == [2]
        assert package["failures"][0]["what"] == "predictions, batch 1"
        assert "AssertionError" in package["failures"][0]["reason"]

    for series in figures["growth"]:
        assert len(series["figures"]) == len(series["sizes"])
        assert series["name"] in run.stdout
    assert "random" in figures["weights"]
    assert "Random weights" in run.stdout
    for key in contestants:
        assert f"| {NAMES[key]} " in run.stdout
    assert (tmp_path / "results" / "cost.md").read_text() == run.stdout
    assert (tmp_path / "results" / "cost.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        (("--limit", "0.01"), "stopped: took longer than the limit of 0.01 s"),
        (("--memory-limit", "0.001"), "MB of memory where 0.001 MB are free"),
    ],
)
def test_contestants_over_a_limit_are_listed_and_stop_nothing(tmp_path, capsys, limit, reason):
    options = SMALL | {"--output": tmp_path, "--prediction-batch-sizes": 2}
    main(["cost", *flat(options), *limit, "--contestants", "lowrank_kron", "stock_diag"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("- ")]
    assert [line.split(",")[0] for line in lines] == ["- lowrank_kron", "- Stock diag"]
    assert all(reason in line for line in lines)
    assert json.loads((tmp_path / "cost.json").read_text())["growth"]
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--contestants", "nobody"], "cost: no contestant nobody; there are bare,"),
        (["--layers", "1", "1", "1"], "cost: give 1 numbers of layers and batches"),
        (["--classes", "1"], "cost: --classes must be from 2"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, options, message):
    with pytest.raises(SystemExit, match=message):
        main(["cost", *flat(SMALL | {"--output": tmp_path}), *options])


def test_help_names_every_contestant(capsys):
    with pytest.raises(SystemExit):
        main(["cost", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for key in RIVALS:
        assert key in text
    assert list(NAMES) == list(RIVALS)


def test_the_papers_table_at_a_small_shape(tmp_path):
    options = {
        "--output": tmp_path / "results",
        "--device": "cpu",
        "--hidden-size": 32,
        "--layers": 1,
        "--heads": 2,
        "--intermediate-size": 40,
        "--vocabulary": 50,
        "--batch-size": 2,
        "--length": 6,
        "--batches": 2,
        "--steps": 2,
        "--threads": 1,
    }
    run = run_benchmark("table7b", options, "--classes", "2", "3")
    assert run.returncode == 0, run.stderr
    figures = json.loads((tmp_path / "results" / "table7b.json").read_text())
    assert [row["classes"] for row in figures["rows"]] == [2, 3]
    for row in figures["rows"]:
        assert row["training_seconds"] == 10_000 * row["step"]["median"] > 0
        assert row["time_overhead_percent"] == pytest.approx(
            100 * row["fit_seconds"] / row["training_seconds"]
        )
        assert row["with_laplace_gigabytes"] >= row["training_gigabytes"] > 0
        assert row["memory_overhead_percent"] >= 0
    assert figures["machine"]["processor"]
    assert "1 to 5 %" in run.stdout
    assert (tmp_path / "results" / "table7b.md").read_text() == run.stdout


def test_the_papers_table_needs_a_gpu(tmp_path):
    run = run_benchmark("table7b", {"--output": tmp_path / "results"})
    assert run.returncode == 1
    assert "needs a GPU" in run.stderr.splitlines()[-1]
    assert not (tmp_path / "results").exists()
    with pytest.raises(SystemExit, match=r"6\.7 billion weights needs a GPU"):
        main(["table7b", "--output", str(tmp_path), "--device", "cpu"])


def test_random_models_are_of_the_shape_and_dtype():
    shape = small_shape(dtype="bfloat16", target_modules=("q_proj", "v_proj", "lm_head"))
    model = random_llama(shape, "cpu", 0)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert {p.dtype for p in frozen} == {torch.bfloat16}
    norms = (2 * shape.layers + 1) * shape.hidden_size
    assert sum(p.numel() for p in frozen) == shape.number_of_weights + norms
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert len(trainable) == len(lora_weights(model)) == 6
    assert all(p.any() for p in trainable)
    assert torch.get_default_dtype() == torch.float32


def test_every_rival_predicts_a_distribution_broader_than_the_models():
    shape = small_shape(layers=2)
    loader = random_loader(shape, 2, "cpu", 0)
    (batch,) = random_loader(shape, 1, "cpu", 1, batch_size=5)
    expected = None
    for key, make in RIVALS.items():
        if key == "bayesian_lora" and find_spec("bayesian_lora") is None:
            continue
        model = random_llama(shape, "cpu", 0)
        rival = make(model, shape)
        rival.fit(loader)
        probabilities = rival.predict(batch).detach()
        if expected is None:
            with torch.no_grad():
                expected = LogitsModel(model, shape.class_token_ids)(batch).softmax(-1)
            torch.testing.assert_close(probabilities, expected)
            continue
        assert probabilities.shape == expected.shape
        torch.testing.assert_close(probabilities.sum(-1), torch.ones(5))
        assert not torch.allclose(probabilities, expected, rtol=1e-6, atol=0)
        assert (probabilities.max(-1).values <= expected.max(-1).values + 1e-6).all(), key


def test_the_bare_loop_runs_one_forward_and_so_many_backward_passes():
    shape = small_shape()
    model = random_llama(shape, "cpu", 0)
    calls = {"forward": 0, "backward": 0}
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj.lora_B.default")

    def after_forward(module, inputs, output):
        calls["forward"] += 1
        output.register_hook(lambda _: calls.update(backward=calls["backward"] + 1))

    layer.register_forward_hook(after_forward)
    rival = bare_loop(model, shape)
    rival.fit(random_loader(shape, 2, "cpu", 0))
    assert calls == {"forward": 2, "backward": 2 * (shape.classes - 1)}
    rival.predict(next(iter(random_loader(shape, 1, "cpu", 0))))
    assert calls == {"forward": 3, "backward": 2 * (shape.classes - 1) + shape.classes}


def test_dense_factors_and_jacobians_count_in_what_a_rival_needs():
    shape = small_shape(hidden_size=4096, rank=8)
    trial = small_trial(shape)
    bare, kron = (needed_megabytes(key, trial) for key in ("bare", "stock_kron"))
    assert bare == 4 * shape.number_of_weights / 1e6
    jacobian = 8 * 3 * 4 * 8 * 4096
    assert kron - bare == pytest.approx(4 * (jacobian + 9 * 4096**2) / 1e6)
    assert needed_megabytes("stock_diag", trial) - bare == pytest.approx(4 * jacobian / 1e6)
    assert needed_megabytes("lowrank_kron", trial) == bare


def sleep_after_message(send, seconds):
    send("figure", 1)
    time.sleep(seconds)
    raise ValueError("woken")


def leave(send):
    os._exit(3)


def test_what_was_sent_before_a_failure_counts():
    settings = {"preload": "benchmarks.measuring"}
    sent = [("figure", 1)]
    messages, reason = run_limited(sleep_after_message, (0,), 60.0, **settings)
    assert (messages, reason) == (sent, "ValueError: woken")
    messages, reason = run_limited(leave, (), 60.0, **settings)
    assert (messages, reason) == ([], "its process ended with exit code 3")


def test_slow_calls_are_repeated_less():
    calls = []

    def job():
        calls.append(1)
        time.sleep(0.02)

    figures = repeated_seconds(job, "cpu", 50, limit=0.6)
    assert figures["repetitions"] == len(calls) - 1 <= SHARE_OF_LIMIT * 0.6 / 0.02
    assert figures["warmed_up"]
    alone = repeated_seconds(job, "cpu", 50, limit=0.01)
    assert not alone["warmed_up"]
    assert alone["repetitions"] == 1


def test_exponents_and_reasons():
    assert growth_exponent([1, 2, 4], [5, 20, 80]) == pytest.approx(2)
    assert growth_exponent([1, 2, 4], [5, -1, 80]) is None
    assert growth_exponent([2], [5]) is None
    assert reason_of(ValueError("one\ntwo")) == "ValueError: one two"
    assert len(reason_of(ValueError("x" * 1000))) < 250


def test_growth_times_both_sides_of_the_comparison():
    series = growth(2, 4, 3, 4, "cpu", 1, 60.0, widths=(16, 32))
    assert [entry["sizes"] for entry in series] == [[16, 32]] * 4 + [[2, 4, 8, 16]]
    assert all(figure["median"] > 0 for entry in series for figure in entry["figures"])
    assert all(entry["exponent"] is not None for entry in series)
