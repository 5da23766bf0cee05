"""A posterior follows its model to other devices and into other precisions."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from laplace_lora_ext import from_pretrained
from laplace_lora_ext.predictive.statistics import of_present_fit
from tests.support.models import first_batch, lora_model, ragged_batches
from tests.support.posteriors import (
    STRUCTURES,
    fitted,
    generator,
    make,
    priors_of_blocks,
    with_structures,
)
from tests.support.snapshots import tensors_of


def single_precision(**adapter) -> nn.Module:
    """Make a model in the precision that most are moved from."""
    return lora_model("bert", torch.float32, **adapter)


# --- what a posterior is used for -----------------------------------------------------


def glm(la, batches):
    return la(batches[0])


def drawn_networks(la, batches):
    draws = {"link_approx": "mc", "n_samples": 2, "generator": generator()}
    return la(batches[0], pred_type="nn", **draws)


def draws(la, batches):
    return la.sample(3, generator())


def prior(la, batches):
    la.optimize_prior_precision(method="marglik", n_steps=5)
    return la.prior_precision


def more_data(la, batches):
    la.fit(batches, override=False)
    return la.log_marginal_likelihood()


USES = [
    glm,
    drawn_networks,
    lambda la, batches: la.predictive_moments(batches[0], joint=True)[1],
    lambda la, batches: la.log_marginal_likelihood(torch.tensor(3.0)),
    lambda la, batches: la.log_prob(la.mean + 0.1),
    draws,
    prior,
    more_data,
    lambda la, batches: la.state_dict()["mean"],
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
        return fitted(model=model, structure=self.structure, **self.choice)


# Beside layers of LoRA.
OTHER_BLOCKS = {
    "head": Blocks(choice={"modules_to_save": True}),
    "embedding": Blocks(adapter={"target_modules": ["word_embeddings", "query"]}),
    "tokens": Blocks(adapter={"trainable_token_indices": [3, 17]}),
}
# All uses of ours, and a fit of more data of each other kind.
USES_OF_BLOCKS = [
    *((Blocks(), use) for use in USES),
    *((Blocks(structure), more_data) for structure in STRUCTURES[1:]),
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


def of_classes(structure: str):
    la = make(single_precision(), structure)
    la.fit(ragged_batches())
    return la


def of_numbers(structure: str):
    la = make(single_precision(), structure, "regression", sigma_noise=0.5)
    batches = ragged_batches()
    for batch in batches:
        batch["labels"] = torch.randn(len(batch["labels"]), 3)
    la.fit(batches)
    return la


@pytest.mark.parametrize(
    ("structure", "fit"), with_structures([of_classes, of_numbers])
)
def test_no_tensor_of_a_posterior_stays_behind(structure, fit, monkeypatch):
    # The device "meta" has none.
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    la = fit(structure)
    # Whatever is computed once and kept, besides the fit.
    options = {"n_steps": 2, "prior_structure": "layerwise"}
    la.optimize_prior_precision(method="marglik", **options)
    la.sample(1)
    la.model.model.to("meta")
    la._move_with_model()
    # Samples of other weights, compared in main memory.
    la._fit = replace(la._fit, model=None)
    for tensor in tensors_of(vars(la), set()):
        assert tensor.is_meta or not tensor.numel()


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
    expected = la(batch).double(), la.log_marginal_likelihood().double()
    la.save_pretrained(tmp_path)
    model.double()
    read = from_pretrained(model, tmp_path)
    assert names_of_blocks(read) == names
    # As near as float32 comes.
    found = read(batch), read.log_marginal_likelihood()
    assert_close(found, expected, rtol=1e-5, atol=1e-5)


class Move(NamedTuple):
    """A move, the precision that it starts from, and how near learnt variances stay."""

    move: Callable[[nn.Module], object]
    dtype: torch.dtype = torch.float32
    near: float = 1e-4


MOVES = {
    "to double": Move(lambda model: model.to(torch.float64)),
    "there and back": Move(lambda model: model.double().float()),
    # Which rounds the hidden states that they are learnt from.
    "bfloat16": Move(lambda model: model.bfloat16(), near=0.05),
    "single": Move(lambda model: model.float(), torch.float64),
}
# None of a factor's columns, some and all.
moves_and_ranks = pytest.mark.parametrize(
    ("case", "rank"), zip(MOVES.values(), [0, 3, 100, 3], strict=True), ids=MOVES
)


@moves_and_ranks
def test_statistics_and_learnt_variances_serve_the_same_fit_after_a_move(case, rank):
    (batch,) = ragged_batches(batch_size=8)
    model = lora_model("bert", case.dtype)
    la = fitted(model=model, batches=[batch], rank=rank, temperature=0.3)
    la.prior_precision = 1 / 3
    statistics = la.predictive_statistics([batch], dtype=torch.float64)
    exact = la(batch)
    la.amortize([batch])
    learnt = la(batch, pred_type="amortized")
    case.move(la.model.model)
    given = of_present_fit(la, statistics, "mean_field")
    found = la(given.moments(la.prior_precision))
    # What is kept is of the precision before the move, whatever the model has now.
    assert_close(found.double(), exact.double(), rtol=2e-5, atol=1e-6)
    found = la(batch, pred_type="amortized")
    assert_close(found.double(), learnt.double(), rtol=case.near, atol=case.near)
    # And a search takes them.
    search = {"val_loader": statistics, "grid_size": 2}
    la.optimize_prior_precision(method="gridsearch", **search)


OTHERS = {
    "tail": {"tail": False},
    "rank": {"rank": 2},
    "data": {"batches": ragged_batches(seed=8)},
    "one text less": {"batches": ragged_batches(batch_size=1)[:7]},
    "statistics": {"kfac_approx": "expand"},
}


def test_statistics_of_another_fit_are_refused_before_and_after_a_move():
    model = single_precision()
    la = fitted(model=model)
    of_others = [
        fitted(model=single_precision(), **other).predictive_statistics(
            ragged_batches()
        )
        for other in OTHERS.values()
    ]
    for move in (nn.Module.float, nn.Module.double):
        move(model)
        for statistics in of_others:
            with pytest.raises(ValueError, match="belong to another fit"):
                of_present_fit(la, statistics, "mean_field")
