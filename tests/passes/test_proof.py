"""When it is proven whose rows are whose, and what is remembered of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from tests.compatibility.examples import together
from tests.compatibility.families import CLASSIFIER, FAMILIES
from tests.support.dense import EXACT, jacobians
from tests.support.models import (
    VOCABULARY,
    first_batch,
    lora_model,
    with_lora,
)
from tests.support.posteriors import (
    count_backward_passes,
    count_forward_passes,
    make,
)

Batch = Mapping[str, Tensor]

# --- layouts that the first batch does not show ---------------------------------------


class Texts(nn.Module):
    """Two layers on embedded tokens, which each heir runs in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 5)
        self.layers = two_layers()


def two_layers() -> nn.ModuleDict:
    layers = {
        "one": nn.Linear(5, 3),
        "two": nn.Linear(5, 3),
    }
    return nn.ModuleDict(layers)


def of_chosen(
    layer: nn.Module,
    x: Tensor,
    chosen: Tensor,
) -> Tensor:
    """Send the chosen positions through a layer; the others are 0."""
    outputs = layer(x[chosen])
    out = x.new_zeros(*chosen.shape, 3)
    places = chosen[..., None]
    return out.masked_scatter(places, outputs.tanh())


class Router(Texts):
    """Odd tokens go to one layer, others to the other."""

    def forward(self, batch: Batch) -> Tensor:
        ids = batch["input_ids"]
        x = self.embed(ids)
        is_odd = ids % 2 == 1
        of_odd = of_chosen(self.layers["one"], x, is_odd)
        of_even = of_chosen(self.layers["two"], x, ~is_odd)
        rows = of_odd + of_even
        return rows.mean(1)


