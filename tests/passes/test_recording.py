"""Each example's rows are found, however a model lays them out, mixes, routes or shares them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import one_hot

from tests.support.dense import EXACT, assert_exact, jacobians
from tests.support.models import (
    CLASS_TOKEN_IDS,
    VOCABULARY,
    OfMapping,
    lora_model,
    ragged_batches,
    sequences,
    with_lora,
)
from tests.support.posteriors import KFAC_APPROX, count_forward_passes, make

FULL_RANK = {"rank": 100}
Forward = Callable[[Any, Any], torch.Tensor]


class Two(nn.Module):
    """An embedding, a layer from five numbers to five, one to three, and what is done with them."""

    def __init__(self, run: Forward) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 5)
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 3)
        self.constant = nn.Parameter(torch.zeros(4, 5))
        self.run = run

    def forward(self, x: Any) -> torch.Tensor:
        return self.run(self, x)


def adapted(run: Forward) -> nn.Module:
    return with_lora(Two(run), "first", "second")


def laid(lay_out: Callable, restore: Callable) -> Forward:
    """Layers that see rows `(B, T, d)` laid out in some way; then the positions are averaged."""

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        return restore(m.second(m.first(lay_out(x)).tanh()), x).tanh().mean(1)

    return run


def on_tokens(run: Forward) -> Forward:
    """Of texts, whose proofs are remembered."""
    return lambda m, ids: run(m, m.embed(ids))


LAYOUTS = {
    "by example": laid(lambda x: x, lambda rows, x: rows),
    "flat": laid(lambda x: x.flatten(0, 1), lambda rows, x: rows.unflatten(0, x.shape[:2])),
    "positions first": laid(lambda x: x.transpose(0, 1), lambda rows, x: rows.transpose(0, 1)),
    "positions first, flat": laid(
        lambda x: x.transpose(0, 1).flatten(0, 1),
        lambda rows, x: rows.unflatten(0, (x.shape[1], -1)).transpose(0, 1),
    ),
    "windows": laid(
        lambda x: x.unflatten(1, (-1, 2)).flatten(0, 1),
        lambda rows, x: rows.reshape(*x.shape[:2], -1),
    ),
    "frames": laid(
        lambda x: x.unflatten(1, (2, -1)).transpose(1, 2).flatten(0, 1),
        lambda rows, x: rows.reshape(len(x), -1, 2, 3).transpose(1, 2).flatten(1, 2),
    ),
    "backwards": laid(lambda x: x.flip(0), lambda rows, x: rows.flip(0)),
}


def turning(m: Any, x: torch.Tensor) -> torch.Tensor:
    return LAYOUTS["positions first" if x.shape[1] == 6 else "by example"](m, x)


def both_ways(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.second(m.first(m.first(x).tanh().transpose(0, 1)).tanh()).mean(0)


def shared(*leading: int) -> Forward:
    """Rows without a batch dimension go through the layer of the inputs, as in DeBERTa."""

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        distances = m.first(m.constant[: leading[-1]].reshape(*leading, 5)).reshape(-1, 5)
        return m.second(((m.first(x) @ distances.T).softmax(-1) @ distances).tanh()).mean(1)

    return run


def contrast(m: Any, x: torch.Tensor) -> torch.Tensor:
    rows = m.first(x)
    return m.second((rows - rows.mean(0)).tanh()).mean(1)


def needs_pairs(m: Any, x: torch.Tensor) -> torch.Tensor:
    if len(x) == 1:
        raise RuntimeError("not alone")
    return shared(3)(m, x)


def ordering(m: Any, x: torch.Tensor) -> torch.Tensor:
    order = x[:, 0, 0].argsort()
    return LAYOUTS["by example"](m, x[order])[order.argsort()]


def routed(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Positions go to one of two layers, by their first number."""
    out = x.new_zeros(*x.shape[:2], 3)
    for chosen, layer in ((x[..., 0] > 0, m.first), (x[..., 0] <= 0, m.second)):
        if chosen.any():
            out = out.masked_scatter(chosen[..., None], layer(x[chosen]).tanh()[:, :3])
    return out.mean(1)


