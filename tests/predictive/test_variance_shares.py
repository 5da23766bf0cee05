"""How the variance of predictions divides among LoRA weights."""

import re

import pytest
import torch

from tests.support.models import Detour, llama_with_output_layer, ragged_batches, with_lora
from tests.support.posteriors import PRIORS, fitted, make, some_precision


@pytest.mark.parametrize("structure", PRIORS)
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


def test_blocks_that_the_logits_do_not_depend_on_have_no_share():
    la = make(with_lora(Detour(), "used", "unused"))
    X = torch.randn(6, 5).double()
    la.fit([(X, torch.arange(6) % 3)])
    shares = la.variance_by_layer(X)
    assert shares.by_layer["unused"] == 0
    assert shares.by_layer["used"] == pytest.approx(1)
    assert re.search("used", next(iter(shares.by_block)))


@pytest.mark.parametrize(
    ("selection", "layers"),
    [
        ({"target_modules": ["lm_head"]}, ["lm_head"]),
        ({"layers_to_transform": range(2)}, ["model.layers.0", "model.layers.1"]),
    ],
)
def test_a_posterior_over_some_layers_is_a_part_of_that_over_all(selection, layers):
    model = llama_with_output_layer()
    part, whole = fitted("gpt2", model=model, **selection), fitted("gpt2", model=model)
    assert list(part.variance_by_layer(ragged_batches()[0]).by_layer) == layers
    batch = ragged_batches(seed=4)[0]
    chosen = [block.transformer_layer in layers for block in whole.blocks]
    precision = torch.where(torch.tensor(chosen), 0.5, torch.inf)
    expected = whole.predictive_statistics([batch]).moments(precision)
    part.prior_precision = 0.5
    f_mu, f_var = part.predictive_moments(batch)
    torch.testing.assert_close(f_mu, expected.f_mu)
    torch.testing.assert_close(f_var, expected.f_var, rtol=1e-4, atol=1e-6)

    whole.prior_precision = part.prior_precision
    shares = whole.variance_by_layer(batch).by_layer
    all_layers = whole.predictive_moments(batch)[1]
    trace = [v.diagonal(dim1=1, dim2=2).sum().item() for v in (f_var, all_layers)]
    assert sum(shares[layer] for layer in layers) == pytest.approx(trace[0] / trace[1], rel=1e-4)


def test_shares_of_the_first_and_the_last_layers_come_in_one_call():
    model = llama_with_output_layer()
    shares = fitted("gpt2", model=model).variance_by_layer(ragged_batches()[0]).by_layer
    assert list(shares) == ["model.layers.0", "model.layers.1", "model.layers.2", "lm_head"]
    assert sum(shares.values()) == pytest.approx(1)
    assert min(shares.values()) > 0