class OneExpert(nn.Module):
    """Sends odd tokens to a layer named like a routed one, others nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 5)
        self.experts = two_layers()

    def forward(self, batch: Batch) -> Tensor:
        ids = batch["input_ids"]
        x = self.embed(ids)
        is_odd = ids % 2 == 1
        rows = of_chosen(self.experts["one"], x, is_odd)
        return rows.mean(1)


class Gated(Texts):
    """The second layer counts if the gate is open."""

    def forward(self, batch: Batch) -> Tensor:
        x = self.embed(batch["input_ids"])
        positions_first = x.transpose(0, 1)
        of_second = self.layers["two"](positions_first)
        behind_gate = batch["gate"] * of_second.transpose(0, 1)
        of_first = self.layers["one"](x)
        rows = of_first + behind_gate
        return rows.tanh().mean(1)


class OnePosition(Texts):
    """Positions come first, and the logits are those of one position."""

    def forward(self, batch: Batch) -> Tensor:
        embedded = self.embed(batch["input_ids"])
        x = embedded.transpose(0, 1)
        of_first = self.layers["one"](x)
        of_second = self.layers["two"](x)
        rows = of_first + of_second.tanh()
        of_texts = rows.transpose(0, 1)
        text_numbers = torch.arange(len(of_texts))
        at_place = of_texts[text_numbers, batch["at"]]
        return at_place.tanh()


def texts(*rows: Sequence[int]) -> dict[str, Tensor]:
    return {"input_ids": torch.tensor(rows)}


# As many texts as tokens in each, so that rows and positions could be confused.
IDS = (
    [5, 8, 2, 7],
    [4, 1, 9, 6],
    [3, 3, 8, 2],
    [6, 5, 4, 1],
)


def gated(gate: float) -> dict[str, Tensor]:
    opening = torch.tensor(gate).double()
    return texts(*IDS) | {"gate": opening}


def at_positions(*positions: int) -> dict[str, Tensor]:
    return texts(*IDS) | {"at": torch.tensor(positions)}


@dataclass(frozen=True)
class Case:
    """A model, the layers that take part, and batches of which the first is silent."""

    build: Callable[[], nn.Module]
    batches: list[dict[str, Tensor]]
    target_modules: list[str] | None = None


CASES = {
    # At first each text has as many as any other, in order, and as many as there are
    # texts.
    "a router": Case(
        Router,
        batches=[
            texts([1, 1], [2, 2]),
            texts([1, 2], [2, 1]),
            texts([2, 1], [2, 2]),
        ],
    ),
    "one expert": Case(
        OneExpert,
        batches=[
            texts([1, 2], [1, 2]),
            texts([1, 1], [2, 2]),
            texts([2, 2], [3, 5]),
        ],
        target_modules=["one"],
    ),
    # At first no gradient comes to the second layer.
    "gated": Case(
        Gated,
        batches=[
            gated(0),
            gated(0),
            gated(1),
            gated(2),
        ],
    ),
    # At first `(T, B)` and `(B, T)` have the same rows.
    "one position": Case(
        OnePosition,
        batches=[
            at_positions(0, 1, 2, 3),
            at_positions(3, 0, 0, 1),
            at_positions(2, 2, 1, 0),
        ],
    ),
}


class OfTokens(nn.Module):
    """A model of batches as a function of their tokens alone."""

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
    ) -> None:
        super().__init__()
        self.model = model
        self.batch = batch

    def forward(self, ids: Tensor) -> Tensor:
        batch = {**self.batch, "input_ids": ids}
        return self.model(batch)


@pytest.mark.parametrize(
    "case",
    CASES.values(),
    ids=CASES,
)
def test_what_the_first_batch_could_not_prove_is_proven_later(case):
    model = with_lora(case.build(), "one", "two")
    la = make(model, target_modules=case.target_modules)
    # In order: each is taken for what was proven of those before it.
    for batch in case.batches:
        Js, _ = la.backend.jacobians(batch)
        of_tokens = OfTokens(model, batch)
        of_all_layers = jacobians(of_tokens, batch["input_ids"])
        # The layer that takes part alone is the first one.
        n_parameters = Js.shape[-1]
        expected = of_all_layers[..., :n_parameters]
        assert_close(Js, expected, **EXACT)


# --- when a proof is made -------------------------------------------------------------


def eight_texts() -> dict[str, Tensor]:
    return first_batch(batch_size=8)


def first_texts(n: int) -> dict[str, Tensor]:
    batch = eight_texts()
    return {key: value[:n] for key, value in batch.items()}


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


def test_texts_are_proven_at_larger_sizes(n_proofs):
    # One for each power of two that a batch reaches.
    for n, expected in [
        (3, 1),
        (2, 0),
        (3, 0),
        (1, 0),
        (4, 1),
        (7, 0),
        (8, 1),
        (5, 0),
        (2, 0),
    ]:
        batch = first_texts(n)
        assert n_proofs(batch) == expected


def test_what_is_proven_of_many_texts_is_proven_of_few(n_proofs):
    many = first_texts(8)
    few = first_texts(2)
    assert n_proofs(many) == 1
    assert n_proofs(few) == 0


def test_proofs_are_remembered(of_one_text, n_proofs):
    batch = eight_texts()
    assert n_proofs(batch) == 1
    assert n_proofs(batch) == 0
    # Without what is remembered it is proven anew.
    of_one_text.recorder.layouts.proven.clear()
    assert n_proofs(batch) == 1


def test_other_inputs_than_texts_are_proven_every_time(of_one_text, n_proofs):
    batch = eight_texts()
    assert n_proofs(batch) == 1
    embed = of_one_text.model.transformer.get_input_embeddings()
    embedded = embed(batch["input_ids"])
    inputs = {
        "inputs_embeds": embedded.detach(),
        "attention_mask": batch["attention_mask"],
    }
    assert n_proofs(inputs) == 1
    assert n_proofs(inputs) == 1


TOGETHER = [
    "BERT",
    "GPT-2",
    "OPT",
    "T5",
    "Qwen2-MoE",
    "Swin",
    "MobileViT",
    "TimeSformer",
    "Whisper",
]
# Their proofs fail, so that each example has a pass of its own.
ALONE = ["DeBERTa-v3", "XLNet", "Longformer"]


def in_precision(
    example: Mapping[str, Any],
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Bring an example's real numbers to a model's precision."""
    inputs = dict(example)
    for key, value in example.items():
        if value.is_floating_point():
            inputs[key] = value.to(dtype)
    return inputs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TOGETHER + ALONE)
def test_families_whose_examples_come_together(name):
    family = FAMILIES[name]
    examples = []
    for example in family.examples(3):
        inputs = in_precision(example, family.dtype)
        examples.append(inputs)
    batch = together(examples, "right")
    labels = torch.arange(3)
    la = make(family.model(CLASSIFIER))
    la.fit([batch | {"labels": labels}])
    calls = count_forward_passes(la)
    la(batch)
    n_alone = 0 if name in TOGETHER else 3
    assert len(calls) == 1 + n_alone