def of_windows(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Windows of two positions, as many as a text has before its zeros."""
    counts = ((x[..., 0] != 0).sum(1) + 1) // 2
    windows = [x.unflatten(0, (-1, 2))[:n] for x, n in zip(x, counts, strict=True)]
    rows = m.first(torch.cat(windows)).tanh().mean(1)
    return m.second(torch.stack([part.mean(0) for part in rows.split(counts.tolist())]))


def of_batch(m: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if "classes" in batch:  # texts, as CLIP has
        images, classes = (m.second(m.first(batch[key]).tanh()) for key in ("x", "classes"))
        return images.mean(1) @ classes.mean(1).T
    if "text" in batch:  # which a window belongs to
        windows = batch["x"] if "x" in batch else m.embed(batch["input_ids"])
        rows = m.first(windows).tanh().mean(1)
        return m.second(one_hot(batch["text"]).to(rows).T @ rows)
    x = m.embed(batch["input_ids"])
    if "x" in batch:  # images, as LLaVA has
        is_image = (batch["input_ids"] == 0)[..., None]
        x = x.masked_scatter(is_image, m.first(batch["x"]).tanh().mean(1))
    return m.second(x.tanh().mean(1))


def numbers(*sizes: tuple[int, int]) -> list[torch.Tensor]:
    return [sequences(*size)[0] for size in sizes]


def texts(*sizes: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, VOCABULARY, size, generator=generator) for size in sizes]


def choices(*counts: Sequence[int]) -> list[torch.Tensor]:
    """So many of four positions of each example go to the first layer."""
    batches = numbers(*((len(of_batch), 4) for of_batch in counts))
    for X, of_batch in zip(batches, counts, strict=True):
        X[..., 0] = torch.where(torch.arange(4) < torch.tensor(of_batch)[:, None], 1.0, -1.0)
    return batches


def ending_at(*lengths: Sequence[int]) -> list[torch.Tensor]:
    batches = numbers(*((len(of_batch), max(of_batch)) for of_batch in lengths))
    for X, of_batch in zip(batches, lengths, strict=True):
        X[torch.arange(X.shape[1]) >= torch.tensor(of_batch)[:, None]] = 0
    return batches


def with_images(*counts: Sequence[int]) -> list[dict[str, torch.Tensor]]:
    batches = []
    for of_batch in counts:
        is_image = torch.arange(4) < torch.tensor(of_batch)[:, None]
        ids = torch.where(is_image, 0, texts((len(of_batch), 4))[0])
        images = {"x": sequences(sum(of_batch), 4)[0]} if sum(of_batch) else {}
        batches.append({"input_ids": ids, **images})
    return batches


def in_windows(*counts: Sequence[int]) -> list[dict[str, torch.Tensor]]:
    owners = [torch.arange(len(each)).repeat_interleave(torch.tensor(each)) for each in counts]
    return [{"x": sequences(len(text), 4)[0], "text": text} for text in owners]


SORTED = sequences(4, 3)[0]
SORTED = SORTED[SORTED[:, 0, 0].argsort()]
SIZES = (4, 4), (1, 4), (3, 4), (2, 6), (6, 6), (4, 8)
COUNTS = (1, 1), (2, 0), (1, 3), (3, 1), (4, 0, 2), (2, 2), (0, 2), (3, 3)
CASES: dict[str, tuple[Forward, Sequence[Any]]] = {
    **{name: (run, numbers(*SIZES)) for name, run in LAYOUTS.items()},
    **{f"texts, {name}": (on_tokens(run), texts(*SIZES)) for name, run in LAYOUTS.items()},
    "examples alike": (LAYOUTS["positions first"], [X[:1].expand_as(X) for X in numbers((4, 4))]),
    "by length": (turning, numbers((4, 3), (4, 6), (6, 6), (4, 3))),
    "two calls of a layer, two layouts": (both_ways, numbers((4, 4), (3, 3), (3, 5))),
    "one shared row": (shared(1), numbers((1, 3), (4, 3), (2, 5))),
    "as many shared rows as examples": (shared(3), numbers((1, 3), (3, 3), (2, 5), (4, 4))),
    "shared rows with a leading one": (shared(1, 3), numbers((3, 3), (2, 5))),
    "texts, shared rows": (on_tokens(shared(3)), texts((3, 3), (2, 5), (1, 3))),
    "examples that count for others": (contrast, numbers((4, 3), (3, 3))),
    "no example alone": (needs_pairs, numbers((4, 3), (3, 3))),
    "sorted": (ordering, [SORTED, SORTED.flip(0), SORTED, SORTED[[2, 0, 1]]]),
    "routed": (routed, choices(*COUNTS)),
    "unequal windows of texts": (of_windows, ending_at((4, 4), (2, 6), (4, 4), (6, 2))),
    "windows as rows": (of_batch, in_windows((2, 2), (1, 3), (1, 2), (3, 1, 1), (1, 3, 2))),
    "windows of tokens as rows": (
        of_batch,
        [
            {"input_ids": texts((len(window["text"]), 4))[0], "text": window["text"]}
            for window in in_windows((2, 2), (1, 3))
        ],
    ),
    "texts as classes": (
        of_batch,
        [{"x": X, "classes": SORTED[:3]} for X in numbers((3, 3), (6, 3))],
    ),
    "images in texts": (of_batch, with_images((1, 1), (2, 0), (0, 2), (1, 3), (0, 0), (1, 2, 0))),
}


def checked(model: nn.Module, inputs: Sequence[Any], structure: str = "lowrank_kron") -> Any:
    """A posterior that is compared with Jacobians that know of no rows."""
    model = OfMapping(model) if isinstance(inputs[0], Mapping) else model
    settings = {"backend_kwargs": FULL_RANK} if structure == "lowrank_kron" else {}
    la = make(model, structure, **settings)
    la.fit([(X, torch.arange(len(model(X))) % 3) for X in inputs])
    assert_exact(la, model, inputs)
    return la


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_curvature_and_covariance_are_exact(case):
    run, inputs = CASES[case]
    checked(adapted(run), inputs)


def matrix(model: nn.Module, batches: Sequence[Any], kfac_approx: str) -> torch.Tensor:
    la = make(model, backend_kwargs={**FULL_RANK, "kfac_approx": kfac_approx})
    la.fit(batches)
    return la.H.to_matrix()


@pytest.mark.parametrize("run", [LAYOUTS["flat"], LAYOUTS["positions first"], shared(3)])
def test_factors_of_expand_are_those_of_batches_of_one(run):
    model, batches = adapted(run), [sequences(4, 4), sequences(3, 6)]
    of_one = [(X[n : n + 1], y[n : n + 1]) for X, y in batches for n in range(len(X))]
    torch.testing.assert_close(
        matrix(model, batches, "expand"), matrix(model, of_one, "expand"), **EXACT
    )


def padded(joined: int) -> Forward:
    """Flat positions, of which so many neighbours were added up."""

    def run(m: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        mask = batch["attention_mask"][..., None]
        rows = (m.embed(batch["input_ids"]) * mask).unflatten(1, (-1, joined)).sum(2)
        hidden = m.first(rows.flatten(0, 1)).tanh().unflatten(0, rows.shape[:2])
        return m.second((hidden * mask[:, ::joined]).sum(1))

    return run


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_padding_does_not_count_and_a_mask_of_other_positions_is_refused(kfac_approx):
    batches = [ragged_batches(padded_to=length) for length in (7, 11)]
    torch.testing.assert_close(
        *(matrix(adapted(padded(1)), some, kfac_approx) for some in batches), **EXACT
    )
    if kfac_approx == "gradient":
        assert matrix(adapted(padded(2)), ragged_batches(padded_to=8), kfac_approx).any()
        return
    with pytest.raises(NotImplementedError, match=r"first\S+: the layer sees 4 .*use kfac"):
        matrix(adapted(padded(2)), ragged_batches(padded_to=8), kfac_approx)
    with pytest.raises(NotImplementedError, match=r'rows of others: use kfac_approx="gradient"'):
        matrix(adapted(contrast), [sequences(4, 3)], kfac_approx)


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_one_mask_of_all_texts_is_that_of_each(kfac_approx):
    (batch,) = ragged_batches(lengths=(5, 5, 5), padded_to=7)
    shared_by_all = batch | {"attention_mask": batch["attention_mask"][:1]}
    torch.testing.assert_close(
        *(matrix(adapted(padded(1)), [some], kfac_approx) for some in (shared_by_all, batch)),
        **EXACT,
    )


@pytest.mark.parametrize("n_queries", [1, 7])
def test_a_mask_of_what_tokens_attend_to_is_exact_or_refused(n_queries):
    (batch,) = ragged_batches(lengths=(4, 7, 5))
    is_padding = batch["attention_mask"][:, None, None].expand(3, 1, n_queries, 7) == 0
    of_queries = batch | {"attention_mask": is_padding.double() * torch.finfo(torch.float64).min}
    torch.testing.assert_close(
        *(matrix(lora_model("bert"), [some], "gradient") for some in (of_queries, batch)), **EXACT
    )
    with pytest.raises(NotImplementedError, match=r"1, \d, 7\): use kfac_approx"):
        matrix(lora_model("bert"), [of_queries], "expand")
    with pytest.raises(NotImplementedError, match=r"does not show .* pass one of shape \(3, 7\)"):
        make(lora_model("gpt2"), class_token_ids=CLASS_TOKEN_IDS).fit([of_queries])


@pytest.mark.parametrize("shape", [(1, 4), (3, 4, 4), (3, 1, 4, 4)])
def test_a_mask_beside_features_counts_no_padding_as_positions(shape):
    mask = (torch.arange(4) > 0).expand(shape)
    batch = {"x": sequences(3, 4)[0], "attention_mask": mask, "labels": torch.arange(3)}

    def run(m: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return m.second(m.first(batch["x"]).tanh().mean(1))

    assert matrix(adapted(run), [batch], "gradient").any()
    with pytest.raises(NotImplementedError, match='use kfac_approx="gradient"'):
        matrix(adapted(run), [batch], "expand")


@pytest.mark.parametrize("run", [LAYOUTS["by example"], shared(3), contrast])
def test_jacobians_are_differentiable_in_the_inputs(run):
    model, (x, expected) = adapted(run), (sequences(3, 3)[0].requires_grad_() for _ in range(2))
    Js, f = make(model).backend.jacobians(x, enable_backprop=True)
    (Js.square().sum() + f.sum()).backward()
    (jacobians(model, expected).square().sum() + model(expected).sum()).backward()
    torch.testing.assert_close(x.grad, expected.grad, **EXACT)


@pytest.mark.parametrize(
    ("run", "n_passes"),
    [(LAYOUTS["flat"], 1), (shared(3), 1 + 4), (contrast, 1 + 4 + 1), (needs_pairs, 1 + 1)],
)
def test_an_example_comes_alone_or_through_the_batch(run, n_passes):
    """The batch's own pass, one of each example, and another one of the batch if it is needed."""
    la = checked(adapted(run), numbers((4, 3)))
    calls = count_forward_passes(la)  # that come to an end
    la.fit([sequences(4, 3)])
    assert len(calls) == n_passes
    if run is not needs_pairs:
        la.fit([sequences(1, 3)])
        assert len(calls) == n_passes + 1


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_shared_rows_in_the_hosts_structures(structure):
    checked(adapted(shared(3)), numbers((4, 3), (2, 3)), structure)
