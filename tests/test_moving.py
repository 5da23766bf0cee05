"""A posterior follows its model to other devices and into other precisions."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from laplace_lora_ext import from_pretrained
from laplace_lora_ext.predictive.statistics import of_present_fit
from tests.support.models import first_batch, lora_model, ragged_batches
from tests.support.posteriors import (
    OURS_AND_A_HOSTS,
    STRUCTURES,
    fitted,
    generator,
    make,
    priors_of_blocks,
)
from tests.support.snapshots import tensors_of

single_precision = partial(lora_model, "bert", torch.float32)


def drawn_networks(la, batches):
    return la(batches[0], pred_type="nn", n_samples=2, generator=generator())


def prior(la, batches):
    la.optimize_prior_precision(method="marglik", n_steps=5)
    return la.prior_precision


def more_data(la, batches):
    la.fit(batches, override=False)
    return la.log_marginal_likelihood()


USES = [
    lambda la, batches: la(batches[0]),
    drawn_networks,
    lambda la, batches: la.log_prob(la.mean + 0.1),
    prior,
    more_data,
]
# All uses of ours, and a fit of more data of each other kind.
USES_OF_STRUCTURES = [("lowrank_kron", use) for use in USES]
USES_OF_STRUCTURES += [(structure, more_data) for structure in STRUCTURES[1:]]


@pytest.mark.parametrize(("structure", "use"), USES_OF_STRUCTURES)
def test_a_posterior_follows_its_model_into_another_precision(structure, use):
    batches = ragged_batches()
    of_single, la = (
        fitted(structure=structure, model=single_precision(), modules_to_save=True)
        for _ in range(2)
    )
    la.model.model.double()
    found = use(la, batches)
    assert found.dtype is torch.float64
    if use is drawn_networks:
        # In another precision, other random numbers are drawn.
        assert found.isfinite().all()
    else:
        # What was fitted in float32 keeps its rounding.
        expected = use(of_single, batches)
        assert_close(found, expected.double(), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_no_tensor_of_a_posterior_stays_behind(eight_texts, structure, monkeypatch):
    # The device "meta" has none.
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    numbers = eight_texts | {"labels": torch.randn(8, 3)}
    options = {"likelihood": "regression", "sigma_noise": 0.5}
    la = fitted("bert", [numbers], structure, model=single_precision(), **options)
    # Whatever is computed once and kept, besides the fit.
    la.optimize_prior_precision(n_steps=2, prior_structure="layerwise")
    la.sample(1)
    la.model.model.to("meta")
    la._check_H_init()
    # Samples of other weights, compared in main memory.
    la._fit = replace(la._fit, model=None)
    for tensor in tensors_of(vars(la), set()):
        assert tensor.is_meta or not tensor.numel()


def test_half_precision_rounds_the_weights_and_keeps_the_posterior(batch):
    model = single_precision()
    la = fitted(model=model)
    moments = la.predictive_moments(batch)
    mean = la.mean
    model.bfloat16()
    rounded = la.predictive_moments(batch)
    assert rounded.f_var.dtype is torch.float32
    assert la.mean is mean
    for before, after in zip(moments, rounded, strict=True):
        assert (after - before).abs().max() < 0.05 * before.abs().max()
    # Back in single precision, the last digits of the weights are lost.
    model.float()
    with pytest.raises(RuntimeError, match="have changed since the fit"):
        la(batch)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_model_may_move_between_the_posterior_and_its_fit(structure):
    model = single_precision()
    la = make(model, structure, prior_precision=2.0, prior_mean=0.5)
    model.double()
    la.fit(ragged_batches())
    for number in (la.prior_precision, la.prior_mean, la(first_batch())):
        assert number.dtype is torch.float64


def test_a_file_serves_the_model_in_another_precision(batch, tmp_path):
    model = single_precision()
    la = fitted(model=model, modules_to_save=True)
    la.prior_precision = priors_of_blocks(la).float()
    expected = la(batch).double(), la.log_marginal_likelihood().double()
    la.save_pretrained(tmp_path)
    model.double()
    read = from_pretrained(model, tmp_path)
    # As near as float32 comes.
    found = read(batch), read.log_marginal_likelihood()
    assert_close(found, expected, rtol=1e-5, atol=1e-5)


# Moves, and how near learnt variances stay: half precision rounds the hidden states
# that they are learnt from.
@pytest.mark.parametrize(
    ("move", "near"), [(nn.Module.double, 1e-4), (nn.Module.bfloat16, 0.05)]
)
def test_statistics_and_learnt_variances_serve_the_same_fit_after_a_move(
    eight_texts, move, near
):
    model = single_precision()
    la = fitted(model=model, batches=[eight_texts], temperature=0.3)
    la.prior_precision = 1 / 3
    statistics = la.predictive_statistics([eight_texts], dtype=torch.float64)
    exact = la(eight_texts)
    la.amortize([eight_texts])
    learnt = la(eight_texts, pred_type="amortized")
    move(model)
    given = of_present_fit(la, statistics, "mean_field")
    found = la(given.moments(la.prior_precision))
    # What is kept is of the precision before the move, whatever the model has now.
    assert_close(found.double(), exact.double(), rtol=2e-5, atol=1e-6)
    found = la(eight_texts, pred_type="amortized")
    assert_close(found.double(), learnt.double(), rtol=near, atol=near)


@pytest.mark.parametrize("structure", OURS_AND_A_HOSTS)
def test_statistics_of_another_fit_are_refused_before_and_after_a_move(structure):
    model = single_precision()
    la = fitted(structure=structure, model=model)
    batches = ragged_batches()
    of_others = [
        fitted(model=single_precision(), **other).predictive_statistics(batches)
        for other in ({"rank": 2}, {"batches": ragged_batches(seed=8)})
    ]
    for move in (nn.Module.float, nn.Module.double):
        move(model)
        for statistics in of_others:
            with pytest.raises(ValueError, match="belong to another fit"):
                of_present_fit(la, statistics, "mean_field")
