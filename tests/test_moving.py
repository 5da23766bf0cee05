"""A posterior follows its model to other devices and into other precisions."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from laplace_lora_ext import from_pretrained
from laplace_lora_ext.predictive.statistics import of_present_fit
from tests.support.models import (
    first_batch,
    lora_model,
    ragged_batches,
)
from tests.support.posteriors import (
    STRUCTURES,
    fitted,
    generator,
    make,
    priors_of_blocks,
    with_structures,
)
from tests.support.snapshots import tensors_of

of_each_structure = pytest.mark.parametrize("structure", STRUCTURES)


def single_precision(**adapter) -> nn.Module:
    """Make a model in the precision that most are moved from."""
    return lora_model("bert", torch.float32, **adapter)


# --- what a posterior is used for -----------------------------------------------------


def glm(la, batches):
    first, *_ = batches
    return la(first)


def drawn_networks(la, batches):
    first, *_ = batches
    return la(
        first,
        pred_type="nn",
        link_approx="mc",
        n_samples=2,
        generator=generator(),
    )


def joint(la, batches):
    first, *_ = batches
    _, covariance = la.predictive_moments(first, joint=True)
    return covariance


def evidence(la, batches):
    return la.log_marginal_likelihood()


def evidence_of_a_prior(la, batches):
    prior_precision = torch.tensor(3.0)
    return la.log_marginal_likelihood(prior_precision)


def density(la, batches):
    near_the_mean = la.mean + 0.1
    return la.log_prob(near_the_mean)


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


@dataclass(frozen=True)
class Blocks:
    """What a posterior is over, by the adapter and by the posterior's own choice."""

    structure: str = "lowrank_kron"
    adapter: Mapping[str, Any] = field(default_factory=dict)
    choice: Mapping[str, Any] = field(default_factory=dict)

    def model(self) -> nn.Module:
        return single_precision(**self.adapter)

    def fitted(self, model: nn.Module):
        return fitted(
            model=model,
            structure=self.structure,
            **self.choice,
        )


# Beside layers of LoRA.
OTHER_BLOCKS = {
    "head": Blocks(
        choice={"modules_to_save": True},
    ),
    "embedding": Blocks(
        adapter={"target_modules": ["word_embeddings", "query"]},
    ),
    "tokens": Blocks(
        adapter={"trainable_token_indices": [3, 17]},
    ),
}
# All uses of ours, and one of each other kind.
USES_OF_BLOCKS = [
    *((Blocks(structure), use) for structure, use in with_structures(USES)),
    *zip(OTHER_BLOCKS.values(), [glm, drawn_networks, more_data], strict=True),
]


@pytest.mark.filterwarnings("ignore:.*no linear layer")
@pytest.mark.parametrize(("blocks", "use"), USES_OF_BLOCKS)
def test_a_posterior_follows_its_model_into_another_precision(use, blocks):
    batches = ragged_batches()
    model = blocks.model()
    la = blocks.fitted(model)
    unmoved = blocks.fitted(blocks.model())
    expected = use(unmoved, batches)
    model.double()
    found = use(la, batches)
    assert found.dtype is torch.float64
    if use in (drawn_networks, draws):
        # In another precision, other random numbers are drawn.
        assert found.isfinite().all()
    else:
        expected = expected.double()
        # What was fitted in float32 keeps its rounding.
        assert_close(found, expected, rtol=2e-3, atol=1e-4)


def fitted_classifier(structure: str):
    la = make(single_precision(), structure)
    la.fit(ragged_batches())
    return la


def fitted_regression(structure: str):
    model = single_precision()
    la = make(model, structure, "regression", sigma_noise=0.5)
    batches = ragged_batches()
    for batch in batches:
        n_texts = len(batch["labels"])
        batch["labels"] = torch.randn(n_texts, 3)
    la.fit(batches)
    return la


def no_autocast(*_, **__):
    return nullcontext()


@pytest.mark.parametrize(
    ("structure", "fit"),
    with_structures([fitted_classifier, fitted_regression]),
)
def test_no_tensor_of_a_posterior_stays_behind(structure, fit, monkeypatch):
    # The device "meta" has none.
    monkeypatch.setattr(torch, "autocast", no_autocast)
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
        is_empty = tensor.numel() == 0
        assert is_empty or tensor.is_meta


