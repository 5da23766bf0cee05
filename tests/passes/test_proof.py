"""When it is proven whose rows are whose, and what is remembered of it."""

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_lora_ext.passes.graph import codewords
from tests.compatibility.examples import together
from tests.compatibility.families import CLASSIFIER, FAMILIES
from tests.support.dense import EXACT, jacobians
from tests.support.models import (
    VOCABULARY,
    OfMapping,
    first_batch,
    lora_model,
    with_lora,
)
from tests.support.posteriors import count_backward_passes, count_forward_passes, make

Batch = Mapping[str, Tensor]


@pytest.mark.parametrize("n_examples", [2, 3, 4, 5, 8, 9])
def test_of_any_two_examples_some_seed_has_the_first_alone(n_examples):
    words = codewords(n_examples).double()
    first_alone = words.T @ (1 - words)
    assert torch.equal(first_alone > 0, ~torch.eye(n_examples).bool())


# --- layouts that the first batch does not show ---------------------------------------


class Texts(nn.Module):
    """Two layers on embedded tokens, which each heir runs in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 5)
        layers = {"one": nn.Linear(5, 3), "two": nn.Linear(5, 3)}
        self.layers = nn.ModuleDict(layers)


def of_chosen(layer: nn.Module, x: Tensor, chosen: Tensor) -> Tensor:
    """Send the chosen positions through a layer; the others are 0."""
    out = x.new_zeros(*chosen.shape, 3)
    return out.masked_scatter(chosen[..., None], layer(x[chosen]).tanh())


class Router(Texts):
    """Odd tokens go to one layer, others to the other."""

    def forward(self, batch: Batch) -> Tensor:
        x = self.embed(batch["input_ids"])
        is_odd = batch["input_ids"] % 2 == 1
        of_odd = of_chosen(self.layers["one"], x, is_odd)
        return (of_odd + of_chosen(self.layers["two"], x, ~is_odd)).mean(1)


class Gated(Texts):
    """The second layer counts if the gate is open."""

    def forward(self, batch: Batch) -> Tensor:
        x = self.embed(batch["input_ids"])
        of_second = self.layers["two"](x.transpose(0, 1)).transpose(0, 1)
        rows = self.layers["one"](x) + batch["gate"] * of_second
        return rows.tanh().mean(1)


class OnePosition(Texts):
    """Positions come first, and the logits are those of one position."""

    def forward(self, batch: Batch) -> Tensor:
        x = self.embed(batch["input_ids"]).transpose(0, 1)
        rows = self.layers["one"](x) + self.layers["two"](x).tanh()
        return rows[batch["at"], torch.arange(x.shape[1])].tanh()


def texts(*rows: Sequence[int]) -> dict[str, Tensor]:
    return {"input_ids": torch.tensor(rows)}


# As many texts as tokens in each, so that rows and positions could be confused.
SQUARE = texts([5, 8, 2, 7], [4, 1, 9, 6], [3, 3, 8, 2], [6, 5, 4, 1])


def gated(gate: float) -> Batch:
    return SQUARE | {"gate": torch.tensor(gate).double()}


def at(*positions: int) -> Batch:
    return SQUARE | {"at": torch.tensor(positions)}


# A model, and batches of which the first is silent.
CASES = {
    # At first each text has as many as any other, in order, and as many as there are
    # texts.
    "a router": (
        Router,
        [texts([1, 1], [2, 2]), texts([1, 2], [2, 1]), texts([2, 1], [2, 2])],
    ),
    # At first no gradient comes to the second layer.
    "gated": (Gated, [gated(0), gated(0), gated(1), gated(2)]),
    # At first `(T, B)` and `(B, T)` have the same rows.
    "one position": (OnePosition, [at(0, 1, 2, 3), at(3, 0, 0, 1), at(2, 2, 1, 0)]),
}


@pytest.mark.parametrize("case", CASES)
def test_what_the_first_batch_could_not_prove_is_proven_later(case):
    kind, batches = CASES[case]
    model = with_lora(kind(), "one", "two")
    la = make(model)
    # In order: each is taken for what was proven of those before it.
    for batch in batches:
        Js, _ = la.backend.jacobians(batch)
        assert_close(Js, jacobians(OfMapping(model), batch), **EXACT)


# --- when a proof is made -------------------------------------------------------------


def test_texts_are_proven_at_larger_sizes_and_other_inputs_every_time(monkeypatch):
    eight = first_batch(batch_size=8)
    of_one, *others = (
        {key: value[:n] for key, value in eight.items()}
        for n in (1, 3, 2, 3, 1, 4, 7, 8, 5, 2)
    )
    # Of a single text there is nothing to prove.
    la = make(lora_model("bert"))
    la.fit([of_one])
    passes = count_backward_passes(monkeypatch)

    def n_proofs(batch: Batch) -> int:
        """Count the backward passes of a prediction beside its own."""
        passes.clear()
        la(batch, link_approx="probit")
        return len(passes) - 1

    # One for each power of two that a batch reaches.
    assert [n_proofs(batch) for batch in others] == [1, 0, 0, 0, 1, 0, 1, 0, 0]
    # Without what is remembered it is proven anew.
    la.recorder.layouts.proven.clear()
    assert n_proofs(others[1]) == 1
    embed = la.model.transformer.get_input_embeddings()
    mask = eight["attention_mask"]
    embedded = embed(eight["input_ids"]).detach()
    for _ in range(2):
        assert n_proofs({"inputs_embeds": embedded, "attention_mask": mask}) == 1


# --- when a proof is made -------------------------------------------------------------


# How many forward passes three examples take beside that of the batch. Where proofs
# fail, each example has a pass of its own.
TOGETHER = ["BERT", "OPT", "T5", "Qwen2-MoE", "Swin", "MobileViT", "TimeSformer"]
ALONE = ["DeBERTa-v3", "XLNet", "Longformer"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TOGETHER + ALONE)
def test_families_whose_examples_come_together(name):
    family = FAMILIES[name]
    examples = [
        {k: v.to(family.dtype) if v.is_floating_point() else v for k, v in each.items()}
        for each in family.examples(3)
    ]
    batch = together(examples, "right")
    la = make(family.model(CLASSIFIER))
    la.fit([batch | {"labels": torch.arange(3)}])
    calls = count_forward_passes(la)
    la(batch)
    assert len(calls) == (1 if name in TOGETHER else 1 + 3)
