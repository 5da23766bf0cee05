"""Rows at a layer belong to the examples that they are proven to belong to, whatever the sizes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from tests.support.dense import gradient_curvature, jacobians, softmax_fisher
from tests.support.models import (
    VOCABULARY,
    Detour,
    OfMapping,
    TwoLinear,
    lora_model,
    pairs,
    ragged_batches,
    sequences,
    with_lora,
)
from tests.support.posteriors import KFAC_APPROX, make

EXACT = {"rtol": 1e-9, "atol": 1e-12}
FULL_RANK = {"rank": 100}


class Rows(nn.Module):
    """Runs its layers on rows `(B, T, d)` laid out in some way, then averages the positions."""

    def __init__(self, lay_out: Callable, restore: Callable) -> None:
        super().__init__()
        self.inner = TwoLinear()
        self.lay_out, self.restore = lay_out, restore

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.inner(self.lay_out(x))
        return self.restore(rows, x).tanh().mean(1)


def by_example() -> nn.Module:
    return Rows(lambda x: x, lambda rows, x: rows)


LAYOUTS: dict[str, Callable[[], nn.Module]] = {
    "by example": by_example,
    "flat": lambda: Rows(lambda x: x.flatten(0, 1), lambda rows, x: rows.unflatten(0, x.shape[:2])),
    "positions first": lambda: Rows(
        lambda x: x.transpose(0, 1), lambda rows, x: rows.transpose(0, 1)
    ),
    "positions first, flat": lambda: Rows(
        lambda x: x.transpose(0, 1).flatten(0, 1),
        lambda rows, x: rows.unflatten(0, (x.shape[1], -1)).transpose(0, 1),
    ),
    "windows": lambda: Rows(
        lambda x: x.unflatten(1, (-1, 2)).flatten(0, 1),
        lambda rows, x: rows.reshape(*x.shape[:2], -1),
    ),
    "frames": lambda: Rows(
        lambda x: x.unflatten(1, (2, -1)).transpose(1, 2).flatten(0, 1),
        lambda rows, x: rows.reshape(len(x), -1, 2, 3).transpose(1, 2).flatten(1, 2),
    ),
    "backwards": lambda: Rows(
        lambda x: x.flatten(0, 1).flip(0), lambda rows, x: rows.flip(0).unflatten(0, x.shape[:2])
    ),
}


def assert_exact(
    model: nn.Module, batches: Sequence[tuple[Any, torch.Tensor]], posterior=None
) -> None:
    """Fit and predict, and compare with Jacobians that know of no rows."""
    la = posterior or make(model, backend_kwargs=FULL_RANK)
    la.fit(batches)
    Js = torch.cat([jacobians(model, X) for X, _ in batches])
    f_mu = torch.cat([model(X) for X, _ in batches]).detach()
    H = gradient_curvature(model, Js, softmax_fisher(f_mu))
    torch.testing.assert_close(la.H.to_matrix(), H, **EXACT)
    covariance = Js @ torch.linalg.inv(H + torch.eye(len(H)).double()) @ Js.mT
    moments = [la.predictive_moments(X) for X, _ in batches]
    torch.testing.assert_close(torch.cat([f_var for _, f_var in moments]), covariance, **EXACT)


def batches_of(*sizes: tuple[int, int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [sequences(n, length) for n, length in sizes]


SIZES = {
    "as many positions as examples": [(4, 4), (4, 4)],
    "one example first, a last batch that is smaller": [(1, 4), (4, 4), (3, 4), (1, 4)],
    "other lengths": [(2, 4), (2, 6), (3, 2), (4, 8)],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_in_every_order_give_exact_curvature_and_covariance(layout, sizes):
    assert_exact(with_lora(LAYOUTS[layout](), "first", "second"), batches_of(*sizes))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_examples_that_are_alike_are_told_apart(layout):
    X, y = sequences(4, 4)
    X = X[:1].expand(4, 4, 5)[:, :1].expand(4, 4, 5)
    assert_exact(with_lora(LAYOUTS[layout](), "first", "second"), [(X, y), (X[:3], y[:3])])


@pytest.mark.parametrize("kfac_approx", ["expand", "reduce"])
@pytest.mark.parametrize("layout", ["flat", "positions first", "positions first, flat"])
def test_fixed_layouts_give_the_factors_of_rows_by_example(layout, kfac_approx):
    settings = {**FULL_RANK, "kfac_approx": kfac_approx}
    matrices = []
    for name in ("by example", layout):
        la = make(with_lora(LAYOUTS[name](), "first", "second"), backend_kwargs=settings)
        la.fit(batches_of((4, 4), (3, 6)))
        matrices.append(la.H.to_matrix())
    torch.testing.assert_close(*matrices, **EXACT)


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


class Halving(nn.Module):
    """Joins neighbouring positions before its LoRA layer, so that the mask does not fit it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 5)
        self.layer = nn.Linear(10, 3)

    def forward(self, batch) -> torch.Tensor:
        pairs = self.embed(batch["input_ids"]).unflatten(1, (-1, 2)).flatten(2)
        return self.layer(pairs).sum(1)


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_a_mask_of_other_positions_is_refused_only_where_it_is_needed(kfac_approx):
    la = make(with_lora(Halving(), "layer"), backend_kwargs={"kfac_approx": kfac_approx})
    batches = ragged_batches(padded_to=8)
    if kfac_approx == "gradient":
        la.fit(batches)
        assert la(batches[0]).shape == (3, 3)
    else:
        with pytest.raises(NotImplementedError, match='use kfac_approx="gradient"'):
            la.fit(batches)