def test_half_precision_rounds_the_weights_and_keeps_the_posterior():
    model = single_precision()
    la = fitted(model=model)
    batch = first_batch()
    moments = la.predictive_moments(batch)
    mean = la.mean
    model.bfloat16()
    rounded = la.predictive_moments(batch)
    assert rounded.f_var.dtype is torch.float32
    assert la.mean is mean
    for before, after in zip(moments, rounded, strict=True):
        errors = (after - before).abs()
        largest = before.abs().max()
        assert errors.max() < 0.05 * largest


def test_weights_that_were_in_half_precision_are_others():
    model = single_precision()
    la = fitted(model=model)
    batch = first_batch()
    # In which their last digits are lost.
    model.bfloat16()
    la(batch)
    model.float()
    with pytest.raises(RuntimeError, match="have changed since the fit"):
        la(batch)


@of_each_structure
def test_a_model_may_move_between_the_posterior_and_its_fit(structure):
    model = single_precision()
    la = make(
        model,
        structure,
        prior_precision=2.0,
        prior_mean=0.5,
    )
    model.double()
    la.fit(ragged_batches())
    prediction = la(first_batch())
    for number in (la.prior_precision, la.prior_mean, prediction):
        assert number.dtype is torch.float64


def names_of_blocks(la) -> list[str]:
    return [block.name for block in la.blocks]


@pytest.mark.filterwarnings("ignore:.*no linear layer")
@pytest.mark.parametrize("blocks", OTHER_BLOCKS.values(), ids=OTHER_BLOCKS)
def test_a_file_serves_the_model_in_another_precision(blocks, tmp_path):
    batch = first_batch()
    model = blocks.model()
    la = blocks.fitted(model)
    la.prior_precision = priors_of_blocks(la).float()
    names = names_of_blocks(la)
    expected_p = la(batch).double()
    expected_evidence = la.log_marginal_likelihood().double()
    la.save_pretrained(tmp_path)
    model.double()
    read = from_pretrained(model, tmp_path)
    assert names_of_blocks(read) == names
    p = read(batch)
    # As near as float32 comes.
    assert_close(p, expected_p, rtol=1e-5, atol=1e-6)
    found = read.log_marginal_likelihood()
    assert_close(found, expected_evidence, rtol=1e-5, atol=1e-5)


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
    "bfloat16": Move(
        bfloat16,
        rtol=0.05,
        atol=0.05,
    ),
    "single": Move(
        single,
        dtype=torch.float64,
    ),
}
# None of a factor's columns, some and all.
moves_and_ranks = pytest.mark.parametrize(
    ("case", "rank"),
    list(zip(MOVES.values(), [0, 3, 100, 3, 0], strict=True)),
    ids=MOVES,
)


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


@moves_and_ranks
def test_statistics_serve_the_same_fit_after_a_move(case, rank):
    la, batch = on_one_batch(case, rank)
    statistics = la.predictive_statistics([batch], dtype=torch.float64)
    exact = la(batch)
    case.move(la.model.model)
    given = of_present_fit(la, statistics, "mean_field")
    moments = given.moments(la.prior_precision)
    found = la(moments)
    # What is kept is of the precision before the move, whatever the model has now.
    assert_close(
        found.double(),
        exact.double(),
        rtol=2e-5,
        atol=1e-6,
    )
    # And a search takes them.
    la.optimize_prior_precision(
        method="gridsearch",
        val_loader=statistics,
        grid_size=2,
    )


@moves_and_ranks
def test_learnt_variances_serve_the_same_fit_after_a_move(case, rank):
    la, batch = on_one_batch(case, rank)
    la.amortize([batch])
    learnt = la(batch, pred_type="amortized")
    case.move(la.model.model)
    found = la(batch, pred_type="amortized")
    assert_close(
        found.double(),
        learnt.double(),
        rtol=case.rtol,
        atol=case.atol,
    )


EIGHT_TEXTS = ragged_batches(batch_size=1)
OTHERS = {
    "tail": {"tail": False},
    "rank": {"rank": 2},
    "data": {"batches": ragged_batches(seed=8)},
    "one text less": {"batches": EIGHT_TEXTS[:7]},
    "statistics": {"kfac_approx": "expand"},
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_statistics_of_another_fit_are_refused_before_and_after_a_move(other):
    another = fitted(model=single_precision(), **other)
    statistics = another.predictive_statistics(ragged_batches())
    model = single_precision()
    la = fitted(model=model)
    with pytest.raises(ValueError, match="belong to another fit"):
        of_present_fit(la, statistics, "mean_field")
    model.double()
    with pytest.raises(ValueError, match="belong to another fit"):
        of_present_fit(la, statistics, "mean_field")
