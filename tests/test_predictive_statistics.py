"""One pass over the data answers what any prior precision would predict."""

import re

import laplace
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

import laplace_lora_ext
from laplace_lora_ext import Moments
from laplace_lora_ext.predictive.statistics import from_triangle, upper_triangle
from tests.tiny_models import laplace_keywords, lora_model, ragged_batches

PRECISIONS = ["scalar", "layerwise"]


def fitted(kind="bert", dtype=torch.float64, rank=3, tail=True, batches=None, **kwargs):
    la = laplace.Laplace(
        lora_model(kind, dtype),
        "classification",
        "lora",
        "lowrank_kron",
        backend_kwargs={"rank": rank, "tail": tail},
        **laplace_keywords(kind),
        **kwargs,
    )
    la.fit(ragged_batches() if batches is None else batches)
    return la


def some_precision(la, structure):
    generator = torch.Generator().manual_seed(3)
    size = 1 if structure == "scalar" else len(la.blocks)
    return torch.rand(size, generator=generator).to(la.mean.dtype) + 0.1


def count_forward_passes(la):
    calls = []
    la.model.register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("structure", PRECISIONS)
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("rank", [0, 3, 100])
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_moments_equal_dense_algebra(kind, rank, tail, structure):
    la = fitted(kind, rank=rank, tail=tail, temperature=0.7)
    batches = ragged_batches(seed=5)
    statistics = la.predictive_statistics(batches, dtype=torch.float64)
    la.prior_precision = some_precision(la, structure)
    f_mu, f_var = statistics.moments(la.prior_precision)
    Js, expected_mu = (torch.cat(x) for x in zip(*map(la.backend.jacobians, batches), strict=True))
    covariance = torch.linalg.inv(la.posterior_precision.to_matrix())
    torch.testing.assert_close(f_mu, expected_mu)
    torch.testing.assert_close(f_var, Js @ covariance @ Js.mT, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("structure", PRECISIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments_equal_the_direct_predictive(dtype, structure):
    la = fitted(dtype=dtype)
    batches = ragged_batches()
    statistics = la.predictive_statistics(batches)
    assert statistics.f_mu.dtype == torch.float32
    assert statistics.f_mu.device.type == "cpu"
    la.prior_precision = some_precision(la, structure)
    f_mu, f_var = statistics.moments(la.prior_precision)
    direct = [la._glm_predictive_distribution(batch) for batch in batches]
    expected_mu, expected_var = (torch.cat(x).float() for x in zip(*direct, strict=True))
    torch.testing.assert_close(f_mu, expected_mu, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(f_var, expected_var, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("structure", PRECISIONS)
def test_moments_are_differentiable_in_the_prior_precision(structure):
    la = fitted()
    statistics = la.predictive_statistics(ragged_batches()[:1], dtype=torch.float64)
    precision = some_precision(la, structure).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: statistics.moments(p).f_var, (precision,))


def test_moments_are_the_same_however_many_examples_are_weighted_at_once(monkeypatch):
    la = fitted()
    statistics = la.predictive_statistics(ragged_batches())
    expected = statistics.moments(0.5)
    monkeypatch.setattr("laplace_lora_ext.predictive.statistics._CHUNK", 1)
    torch.testing.assert_close(statistics.moments(0.5), expected)


def test_an_infinite_prior_precision_leaves_layers_out():
    la = fitted()
    statistics = la.predictive_statistics(ragged_batches(), dtype=torch.float64)
    precision = torch.tensor([2.0 if ".layer.0." in b.name else torch.inf for b in la.blocks])
    first = fitted(layers_to_transform=range(1), prior_precision=2.0)
    _, expected = first._glm_predictive_distribution(ragged_batches()[0])
    f_var = statistics[:3].moments(precision).f_var
    assert not torch.allclose(f_var, statistics[:3].moments(2.0).f_var)
    torch.testing.assert_close(f_var, expected)


def test_one_pass_over_the_data_and_none_afterwards():
    la = fitted()
    calls = count_forward_passes(la)
    batches = ragged_batches()
    statistics = la.predictive_statistics(batches)
    assert len(calls) == len(batches)
    statistics.moments(0.3)
    statistics.variance_by_block(0.3)
    assert len(calls) == len(batches)


def test_parts_keep_their_targets():
    la = fitted()
    batches = ragged_batches()
    statistics = la.predictive_statistics(batches)
    labels = torch.cat([batch["labels"] for batch in batches])
    assert len(statistics) == len(labels)
    assert statistics.batch_sizes == [3, 3, 2]
    torch.testing.assert_close(statistics.targets, labels)
    index = torch.tensor([6, 1])
    part = statistics[index]
    assert len(part) == 2
    torch.testing.assert_close(part.targets, labels[index])
    torch.testing.assert_close(part.moments(2.0).f_var, statistics.moments(2.0).f_var[index])


def test_a_thousand_examples_of_a_7b_adapter_fit_in_250_mb():
    """128 blocks of r 8, rank 10, four classes: nothing depends on the model's width."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(63)), nn.Linear(16, 4))
    names = [name for name, _ in model.named_modules() if name]
    inject_adapter_in_model(LoraConfig(target_modules=names, r=8, init_lora_weights=False), model)
    la = laplace.Laplace(model, "classification", "lora", "lowrank_kron")
    X = torch.randn(40, 16)
    la.fit([(X, torch.arange(40) % 4)])
    statistics = la.predictive_statistics([X[:5]])
    n_blocks, r, rank, n_outputs = len(la.blocks), 8, 10, 4
    assert n_blocks == 128
    # The last B is 4 x 8: both its factors are small, and its rank is 4.
    leading = r * rank * (n_blocks - 1) + r * 4
    remaining = r * (n_blocks - 1)
    numbers = n_outputs * (1 + leading) + remaining * n_outputs * (n_outputs + 1) // 2
    assert statistics.nbytes == 5 * 4 * numbers
    per_example = 4 * (n_outputs * (1 + r * rank * 128) + r * 128 * 10)
    assert per_example == 204_816  # as the class documents it
    assert 1000 * per_example <= 250e6
    assert f"{4 * numbers / 1e3:.1f} kB an example" in repr(statistics)


def test_the_documented_size_is_the_tested_one():
    assert "205 kB" in laplace_lora_ext.PredictiveStatistics.__doc__


def test_triangles_round_trip():
    matrices = torch.randn(3, 2, 4, 4).double()
    matrices = matrices + matrices.mT
    torch.testing.assert_close(from_triangle(upper_triangle(matrices), 4), matrices)


@pytest.mark.parametrize("link_approx", ["probit", "mc", "bridge", "bridge_norm"])
def test_moments_take_the_place_of_a_batch(link_approx):
    la = fitted(dtype=torch.float32, prior_precision=0.5)
    batch = ragged_batches()[0]
    moments = la.predictive_statistics([batch]).moments(0.5)
    kept = Moments(moments.f_mu.clone(), moments.f_var.clone())

    def predict(x):
        return la(x, link_approx=link_approx, generator=torch.Generator().manual_seed(0))

    torch.testing.assert_close(predict(moments), predict(batch), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(moments, kept, rtol=0, atol=0)
    samples = [la.functional_samples(x, generator=torch.Generator()) for x in (moments, batch)]
    torch.testing.assert_close(*samples, rtol=1e-4, atol=1e-4)


def test_moments_have_neither_inputs_nor_joint_covariances():
    la = fitted()
    moments = la.predictive_statistics(ragged_batches()).moments(1.0)
    with pytest.raises(ValueError, match="pass these"):
        la(moments, pred_type="nn", link_approx="mc")
    with pytest.raises(ValueError, match="pass the inputs"):
        la._glm_predictive_distribution(moments, joint=True)


@pytest.mark.parametrize("structure", PRECISIONS)
def test_variance_shares_are_those_of_the_trace(structure):
    la = fitted("gpt2")
    la.prior_precision = some_precision(la, structure)
    batches = ragged_batches()
    statistics = la.predictive_statistics(batches, dtype=torch.float64)
    variances = statistics.variance_by_block(la.prior_precision)
    trace = statistics.moments(la.prior_precision).f_var.diagonal(dim1=1, dim2=2).sum(-1)
    torch.testing.assert_close(variances.sum(1), trace)
    for index in range(len(la.blocks)):
        alone = torch.full((len(la.blocks),), torch.inf).double()
        alone[index] = la.prior_precision.expand(len(la.blocks))[index]
        expected = statistics.moments(alone).f_var.diagonal(dim1=1, dim2=2).sum(-1)
        torch.testing.assert_close(variances[:, index], expected)

    shares = la.variance_by_layer(statistics)
    total = variances.mean(0) / variances.mean(0).sum()
    assert list(shares.by_block.values()) == pytest.approx(total.tolist())
    assert list(shares.by_layer) == ["transformer.h.0", "transformer.h.1"]
    assert shares.by_layer["transformer.h.0"] == pytest.approx(
        sum(share for name, share in shares.by_block.items() if ".h.0." in name)
    )
    assert shares.by_matrix["lora_A"] == pytest.approx(
        sum(share for name, share in shares.by_block.items() if "lora_A" in name)
    )
    for grouped in (shares.by_block, shares.by_layer, shares.by_matrix):
        assert sum(grouped.values()) == pytest.approx(1)
    batch = la.variance_by_layer(batches[0])
    expected = la.variance_by_layer(la.predictive_statistics(batches[:1], dtype=torch.float64))
    assert batch.by_block == pytest.approx(expected.by_block)


def test_bad_data_are_refused():
    la = fitted()
    batches = ragged_batches()
    with pytest.raises(ValueError, match="no data"):
        la.predictive_statistics([])
    without = [{k: v for k, v in batch.items() if k != "labels"} for batch in batches]
    assert la.predictive_statistics(without).targets is None
    with pytest.raises(ValueError, match="others have none"):
        la.predictive_statistics([batches[0], without[1]])
    wrong = batches[1] | {"labels": torch.tensor([0, 7, 1])}
    with pytest.raises(ValueError, match=r"batch 1: labels must be from 0 to 2"):
        la.predictive_statistics([batches[0], wrong])
    la.blocks[0].weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"batch 0: .*non-finite"):
        la.predictive_statistics(batches)


@pytest.mark.parametrize("precision", [0.0, -1.0, torch.nan, torch.ones(3)])
def test_bad_prior_precisions_are_refused(precision):
    statistics = fitted().predictive_statistics(ragged_batches())
    with pytest.raises(ValueError, match=r"above 0|one prior precision"):
        statistics.moments(precision)


def test_statistics_of_another_fit_are_refused():
    la = fitted()
    statistics = la.predictive_statistics(ragged_batches())
    la.fit(ragged_batches(seed=9))
    with pytest.raises(ValueError, match="another fit"):
        la.variance_by_layer(statistics)
    with pytest.raises(ValueError, match="another fit"):
        la.optimize_prior_precision(method="gridsearch", val_loader=statistics)


def test_not_fitted_is_said():
    la = laplace.Laplace(lora_model("bert"), "classification", "lora", "lowrank_kron")
    for ask in (la.predictive_statistics, la.variance_by_layer):
        with pytest.raises(AttributeError, match="fit"):
            ask(ragged_batches())


def test_blocks_that_the_logits_do_not_depend_on_have_no_share():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x):
            self.unused(x)
            return self.used(x)

    torch.manual_seed(0)
    model = Unused()
    config = LoraConfig(target_modules=["used", "unused"], r=2, init_lora_weights=False)
    inject_adapter_in_model(config, model)
    la = laplace.Laplace(model, "classification", "lora", "lowrank_kron")
    X = torch.randn(6, 5)
    la.fit([(X, torch.arange(6) % 3)])
    shares = la.variance_by_layer(X)
    assert shares.by_layer["unused"] == 0
    assert shares.by_layer["used"] == pytest.approx(1)
    assert re.search("used", next(iter(shares.by_block)))
