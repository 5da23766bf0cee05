"""A posterior follows its model to other devices and into other precisions."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from laplace_lora_ext import from_pretrained
from tests.support.models import first_batch, lora_model, ragged_batches
from tests.support.posteriors import (
    STRUCTURES,
    fitted,
    generator,
    make,
    priors_of_blocks,
)
from tests.support.snapshots import tensors_of


def glm(la, batches):
    return la(batches[0])


def drawn_networks(la, batches):
    return la(
        batches[0],
        pred_type="nn",
        link_approx="mc",
        n_samples=2,
        generator=generator(),
    )


def joint(la, batches):
    _, covariance = la.predictive_moments(batches[0], joint=True)
    return covariance


def evidence(la, batches):
    return la.log_marginal_likelihood()


def evidence_of_a_prior(la, batches):
    return la.log_marginal_likelihood(torch.tensor(3.0))


def density(la, batches):
    return la.log_prob(la.mean + 0.1)


def draws(la, batches):
    return la.sample(3, generator())


def prior(la, batches):
    la.optimize_prior_precision(method="marglik", n_steps=5)
    return la.prior_precision


def more_data(la, batches):
    la.fit(batches, override=False)
    return la.log_marginal_likelihood()


def state(la, batches):
    return la.state_dict()["mean"]


USES = [
    glm,
    drawn_networks,
    joint,
    evidence,
    evidence_of_a_prior,
    density,
    draws,
    prior,
    more_data,
    state,
]


# What a posterior is over beside layers of LoRA, by its name: the adapter, the choice.
OTHER_BLOCKS = {
    "head": ({}, {"modules_to_save": True}),
    "embedding": ({"target_modules": ["word_embeddings", "query"]}, {}),
    "tokens": ({"trainable_token_indices": [3, 17]}, {}),
}


def cases():
    """List every structure over LoRA, and one over each of the other blocks."""
    for structure in STRUCTURES:
        yield pytest.param(structure, {}, {}, id=structure)
    for name, (adapter, choice) in OTHER_BLOCKS.items():
        yield pytest.param("lowrank_kron", adapter, choice, id=name)


@pytest.mark.filterwarnings("ignore:.*no linear layer")
@pytest.mark.parametrize(("structure", "adapter", "choice"), cases())
@pytest.mark.parametrize("use", USES)
def test_a_posterior_follows_its_model_into_another_precision(
    use, structure, adapter, choice
):
    batches = ragged_batches()
    model = lora_model("bert", torch.float32, **adapter)
    la = fitted(model=model, structure=structure, **choice)
    unmoved = fitted(
        model=lora_model("bert", torch.float32, **adapter),
        structure=structure,
        **choice,
    )
    expected = use(unmoved, batches)
    model.double()
    moved = use(la, batches)
    assert moved.dtype is torch.float64
    if use in (drawn_networks, draws):
        # In another precision, other random numbers are drawn.
        assert torch.isfinite(moved).all()
    else:
        # What was fitted in float32 keeps its rounding.
        assert_close(moved, expected.double(), rtol=2e-3, atol=1e-4)


def fitted_classifier(structure: str):
    la = make(lora_model("bert", torch.float32), structure)
    la.fit(ragged_batches())
    return la


def fitted_regression(structure: str):
    model = lora_model("bert", torch.float32)
    la = make(model, structure, "regression", sigma_noise=0.5)
    batches = ragged_batches()
    for batch in batches:
        batch["labels"] = torch.randn(len(batch["labels"]), 3)
    la.fit(batches)
    return la


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("fit", [fitted_classifier, fitted_regression])
def test_no_tensor_of_a_posterior_stays_behind(structure, fit, monkeypatch):
    # The device "meta" has none.
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    la = fit(structure)
    # Whatever is computed once and kept, besides the fit.
    la.optimize_prior_precision(
        method="marglik",
        n_steps=2,
        prior_structure="layerwise",
    )
    la.sample(1)
    la.model.model.to("meta")
    la._move_with_model()
    # Samples of other weights, compared in main memory.
    la._fit = replace(la._fit, model=None)
    for tensor in tensors_of(vars(la), set()):
        assert tensor.numel() == 0 or tensor.device.type == "meta"


@pytest.mark.parametrize("structure", STRUCTURES)
def test_half_precision_rounds_the_weights_and_keeps_the_posterior(structure):
    model = lora_model("bert", torch.float32)
    la = fitted(model=model, structure=structure)
    batch = first_batch()
    moments = la.predictive_moments(batch)
    mean = la.mean
    model.bfloat16()
    rounded = la.predictive_moments(batch)
    assert rounded.f_var.dtype is torch.float32
    assert la.mean is mean
    for before, after in zip(moments, rounded, strict=True):
        largest_error = (after - before).abs().max()
        assert largest_error < 0.05 * before.abs().max()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_weights_that_were_in_half_precision_are_others(structure):
    model = lora_model("bert", torch.float32)
    la = fitted(model=model, structure=structure)
    batch = first_batch()
    # In which their last digits are lost.
    model.bfloat16()
    la(batch)
    model.float()
    with pytest.raises(RuntimeError, match="have changed since the fit"):
        la(batch)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_model_may_move_between_the_posterior_and_its_fit(structure):
    model = lora_model("bert", torch.float32)
    la = make(model, structure, prior_precision=2.0, prior_mean=0.5)
    model.double()
    batches = ragged_batches()
    la.fit(batches)
    assert la.prior_precision.dtype is torch.float64
    assert la.prior_mean.dtype is torch.float64
    assert la(batches[0]).dtype is torch.float64


@pytest.mark.filterwarnings("ignore:.*no linear layer")
@pytest.mark.parametrize(("adapter", "choice"), OTHER_BLOCKS.values(), ids=OTHER_BLOCKS)
def test_a_file_serves_the_model_in_another_precision(adapter, choice, tmp_path):
    batch = first_batch()
    model = lora_model("bert", torch.float32, **adapter)
    la = fitted(model=model, **choice)
    la.prior_precision = priors_of_blocks(la).float()
    names = [block.name for block in la.blocks]
    expected = la(batch)
    log_evidence = la.log_marginal_likelihood()
    la.save_pretrained(tmp_path)
    read = from_pretrained(model.double(), tmp_path)
    assert [block.name for block in read.blocks] == names
    found = read(batch)
    assert found.dtype is torch.float64
    # As near as float32 comes.
    assert_close(found, expected.double(), rtol=1e-5, atol=1e-6)
    found = read.log_marginal_likelihood()
    assert_close(found, log_evidence.double(), rtol=1e-5, atol=1e-5)


def double(model):
    model.double()


def to_double(model):
    model.to(torch.float64)


def there_and_back(model):
    model.double().float()


def bfloat16(model):
    model.bfloat16()


def single(model):
    model.float()


@dataclass(frozen=True)
class Move:
    """A move, the precision that it starts from, and how near learnt variances stay."""

    move: Callable[[nn.Module], object]
    dtype: torch.dtype = torch.float32
    rtol: float = 1e-4
    atol: float = 1e-5


MOVES = {
    "double": Move(double),
    "to double": Move(to_double),
    "there and back": Move(there_and_back),
    # Which rounds the hidden states that they are learnt from.
    "bfloat16": Move(bfloat16, rtol=0.05, atol=0.05),
    "single": Move(single, dtype=torch.float64),
}
moves = pytest.mark.parametrize("case", MOVES.values(), ids=MOVES)
ranks = pytest.mark.parametrize("rank", [0, 3, 100])


def on_one_batch(case: Move, rank: int):
    """Fit a posterior to eight texts; return them too."""
    (batch,) = ragged_batches(batch_size=8)
    la = fitted(
        model=lora_model("bert", case.dtype),
        batches=[batch],
        rank=rank,
        temperature=0.3,
    )
    la.prior_precision = 1 / 3
    return la, batch


@moves
@ranks
def test_statistics_serve_the_same_fit_after_a_move(case, rank):
    la, batch = on_one_batch(case, rank)
    statistics = la.predictive_statistics([batch], dtype=torch.float64)
    exact = la(batch)
    case.move(la.model.model)
    given = la.statistics_of(statistics, False)
    moments = given.moments(la.prior_precision)
    found = la(moments)
    # What is kept is of the precision before the move, whatever the model has now.
    assert_close(found.double(), exact.double(), rtol=2e-5, atol=1e-6)
    # And a search takes them.
    la.optimize_prior_precision(method="gridsearch", val_loader=statistics, grid_size=2)


@moves
@ranks
def test_learnt_variances_serve_the_same_fit_after_a_move(case, rank):
    la, batch = on_one_batch(case, rank)
    la.amortize([batch])
    learnt = la(batch, pred_type="amortized")
    case.move(la.model.model)
    found = la(batch, pred_type="amortized")
    assert_close(found.double(), learnt.double(), rtol=case.rtol, atol=case.atol)


OTHERS = {
    "tail": {"tail": False},
    "rank": {"rank": 2},
    "data": {"batches": ragged_batches(seed=8)},
    "one text less": {"batches": ragged_batches(batch_size=1)[:7]},
    "statistics": {"kfac_approx": "expand"},
}


@pytest.mark.parametrize("other", OTHERS)
def test_statistics_of_another_fit_are_refused_before_and_after_a_move(other):
    another = fitted(dtype=torch.float32, **OTHERS[other])
    statistics = another.predictive_statistics(ragged_batches())
    model = lora_model("bert", torch.float32)
    la = fitted(model=model)
    with pytest.raises(ValueError, match="belong to another fit"):
        la.statistics_of(statistics, False)
    model.double()
    with pytest.raises(ValueError, match="belong to another fit"):
        la.statistics_of(statistics, False)
