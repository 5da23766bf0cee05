"""The experiment on what could calibrate beyond one prior precision."""

import pytest
import torch

import laplace_lora_ext
from benchmarks.experiments.calibration import FIRM
from benchmarks.experiments.cures import CURES, Logits, measured, proportions
from benchmarks.methods.priors import GRID
from laplace_lora_ext.predictive.links import mean_field
from tests.benchmarks.support import run
from tests.support.models import lora_model, ragged_batches


def drawn(seed, n):
    """Gaussian logits of n texts, whose variance falls with the prior precision."""
    generator = torch.Generator().manual_seed(seed)
    f_mu = 3 * torch.randn(n, 3, generator=generator)
    root = torch.randn(n, 3, 3, generator=generator)
    covariance = root @ root.mT
    labels = (f_mu + 2 * torch.randn(n, 3, generator=generator)).argmax(-1)
    by_layer = [torch.einsum("nij,ij->nij", covariance, torch.eye(3)) / value for value in GRID]
    return Logits(
        labels,
        f_mu,
        torch.stack([covariance / value for value in GRID]),
        torch.stack(by_layer),
    )


def test_every_cure_is_measured(tmp_path, capsys, tiny_models):
    sizes = {"train_examples": 10, "test_examples": 12, "steps": 2, "checkpoints": 1}
    files = {"files_per_library": 30, "cache": tmp_path / "cache", "model": tiny_models[True]}
    folder, seeds = tmp_path / "results", [0, 1]
    figures, printed, _ = run(
        capsys, folder, "cures --quiet", task="choices", seeds=seeds, **sizes, **files
    )
    names = [cure.name for cure in CURES] + ["all prior precisions, weighed"]
    assert [(row["seed"], row["name"]) for row in figures["rows"]] == [
        (seed, name) for seed in seeds for name in names
    ]
    assert all(row["least_nll"] <= row["nll"] + 1e-6 for row in figures["rows"])
    assert "ECE at least NLL" in printed


def test_numbers_are_chosen_on_held_out_texts():
    test, held_out = drawn(0, 200), drawn(1, 200)
    free = {row["name"]: row for row in measured(test, test)}
    for row in free.values():
        assert row["nll"] == row["least_nll"]
    one = free["prior precision"]["nll"]
    for name in ("temperature of the likelihood", "temperature of the logits"):
        assert free[f"prior precision, {name}"]["nll"] <= one
    assert free["prior precision, temperature of the logits"]["nll"] <= free["temperature"]["nll"]
    assert free["prior precisions by the scale of each layer"]["nll"] != one
    other = {row["name"]: row for row in measured(held_out, test)}
    assert any(other[cure.name]["nll"] > free[cure.name]["nll"] for cure in CURES)
    assert all(other[cure.name]["least_nll"] == free[cure.name]["nll"] for cure in CURES)


def test_prior_precisions_weigh_as_much_as_they_make_held_out_texts_likely():
    test, held_out = drawn(0, 50), drawn(1, 4)
    likely = torch.stack(
        [
            mean_field(held_out.f_mu, f_var).exp()[range(4), held_out.labels].prod()
            for f_var in held_out.covariances
        ]
    )
    each = torch.stack([mean_field(test.f_mu, f_var).exp() for f_var in test.covariances])
    expected = torch.einsum("g,gnc->nc", likely / likely.sum(), each)
    *_, row = measured(held_out, test)
    nll = -expected[range(50), test.labels].log().mean().item()
    assert row["nll"] == pytest.approx(nll, abs=1e-5)


def test_tails_are_those_of_students_t():
    found, place = drawn(2, 30), 16
    (cure,) = (cure for cure in CURES if "degrees" in cure.name)
    torch.manual_seed(0)
    variances = torch.distributions.Gamma(2.0, 2.0).sample((4000,)).reciprocal()
    each = [mean_field(found.f_mu, s * found.covariances[place]).exp() for s in variances]
    expected = torch.stack(each).mean(0)
    assert (cure.predict(found, place, 4).exp() - expected).abs().max() < 0.005
    assert (cure.predict(found, place, 8).exp() - expected).abs().max() > 0.01


def test_a_weight_of_every_layer_adds_as_much_variance():
    torch.manual_seed(0)
    la = laplace_lora_ext.Laplace(
        lora_model("bert", torch.float32),
        "classification",
        subset_of_weights="lora",
        hessian_structure="lowrank_kron",
    )
    batches = ragged_batches()
    la.fit(batches)
    statistics = la.predictive_statistics(batches)
    found = proportions(la, statistics)
    assert found.log().mean().abs() < 1e-5
    added = FIRM * statistics.variance_by_block(FIRM * found).mean(0)
    of_a_weight = added / torch.tensor([block.weight.numel() for block in la.blocks])
    torch.testing.assert_close(of_a_weight, of_a_weight.mean().expand_as(of_a_weight))
