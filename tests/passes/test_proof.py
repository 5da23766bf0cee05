"""When it is proven whose rows are whose, and what is remembered of it."""

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_lora_ext.passes.graph import Layouts
from tests.compatibility.examples import together
from tests.compatibility.families import CLASSIFIER, FAMILIES
from tests.support.dense import EXACT, jacobians
from tests.support.models import (
    VOCABULARY,
    lora_model,
    ragged_batches,
    with_lora,
)
from tests.support.posteriors import (
    count_backward_passes,
    count_forward_passes,
    make,
)

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
    rows = layer(x[chosen]).tanh()
    out = x.new_zeros(*chosen.shape, 3)
    return out.masked_scatter(chosen[..., None], rows)


class Router(Texts):
    """Odd tokens go to one layer, others to the other."""

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        ids = batch["input_ids"]
        x = self.embed(ids)
        is_odd = ids % 2 == 1
        of_odd = of_chosen(self.layers["one"], x, is_odd)
        of_even = of_chosen(self.layers["two"], x, ~is_odd)
        return (of_odd + of_even).mean(1)


class OneExpert(nn.Module):
    """Sends odd tokens to a layer named like a routed one, others nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 5)
        self.experts = two_layers()

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        ids = batch["input_ids"]
        is_odd = ids % 2 == 1
        rows = of_chosen(self.experts["one"], self.embed(ids), is_odd)
        return rows.mean(1)


class Gated(Texts):
    """The second layer counts if the gate is open."""

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.embed(batch["input_ids"])
        positions_first = self.layers["two"](x.transpose(0, 1))
        behind_gate = batch["gate"] * positions_first.transpose(0, 1)
        rows = self.layers["one"](x) + behind_gate
        return rows.tanh().mean(1)


class OnePosition(Texts):
    """Positions come first, and the logits are those of one position."""

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.embed(batch["input_ids"]).transpose(0, 1)
        rows = self.layers["one"](x) + self.layers["two"](x).tanh()
        of_texts = rows.transpose(0, 1)
        place = batch["at"][:, None, None]
        at_place = of_texts.take_along_dim(place, dim=1)
        return at_place.squeeze(1).tanh()


def texts(
    *rows: Sequence[int],
    **others: Tensor,
) -> dict[str, Tensor]:
    return {"input_ids": torch.tensor(rows), **others}


# As many texts as tokens in each, so that rows and positions could be confused.
IDS = (
    [5, 8, 2, 7],
    [4, 1, 9, 6],
    [3, 3, 8, 2],
    [6, 5, 4, 1],
)


def gated(gate: float) -> dict[str, Tensor]:
    return texts(*IDS, gate=torch.tensor(gate).double())


def at_positions(*positions: int) -> dict[str, Tensor]:
    return texts(*IDS, at=torch.tensor(positions))


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
        batches=[gated(0), gated(0), gated(1), gated(2)],
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
        batch: Mapping[str, Tensor],
    ) -> None:
        super().__init__()
        self.model = model
        self.batch = batch

    def forward(self, ids: Tensor) -> Tensor:
        return self.model({**self.batch, "input_ids": ids})


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_the_first_batch_could_not_prove_is_proven_later(case):
    model = with_lora(case.build(), "one", "two")
    la = make(model, target_modules=case.target_modules)
    for batch in case.batches:
        Js, _ = la.backend.jacobians(batch)
        of_all_layers = jacobians(OfTokens(model, batch), batch["input_ids"])
        # The layer that takes part alone is the first one.
        n_parameters = Js.shape[-1]
        assert_close(Js, of_all_layers[..., :n_parameters], **EXACT)


# --- when a proof is made -------------------------------------------------------------


@pytest.fixture
def passes(monkeypatch) -> list[int]:
    return count_backward_passes(monkeypatch)


def proofs_of(
    la,
    batch: Mapping[str, Tensor],
    passes: list[int],
) -> int:
    """Count the backward passes that a prediction takes beside its own."""
    passes.clear()
    la(batch, link_approx="probit")
    return len(passes) - 1


def eight_texts() -> dict[str, Tensor]:
    (batch,) = ragged_batches(batch_size=8)
    return batch


def first_texts(n: int) -> dict[str, Tensor]:
    return {key: value[:n] for key, value in eight_texts().items()}


@pytest.fixture
def of_one_text():
    """Fit a posterior to a single text, of which there is nothing to prove."""
    la = make(lora_model("bert"))
    la.fit([first_texts(1)])
    return la


def test_texts_are_proven_at_larger_sizes(of_one_text, passes):
    sizes = [3, 2, 3, 1, 4, 7, 8, 5, 2]
    found = [proofs_of(of_one_text, first_texts(n), passes) for n in sizes]
    # Once for each power of two that a batch reaches.
    assert found == [1, 0, 0, 0, 1, 0, 1, 0, 0]


def test_what_is_proven_of_many_texts_is_proven_of_few(of_one_text, passes):
    assert proofs_of(of_one_text, first_texts(8), passes) == 1
    assert proofs_of(of_one_text, first_texts(2), passes) == 0


def pickled(layouts: Layouts) -> Layouts:
    return pickle.loads(pickle.dumps(layouts))


@pytest.mark.parametrize(
    "remember",
    [
        pytest.param(copy.deepcopy, id="a copy"),
        pytest.param(pickled, id="a pickle"),
    ],
)
def test_proofs_are_remembered_by_copies(of_one_text, passes, remember):
    assert proofs_of(of_one_text, eight_texts(), passes) == 1
    known = of_one_text.recorder.layouts
    of_one_text.recorder.layouts = remember(known)
    assert proofs_of(of_one_text, eight_texts(), passes) == 0
    of_one_text.recorder.layouts = Layouts()
    assert proofs_of(of_one_text, eight_texts(), passes) == 1


def test_other_inputs_than_texts_are_proven_every_time(of_one_text, passes):
    batch = eight_texts()
    assert proofs_of(of_one_text, batch, passes) == 1
    embed = of_one_text.model.transformer.get_input_embeddings()
    inputs = {
        "inputs_embeds": embed(batch["input_ids"]).detach(),
        "attention_mask": batch["attention_mask"],
    }
    assert proofs_of(of_one_text, inputs, passes) == 1
    assert proofs_of(of_one_text, inputs, passes) == 1


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
@pytest.mark.parametrize("name", [*TOGETHER, *ALONE])
def test_families_whose_examples_come_together(name):
    family = FAMILIES[name]
    examples = [in_precision(each, family.dtype) for each in family.examples(3)]
    batch = together(examples, "right")
    la = make(family.model(CLASSIFIER))
    la.fit([batch | {"labels": torch.arange(3)}])
    calls = count_forward_passes(la)
    la(batch)
    n_alone = 0 if name in TOGETHER else 3
    assert len(calls) == 1 + n_alone
