"""Rows at a layer by example, also where a model flattens them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from laplace import Laplace
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from laplace_lora_ext.models.positions import Positions
from tests.support.models import VOCABULARY, TwoLinear, pairs, ragged_batches, sequences, with_lora
from tests.support.posteriors import KFAC_APPROX, make

EXACT = {"rtol": 1e-9, "atol": 1e-12}


def test_rows_are_arranged_by_example():
    """Three examples of two sequences each, five positions a sequence."""
    positions = Positions(n_examples=3, n_rows=6, length=5, mask=None)
    by_example = torch.arange(3 * 10 * 4).reshape(3, 10, 4)
    for shape in ((6, 5, 4), (30, 4)):
        assert torch.equal(positions.arrange(by_example.reshape(shape)), by_example)
        seeds = torch.stack([by_example, -by_example]).reshape(2, *shape)
        arranged = positions.arrange(seeds, n_leading=1)
        assert torch.equal(arranged, torch.stack([by_example, -by_example]))
    assert positions.arrange(torch.zeros(3, 4)).shape == (3, 1, 4)
    assert positions.arrange(torch.zeros(6, 4)).shape == (3, 2, 4)
    for shape in ((5, 6, 4), (15, 4), (10, 4), (4,)):
        with pytest.raises(NotImplementedError, match=r"in a batch of 3"):
            positions.arrange(torch.zeros(shape))
    with pytest.raises(NotImplementedError, match=r"its rows, \(30, 4\)"):
        positions._replace(length=None).arrange(torch.zeros(30, 4))


def test_a_mask_is_for_layers_that_see_all_positions():
    mask = torch.tensor([[True, True, False, True], [True, False, False, True]])
    positions = Positions(n_examples=2, n_rows=4, length=2, mask=mask)
    assert positions.valid(4) is mask
    assert positions.valid(2) is None  # pooled: one row a sequence
    assert positions._replace(mask=None).valid(7) is None
    with pytest.raises(NotImplementedError, match=r"3 positions an example .* mask has 4"):
        positions.valid(3)


class Rows(nn.Module):
    """Runs its layers on `(B, T, d)`, then averages the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TwoLinear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).mean(1)


class FlatRows(Rows):
    """The same function, whose layers see `(B * T, d)`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.flatten(0, -2)).unflatten(0, x.shape[:-1]).mean(1)


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_flattened_rows_give_the_posterior_of_rows_by_example(kfac_approx):
    (X, y), posteriors = sequences(), []
    for model in (Rows(), FlatRows()):
        la = make(with_lora(model, "first", "second"), backend_kwargs={"kfac_approx": kfac_approx})
        la.fit([(X, y), (X[:3] + 1, y[:3])])
        posteriors.append(la)
    rows, flat = posteriors
    torch.testing.assert_close(flat.H.to_matrix(), rows.H.to_matrix(), **EXACT)
    torch.testing.assert_close(flat(X), rows(X), **EXACT)


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_flattened_rows_give_the_jacobians_of_rows_by_example(structure):
    (X, y), posteriors = sequences(), []
    for model in (Rows(), FlatRows()):
        la = make(with_lora(model, "first", "second"), structure)
        la.fit([(X, y)])
        posteriors.append(la.H)
    torch.testing.assert_close(*posteriors, **EXACT)


class FlatTokens(nn.Module):
    """Embeds tokens and flattens the positions of all examples, as some experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 5)
        self.inner = TwoLinear()

    def forward(self, batch: Mapping | torch.Tensor) -> torch.Tensor:
        ids = batch["input_ids"] if isinstance(batch, Mapping) else batch
        mask = batch["attention_mask"] if isinstance(batch, Mapping) else torch.ones_like(ids)
        weights = mask / mask.sum(1, keepdim=True)
        rows = self.inner(self.embedding(ids).flatten(0, 1)).unflatten(0, ids.shape)
        return torch.einsum("bt,btc->bc", weights.to(rows), rows)


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_flattened_rows_of_a_padded_mapping_do_not_count_padding(kfac_approx):
    model, matrices = with_lora(FlatTokens(), "first", "second"), []
    for padded_to in (7, 11):
        la = make(model, backend_kwargs={"kfac_approx": kfac_approx})
        la.fit(ragged_batches(padded_to=padded_to))
        matrices.append(la.H.to_matrix())
    torch.testing.assert_close(*matrices, **EXACT)


def test_flattened_rows_of_a_tensor_of_tokens_are_handled():
    model = with_lora(FlatTokens(), "first", "second")
    (batch,) = ragged_batches(lengths=(6, 6, 6), padded_to=6)
    mapping, tensor = make(model), make(model)
    mapping.fit([batch])
    tensor.fit([(batch["input_ids"], batch["labels"])])
    torch.testing.assert_close(tensor.H.to_matrix(), mapping.H.to_matrix(), **EXACT)


class ManyDimensions(nn.Module):
    """Its layers see `(B, height, width, d)`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TwoLinear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).mean((1, 2))


def test_several_dimensions_of_positions_are_positions():
    X, y = sequences(length=6)
    posteriors = []
    for model, inputs in ((Rows(), X), (ManyDimensions(), X.unflatten(1, (2, 3)))):
        la = make(with_lora(model, "first", "second"))
        la.fit([(inputs, y)])
        posteriors.append(la.H.to_matrix())
    torch.testing.assert_close(*posteriors, **EXACT)


class Halving(nn.Module):
    """Joins neighbouring positions before its LoRA layer, so that the mask does not fit it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, 5)
        self.layer = nn.Linear(10, 3)

    def forward(self, batch) -> torch.Tensor:
        pairs = self.embed(batch["input_ids"]).unflatten(1, (-1, 2)).flatten(2)
        return self.layer(pairs).sum(1)


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_a_mask_of_other_positions_is_refused_only_where_it_is_needed(kfac_approx):
    model = Halving()
    settings = LoraConfig(target_modules=["layer"], r=2, init_lora_weights=False)
    model = inject_adapter_in_model(settings, model).requires_grad_(False)
    la = Laplace(
        model,
        "classification",
        subset_of_weights="lora",
        hessian_structure="lowrank_kron",
        backend_kwargs={"kfac_approx": kfac_approx},
    )
    batches = ragged_batches(padded_to=8)
    if kfac_approx == "gradient":
        la.fit(batches)
        assert la(batches[0]).shape == (3, 3)
    else:
        with pytest.raises(NotImplementedError, match='use kfac_approx="gradient"'):
            la.fit(batches)


class PositionsFirst(nn.Module):
    """Runs its layers on `(T, B, d)`, as `nn.Transformer` does by default."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TwoLinear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.transpose(0, 1)).mean(0)


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_rows_that_cannot_be_assigned_to_examples_are_refused(kfac_approx):
    model = with_lora(PositionsFirst(), "first", "second")
    la = make(model, backend_kwargs={"kfac_approx": kfac_approx})
    X = torch.randn(4, 7, 5).double()
    with pytest.raises(
        NotImplementedError, match=r"batch 0: LoRA layer inner\.\S+: its rows, \(7, 4, \d\)"
    ):
        la.fit([(X, pairs()[0][1])])


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_rows_that_cannot_be_assigned_to_examples_are_refused_in_jacobians(structure):
    la = make(with_lora(PositionsFirst(), "first"), structure)
    with pytest.raises(NotImplementedError, match=r"LoRA layer inner\.first\S+: its rows"):
        la.fit([(torch.randn(4, 7, 5).double(), pairs()[0][1])])
