"""A posterior follows its model to other devices and into other precisions."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from laplace_lora_ext import from_pretrained
from tests.support.models import lora_model, ragged_batches
from tests.support.posteriors import (
    STRUCTURES,
    fitted,
    generator,
    make,
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
    """Every structure over LoRA, and one over each of the other blocks."""
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
    if use in (drawn_networks, draws):  # other random numbers
        assert torch.isfinite(moved).all()
    else:
        torch.testing.assert_close(moved, expected.double(), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_no_tensor_of_a_posterior_stays_behind(structure, likelihood, monkeypatch):
    # Meta has none.
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    model = lora_model("bert", torch.float32)
    la = make(
        model,
        structure,
        likelihood,
        **{"sigma_noise": 0.5} if likelihood[0] == "r" else {},
    )
    batches = ragged_batches()
    if likelihood == "regression":
        batches = [
            batch | {"labels": torch.randn(len(batch["labels"]), 3)}
            for batch in batches
        ]
    la.fit(batches)
    la.optimize_prior_precision(
        method="marglik", n_steps=2, prior_structure="layerwise"
    )
    la.sample(1)
    model.to("meta")
    la._move_with_model()
    # Samples of other weights, compared in main memory.
    la._fit = replace(la._fit, model=None)
    left = [
        t for t in tensors_of(vars(la), set()) if t.numel() and t.device.type != "meta"
    ]
    assert not left


@pytest.mark.parametrize("structure", STRUCTURES)
def test_half_precision_rounds_the_weights_and_keeps_the_posterior(
    structure,
):
    model = lora_model("bert", torch.float32)
    la = fitted(model=model, structure=structure)
    batch, *_ = ragged_batches()
    moments = la.predictive_moments(batch)
    mean = la.mean
    model.bfloat16()
    rounded = la.predictive_moments(batch)
    assert rounded.f_var.dtype is torch.float32
    assert la.mean is mean
    for before, after in zip(moments, rounded, strict=True):
        assert (after - before).abs().max() < 0.05 * before.abs().max()
    model.float()
    with pytest.raises(RuntimeError, match="have changed since the fit"):
        la(batch)  # their last digits are lost


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_model_may_move_between_the_posterior_and_its_fit(
    structure,
):
    model = lora_model("bert", torch.float32)
    la = make(model, structure, prior_precision=2.0, prior_mean=0.5)
    model.double()
    la.fit(ragged_batches())
    assert la.prior_precision.dtype is la.prior_mean.dtype is torch.float64
    assert la(ragged_batches()[0]).dtype is torch.float64


@pytest.mark.filterwarnings("ignore:.*no linear layer")
@pytest.mark.parametrize(("adapter", "choice"), OTHER_BLOCKS.values(), ids=OTHER_BLOCKS)
def test_a_file_serves_the_model_in_another_precision(adapter, choice, tmp_path):
    batch, *_ = ragged_batches()
    model = lora_model("bert", torch.float32, **adapter)
    la = fitted(model=model, **choice)
    la.prior_precision = torch.linspace(0.5, 2, len(la.blocks))
    expected = la(batch)
    log_evidence = la.log_marginal_likelihood()
    la.save_pretrained(tmp_path)
    read = from_pretrained(model.double(), tmp_path)
    assert [block.name for block in read.blocks] == [block.name for block in la.blocks]
    found = read(batch)
    assert found.dtype is torch.float64
    torch.testing.assert_close(found, expected.double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        read.log_marginal_likelihood(), log_evidence.double(), rtol=1e-5, atol=1e-5
    )


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


# Functions, the precision that they start from, and how close learnt variances stay.
MOVES = [
    (double, torch.float32, 1e-4, 1e-5),
    (to_double, torch.float32, 1e-4, 1e-5),
    (there_and_back, torch.float32, 1e-4, 1e-5),
    (bfloat16, torch.float32, 0.05, 0.05),
    (single, torch.float64, 1e-4, 1e-5),
]


@pytest.mark.parametrize(("move", "dtype", "rtol", "atol"), MOVES)
@pytest.mark.parametrize("rank", [0, 3, 100])
def test_what_was_kept_of_data_serves_the_same_fit_after_a_move(
    move, dtype, rtol, atol, rank
):
    model = lora_model("bert", dtype)
    (batch,) = ragged_batches(batch_size=8)
    la = fitted(model=model, batches=[batch], rank=rank, temperature=0.3)
    la.prior_precision = 1 / 3
    statistics = la.predictive_statistics([batch], dtype=torch.float64)
    la.amortize([batch])
    exact = la(batch)
    learnt = la(batch, pred_type="amortized")
    move(model)
    given = la.statistics_of(statistics, False)
    moments = given.moments(la.prior_precision)
    torch.testing.assert_close(
        la(moments).double(), exact.double(), rtol=2e-5, atol=1e-6
    )
    found = la(batch, pred_type="amortized")
    torch.testing.assert_close(found.double(), learnt.double(), rtol=rtol, atol=atol)
    la.optimize_prior_precision(method="gridsearch", val_loader=statistics, grid_size=2)


OTHERS = {
    "tail": {"tail": False},
    "rank": {"rank": 2},
    "data": {"batches": ragged_batches(seed=8)},
    "one text less": {"batches": ragged_batches(batch_size=1)[:7]},
    "statistics": {"kfac_approx": "expand"},
}


@pytest.mark.parametrize("other", OTHERS)
def test_statistics_of_another_fit_are_refused_before_and_after_a_move(
    other,
):
    batches = ragged_batches()
    model = lora_model("bert", torch.float32)
    of_other = fitted(dtype=torch.float32, **OTHERS[other]).predictive_statistics(
        batches
    )
    la = fitted(model=model)
    for _ in range(2):
        with pytest.raises(ValueError, match="belong to another fit"):
            la.statistics_of(of_other, False)
        model.double()
