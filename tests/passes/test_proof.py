"""When it is proven whose rows are whose, and what is remembered of it."""

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_lora_ext.passes.recorder import codewords
from tests.compatibility.examples import together
from tests.compatibility.families import CLASSIFIER, FAMILIES
from tests.support.dense import EXACT, jacobians
from tests.support.models import VOCABULARY, first_batch, lora_model, with_lora
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
        setattr(self, self.name, nn.ModuleDict(layers))

    name = "layers"


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


class OneExpert(Texts):
    """Sends odd tokens to a layer named like a routed one, others nowhere."""

    name = "experts"

    def forward(self, batch: Batch) -> Tensor:
        x = self.embed(batch["input_ids"])
        return of_chosen(self.experts["one"], x, batch["input_ids"] % 2 == 1).mean(1)


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


# A model, batches of which the first is silent, and the layers that take part.
CASES = {
    # At first each text has as many as any other, in order, and as many as there are
    # texts.
    "a router": (
        Router,
        [texts([1, 1], [2, 2]), texts([1, 2], [2, 1]), texts([2, 1], [2, 2])],
        None,
    ),
    "one expert": (
        OneExpert,
        [texts([1, 2], [1, 2]), texts([1, 1], [2, 2]), texts([2, 2], [3, 5])],
        ["one"],
    ),
    # At first no gradient comes to the second layer.
    "gated": (Gated, [gated(0), gated(0), gated(1), gated(2)], None),
    # At first `(T, B)` and `(B, T)` have the same rows.
    "one position": (
        OnePosition,
        [at(0, 1, 2, 3), at(3, 0, 0, 1), at(2, 2, 1, 0)],
        None,
    ),
}


class OfTokens(nn.Module):
    """A model of batches as a function of their tokens alone."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        super().__init__()
        self.model = model
        self.batch = batch

    def forward(self, ids: Tensor) -> Tensor:
        return self.model({**self.batch, "input_ids": ids})


@pytest.mark.parametrize("case", CASES)
def test_what_the_first_batch_could_not_prove_is_proven_later(case):
    kind, batches, target_modules = CASES[case]
    model = with_lora(kind(), "one", "two")
    la = make(model, target_modules=target_modules)
    # In order: each is taken for what was proven of those before it.
    for batch in batches:
        Js, _ = la.backend.jacobians(batch)
        expected = jacobians(OfTokens(model, batch), batch["input_ids"])
        # The layer that takes part alone is the first one.
        assert_close(Js, expected[..., : Js.shape[-1]], **EXACT)


# --- when a proof is made -------------------------------------------------------------


def first_texts(n: int) -> Batch:
    return {key: value[:n] for key, value in first_batch(batch_size=8).items()}


@pytest.fixture
def of_one_text():
    """Fit a posterior to a single text, of which there is nothing to prove."""
    la = make(lora_model("bert"))
    la.fit([first_texts(1)])
    return la


@pytest.fixture
def n_proofs(of_one_text, monkeypatch) -> Callable[[Batch], int]:
    """A function that counts the backward passes of a prediction beside its own."""
    passes = count_backward_passes(monkeypatch)

    def count(batch: Batch) -> int:
        passes.clear()
        of_one_text(batch, link_approx="probit")
        return len(passes) - 1

    return count


@pytest.mark.parametrize("sizes", [(3, 2, 3, 1, 4, 7, 8, 5, 2), (8, 2)])
def test_texts_are_proven_at_larger_sizes(n_proofs, of_one_text, sizes):
    largest = 1
    for n in sizes:
        # One for each power of two that a batch reaches.
        is_larger = n.bit_length() > largest
        assert n_proofs(first_texts(n)) == is_larger
        largest = max(largest, n.bit_length())
    # Without what is remembered it is proven anew.
    of_one_text.recorder.layouts.proven.clear()
    assert n_proofs(first_texts(2)) == 1


def test_other_inputs_than_texts_are_proven_every_time(of_one_text, n_proofs):
    batch = first_texts(8)
    assert n_proofs(batch) == 1
    embed = of_one_text.model.transformer.get_input_embeddings()
    inputs = {
        "inputs_embeds": embed(batch["input_ids"]).detach(),
        "attention_mask": batch["attention_mask"],
    }
    for _ in range(2):
        assert n_proofs(inputs) == 1


# How many forward passes three examples take beside that of the batch. Where proofs
# fail, each example has a pass of its own.
TOGETHER = ["BERT", "GPT-2", "OPT", "T5", "Qwen2-MoE", "Swin", "MobileViT"]
TOGETHER += ["TimeSformer", "Whisper"]
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