class RelativePositions(nn.Module):
    """Projects embeddings that have no batch dimension with the layer of its inputs.

    So does DeBERTa's `share_att_key`. There are as many embeddings as examples in a batch of four.
    """

    def __init__(self, *leading: int) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.second = nn.Linear(4, 3)
        self.embedding = nn.Parameter(torch.randn(*leading, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        distances = self.first(self.embedding).reshape(-1, 4)
        scores = (self.first(x) @ distances.T).softmax(-1)
        return self.second((scores @ distances).tanh()).mean(1)


SHARED = {"one": (), "rows": (4,), "a leading one": (1, 4), "as many as positions": (4, 3)}


@pytest.mark.parametrize("leading", SHARED.values(), ids=list(SHARED))
def test_rows_that_examples_share_belong_to_each_of_them(leading):
    model = with_lora(RelativePositions(*leading), "first", "second")
    assert_exact(model, batches_of((1, 3), (4, 3), (2, 5), (4, 4)))


@pytest.mark.parametrize("kfac_approx", ["expand", "reduce"])
def test_shared_rows_have_no_other_factors_than_gradients(kfac_approx):
    la = make(
        with_lora(RelativePositions(4), "first", "second"),
        backend_kwargs={"kfac_approx": kfac_approx},
    )
    with pytest.raises(
        NotImplementedError,
        match=r'rows of first belong to several examples.*use kfac_approx="gradient", or leave',
    ):
        la.fit(batches_of((4, 3)))


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_shared_rows_in_the_hosts_structures(structure):
    model = with_lora(RelativePositions(4), "first", "second")
    batches = batches_of((4, 3), (2, 3))
    la = make(model, structure)
    la.fit(batches)
    Js = torch.cat([jacobians(model, X) for X, _ in batches])
    fisher = softmax_fisher(torch.cat([model(X) for X, _ in batches]).detach())
    H = torch.einsum("bcp,bcd,bdq->pq", Js, fisher, Js)
    torch.testing.assert_close(la.H, H if structure == "full" else H.diagonal(), **EXACT)


def test_shared_rows_are_differentiable_in_the_inputs():
    model = with_lora(RelativePositions(4), "first", "second")
    (X, y) = sequences(3, 3)
    la = make(model, backend_kwargs=FULL_RANK, enable_backprop=True)
    la.fit([(X, y)])
    leaf = X.clone().requires_grad_()
    alone = [X[n : n + 1].clone().requires_grad_() for n in range(3)]
    la.predictive_moments(leaf)[1].diagonal(dim1=1, dim2=2).sum().backward()
    for x in alone:
        la.predictive_moments(x)[1].diagonal(dim1=1, dim2=2).sum().backward()
    torch.testing.assert_close(leaf.grad, torch.cat([x.grad for x in alone]), **EXACT)


class Prompts(nn.Module):
    """Compares images with as many texts as there are classes, as CLIP does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.second = nn.Linear(5, 4)

    def forward(self, batch: Mapping) -> torch.Tensor:
        images = self.first(batch["images"]).tanh().mean(1)
        texts = self.second(batch["texts"]).tanh().mean(1)
        return images @ texts.T


@pytest.mark.parametrize("sizes", [(3, 3), (2, 3), (3, 6, 1)])
def test_texts_that_are_classes_are_no_examples(sizes):
    """Three classes."""
    model = with_lora(Prompts(), "first", "second")
    texts = sequences(3, 3)[0] + 1
    batches = [({"images": X, "texts": texts}, y) for X, y in (sequences(n, 3) for n in sizes)]
    la = make(model, backend_kwargs=FULL_RANK)
    assert_exact(OfMapping(model), batches, la)


class Routed(nn.Module):
    """Sends positions to one of two layers, by their first number."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)]))
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_zeros(*x.shape[:2], 3)
        for expert, layer in enumerate(getattr(self, self.name)):
            chosen = (x[..., 0] > 0) == bool(expert)
            out = out.masked_scatter(chosen[..., None], layer(x[chosen]).tanh())
        return out.mean(1)


def routed(counts: Sequence[int], length: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """So many positions of each example go to the second layer."""
    X, y = sequences(len(counts), length)
    X = X.clone()
    X[..., 0] = X[..., 0].abs()
    for row, count in zip(X, counts, strict=True):
        row[count:, 0] *= -1
    return X, y


@pytest.mark.parametrize(
    ("name", "first"), [("experts", (1, 1)), ("experts", (2, 2)), ("specialists", (2, 2))]
)
def test_rows_that_a_router_picks_are_told_apart_in_every_batch(name, first):
    """At first each example has as many as any other, in order; later it has not."""
    model = with_lora(Routed(name), "0", "1")
    counts = [first, (2, 0), (1, 3), (3, 1), (4, 0, 2), (1, 1), (0, 2), (4, 4), (3, 3)]
    assert_exact(model, [routed(of_batch) for of_batch in counts])


def test_as_many_rows_as_examples_are_not_one_of_each_where_a_router_picks_them():
    model = with_lora(Routed("experts"), "1")
    assert_exact(model, [routed(of_batch) for of_batch in ((1, 1), (2, 0), (0, 2))])


@pytest.mark.parametrize("kfac_approx", ["expand", "reduce"])
def test_rows_that_a_router_picks_have_no_other_factors_than_gradients(kfac_approx):
    la = make(with_lora(Routed("experts"), "0", "1"), backend_kwargs={"kfac_approx": kfac_approx})
    with pytest.raises(NotImplementedError, match=r'experts\.\S+: .*use kfac_approx="gradient"'):
        la.fit([routed((1, 3))])


class Pictures(nn.Module):
    """Puts images into texts where their tokens ask for one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 5)
        self.vision = nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor | None = None):
        x = self.embed(input_ids)
        if pixel_values is not None:
            images = self.vision(pixel_values).tanh().mean(1)
            x = x.masked_scatter((input_ids == 0)[..., None], images)
        return self.head(x.tanh().mean(1)).tanh()


class _Batched(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Mapping) -> torch.Tensor:
        return self.model(**batch)


def pictures(*counts: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Texts with so many images, of as many parts as a text has tokens."""
    generator = torch.Generator().manual_seed(sum(counts))
    ids = torch.randint(1, VOCABULARY, (len(counts), 4), generator=generator)
    for row, count in zip(ids, counts, strict=True):
        row[:count] = 0
    X = {"input_ids": ids}
    if sum(counts):
        X["pixel_values"] = torch.randn(sum(counts), 4, 5, generator=generator).double()
    return X, torch.arange(len(counts)) % 3


def test_images_belong_to_the_texts_that_ask_for_them():
    """As many images as texts, or twice as many, in order at first; later not; and none."""
    inner = with_lora(Pictures(), "vision", "head")
    counts = [(1, 1), (2, 0), (0, 2), (2, 2), (1, 3), (3, 1), (0, 0), (1, 1, 1), (1, 2, 0)]
    la = make(_Batched(inner), backend_kwargs=FULL_RANK)
    assert_exact(OfMapping(_Batched(inner)), [pictures(*c) for c in counts], la)


class Turning(nn.Module):
    """Runs its layers on `(B, T, d)`, and on `(T, B, d)` where there are five positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TwoLinear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] == 5:
            return self.inner(x.transpose(0, 1)).tanh().mean(0)
        return self.inner(x).tanh().mean(1)


class Sorting(nn.Module):
    """Runs its layers on examples in the order of their first numbers."""

    def __init__(self, pick: Callable) -> None:
        super().__init__()
        self.inner = TwoLinear()
        self.pick = pick

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = x[:, 0, 0].argsort()
        return self.pick(self.inner(x[order]).tanh().mean(1), order.argsort())


def reassigned(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    result = torch.zeros_like(rows)
    for row, place in zip(rows, index.argsort(), strict=True):
        result[place] = row
    return result


RESTORING: dict[str, Callable] = {
    "x[index]": lambda rows, index: rows[index],
    "index_select": lambda rows, index: rows.index_select(0, index),
    "gather": lambda rows, index: rows.gather(0, index[:, None].expand_as(rows)),
    "a matrix": lambda rows, index: nn.functional.one_hot(index).to(rows) @ rows,
    "assigned in place": lambda rows, index: reassigned(rows, index),
    "joined slices": lambda rows, index: torch.cat([rows[i : i + 1] for i in index.tolist()]),
    "stacked sums": lambda rows, index: torch.stack([2 * rows[i] + 1 for i in index.tolist()]),
    "stacked": lambda rows, index: torch.stack([rows[i] for i in index.tolist()]),
    "stacked parts": lambda rows, index: torch.stack([list(rows)[i] for i in index.tolist()]),
    "joined": lambda rows, index: torch.cat([rows.split(1)[i] for i in index.tolist()]),
    "assigned": lambda rows, index: torch.zeros_like(rows).index_put((index.argsort(),), rows),
    "index_copy": lambda rows, index: torch.zeros_like(rows).index_copy(0, index.argsort(), rows),
    "index_add": lambda rows, index: torch.zeros_like(rows).index_add(0, index.argsort(), rows),
    "scatter": lambda rows, index: torch.zeros_like(rows).scatter(
        0, index.argsort()[:, None].expand_as(rows), rows
    ),
}


@pytest.mark.parametrize("pick", RESTORING.values(), ids=list(RESTORING))
def test_examples_that_a_model_sorts_are_told_apart_though_the_first_batch_was_sorted(pick):
    model = with_lora(Sorting(pick), "first", "second")
    (X, y), (others, _) = batches_of((4, 3), (4, 3))
    X = X[X[:, 0, 0].argsort()]
    assert_exact(model, [(X, y), (others.flip(0), y), (X, y), (X[[2, 0, 1]], y[:3])])


class OfWindows(nn.Module):
    """Runs its first layer on windows of two positions, as many as a text has, and joins them."""

    def __init__(self, join: Callable) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3)
        self.join = join

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = ((x[..., 0] != 0).sum(1) + 1) // 2
        windows = torch.cat(
            [text.unflatten(0, (-1, 2))[:n] for text, n in zip(x, numbers, strict=True)]
        )
        rows = self.first(windows).tanh().mean(1)
        return self.second(self.join(rows, numbers))


def owners_of(numbers: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(numbers)).repeat_interleave(numbers)


def assigned(rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    result = rows.new_zeros(len(numbers), rows.shape[1])
    for place, part in enumerate(rows.split(numbers.tolist())):
        result[place] = part.mean(0)
    return result


JOINING: dict[str, Callable] = {
    "index_add": lambda rows, n: rows.new_zeros(len(n), 6).index_add(0, owners_of(n), rows),
    "scatter_reduce": lambda rows, n: rows.new_zeros(len(n), 6).scatter_reduce(
        0, owners_of(n)[:, None].expand_as(rows), rows, "sum"
    ),
    "split": lambda rows, n: torch.stack([part.mean(0) for part in rows.split(n.tolist())]),
    "masks": lambda rows, n: torch.stack([rows[owners_of(n) == i].mean(0) for i in range(len(n))]),
    "assigned in place": assigned,
    "segments": lambda rows, n: torch.segment_reduce(rows, "mean", lengths=n),
    "a matrix": lambda rows, n: nn.functional.one_hot(owners_of(n)).to(rows).T @ rows,
    "padded": lambda rows, n: pad_sequence(rows.split(n.tolist()), batch_first=True).sum(1),
    "the first of each": lambda rows, n: rows[n.cumsum(0) - n],
}


@pytest.mark.parametrize("join", JOINING.values(), ids=list(JOINING))
def test_texts_may_have_unequal_numbers_of_windows_though_those_of_the_first_batch_had_not(join):
    batches = batches_of((2, 4), (2, 6), (2, 4))
    for (X, _), lengths in zip(batches, ((4, 4), (2, 6), (4, 4)), strict=True):
        for text, length in zip(X, lengths, strict=True):
            text[length:] = 0
    assert_exact(with_lora(OfWindows(join), "first", "second"), batches)


class WindowsOfBatch(nn.Module):
    """Windows come as rows of the batch, beside the number of the text that each belongs to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, batch: Mapping) -> torch.Tensor:
        rows, owners = self.first(batch["x"]).tanh().mean(1), batch["text"]
        return self.second(nn.functional.one_hot(owners).to(rows).T @ rows)


@pytest.mark.parametrize("numbers", [[(2, 2), (1, 3), (2, 2)], [(1, 2), (3, 1, 1), (1, 3, 2)]])
def test_windows_may_come_as_rows_of_the_batch(numbers, monkeypatch):
    model = OfMapping(with_lora(WindowsOfBatch(), "first", "second"))
    batches = []
    for place, of_batch in enumerate(numbers):
        X, _ = sequences(sum(of_batch), 4 + place % 2)
        text = owners_of(torch.tensor(of_batch))
        batches.append(({"x": X, "attention_mask": X[..., 0].bool(), "text": text}, len(of_batch)))
    batches = [(X, torch.arange(n) % 3) for X, n in batches]
    assert_exact(model, batches, make(model, backend_kwargs=FULL_RANK))
    monkeypatch.setattr("laplace_lora_ext.passes.parts._AT_ONCE", 1)
    assert_exact(model, batches, make(model, backend_kwargs=FULL_RANK))


def test_a_layout_that_has_changed_is_proven_in_every_batch():
    model = with_lora(Turning(), "first", "second")
    assert_exact(model, batches_of((4, 3), (4, 5), (4, 4), (5, 5), (4, 3)))


class BothWays(nn.Module):
    """Calls one layer on `(B, T, d)` and on `(T, B, d)`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x).tanh()
        return self.head(self.layer(x.transpose(0, 1)).tanh()).mean(0)


def test_calls_of_one_layer_have_layouts_of_their_own():
    assert_exact(with_lora(BothWays(), "layer", "head"), batches_of((4, 4), (3, 3), (3, 5)))


class OnePosition(nn.Module):
    """Runs its layers on `(T, B, d)`, and takes one position of each example."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TwoLinear()

    def forward(self, batch: Mapping) -> torch.Tensor:
        rows = self.inner(batch["x"].transpose(0, 1)).transpose(0, 1)
        return rows.take_along_dim(batch["at"][:, None, None], dim=1)[:, 0]


def test_too_few_gradients_to_tell_two_layouts_apart_decide_nothing():
    """Those of position 0 of example 0, of position 1 of example 1, and so on."""
    model = with_lora(OnePosition(), "first", "second")
    batches = [
        ({"x": X, "at": torch.tensor(at)}, y)
        for at, (X, y) in zip(
            ((0, 1, 2, 3), (3, 0, 0, 1), (2, 2, 1, 0)), [sequences(4, 4)] * 3, strict=True
        )
    ]
    assert_exact(OfMapping(model), batches, make(model, backend_kwargs=FULL_RANK))


class Contrast(nn.Module):
    """Logits that depend on the other examples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.second = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.first(x)
        return self.second((rows - rows.mean(0)).tanh())


def test_logits_of_a_whole_batch_have_the_jacobians_of_the_batch():
    assert_exact(with_lora(Contrast(), "first", "second"), [pairs(n=4)[0], pairs(n=3)[0]])


@pytest.mark.parametrize("layout", ["by example", "positions first", "flat"])
def test_an_adapter_without_a_gradient_in_lora_a_learns_its_rows_from_lora_b(layout):
    model = with_lora(LAYOUTS[layout](), "first", "second")
    trained = copy.deepcopy(model.state_dict())
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    with pytest.warns(UserWarning, match="looks untrained"):
        la = make(model, backend_kwargs=FULL_RANK)
    batches = batches_of((4, 4))
    la.fit(batches)
    known = dict(la.model.layouts)
    model.load_state_dict(trained)
    assert_exact(model, batches, la)
    assert la.model.layouts == known


class Gated(nn.Module):
    """Its second layer counts in a batch only if the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)
        self.second = nn.Linear(5, 3)

    def forward(self, batch: Mapping) -> torch.Tensor:
        rows = self.second(batch["x"].transpose(0, 1)).transpose(0, 1)
        return (self.first(batch["x"]) + batch["gate"] * rows).tanh().mean(1)


def test_rows_without_a_gradient_at_first_are_told_apart_when_one_comes():
    model = with_lora(Gated(), "first", "second")
    batches = [
        ({"x": X, "gate": torch.tensor(gate).double()}, y)
        for gate, (X, y) in zip((0, 0, 1, 2), [sequences(4, 4)] * 4, strict=True)
    ]
    la = make(model, backend_kwargs=FULL_RANK)
    assert_exact(OfMapping(model), batches, la)


def count_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets an entry at each backward pass."""
    calls, grad = [], torch.autograd.grad

    def counting(*args: Any, **kwargs: Any):
        calls.append(1)
        return grad(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", counting)
    return calls


@pytest.mark.parametrize("kind", ["texts", "windows"])
def test_layouts_are_proven_once(kind, monkeypatch):
    if kind == "texts":
        la, batches = make(lora_model("bert")), ragged_batches()
        inputs = batches[0]
    else:
        la = make(with_lora(LAYOUTS["windows"](), "first", "second"))
        batches = batches_of((3, 4), (3, 6), (2, 4))
        inputs = batches[0][0]
    calls = count_passes(monkeypatch)
    la.fit(batches)
    at_first = len(calls)
    calls.clear()
    la.fit(batches)
    assert len(calls) == at_first - 1  # all seeds of these small models at once
    calls.clear()
    la(inputs, link_approx="probit")
    assert len(calls) == 1


class Counted(torch.autograd.Function):
    """The identity, which counts backward passes through it."""

    passes = 0

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        Counted.passes += 1
        return gradient


def test_a_layer_that_the_logits_do_not_depend_on_costs_no_pass_in_later_batches():
    model = with_lora(Detour(n_outputs=2), "used", "unused")
    model.register_forward_hook(lambda *args: Counted.apply(args[2]))
    la = make(model)
    batches = [(X, y % 2) for X, y in pairs()]
    passes = []
    for _ in range(2):
        Counted.passes = 0
        la.fit(batches)
        passes.append(Counted.passes)
    assert passes[1] == 1 < passes[0]


def test_what_is_known_survives_a_copy_and_a_pickle():
    model = with_lora(RelativePositions(4), "first", "second")
    la = make(model, backend_kwargs=FULL_RANK)
    la.fit(batches_of((4, 3)))
    for known in (copy.deepcopy(la.model.layouts), pickle.loads(pickle.dumps(la.model.layouts))):
        la.model.layouts = known
        assert_exact(model, batches_of((4, 3)), la)
