"""When it is proven whose rows are whose, and what is remembered of it."""

import copy
import pickle
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import nn

from laplace_lora_ext.passes.graph import Layouts
from tests.compatibility.examples import together
from tests.compatibility.families import CLASSIFIER, FAMILIES
from tests.support.dense import jacobians
from tests.support.models import VOCABULARY, lora_model, ragged_batches, with_lora
from tests.support.posteriors import count_forward_passes, make


class Texts(nn.Module):
    """Runs two layers on embedded tokens in a way of its own."""

    def __init__(self, way: str, name: str = "layers") -> None:
        super().__init__()
        self.way, self.name = way, name
        self.embed = nn.Embedding(VOCABULARY, 5)
        self.add_module(name, nn.ModuleDict({n: nn.Linear(5, 3) for n in ("one", "two")}))

    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        ids = batch["input_ids"]
        x, layers = self.embed(ids), getattr(self, self.name)
        one, two = layers["one"], layers["two"]
        if self.way == "gated":  # the second layer counts if the gate is open
            rows = two(x.transpose(0, 1)).transpose(0, 1)
            return (one(x) + batch["gate"] * rows).tanh().mean(1)
        if self.way == "one position":
            rows = (one(x.transpose(0, 1)) + two(x.transpose(0, 1)).tanh()).transpose(0, 1)
            return rows.take_along_dim(batch["at"][:, None, None], dim=1)[:, 0].tanh()
        is_odd = ids % 2 == 1  # a router sends odd tokens to one layer, others to the other
        out = x.new_zeros(*ids.shape, 3)
        for layer, chosen in ((one, is_odd), (two, ~is_odd)):
            if self.way == "both" or layer is one:
                out = out.masked_scatter(chosen[..., None], layer(x[chosen]).tanh())
        return out.mean(1)


def texts(*rows: Sequence[int], **others: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor(rows), **others}


IDS = [5, 8, 2, 7], [4, 1, 9, 6], [3, 3, 8, 2], [6, 5, 4, 1]
CASES = {
    # At first each text has as many as any other, in order, and as many as there are texts.
    "a router": ("both", [texts([1, 1], [2, 2]), texts([1, 2], [2, 1]), texts([2, 1], [2, 2])]),
    "one expert": ("one", [texts([1, 2], [1, 2]), texts([1, 1], [2, 2]), texts([2, 2], [3, 5])]),
    # At first no gradient comes to the second layer.
    "gated": ("gated", [texts(*IDS, gate=torch.tensor(gate).double()) for gate in (0, 0, 1, 2)]),
    # At first `(T, B)` and `(B, T)` have the same rows.
    "one position": (
        "one position",
        [texts(*IDS, at=torch.tensor(at)) for at in ([0, 1, 2, 3], [3, 0, 0, 1], [2, 2, 1, 0])],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_the_first_batch_could_not_prove_is_proven_later(case):
    way, batches = CASES[case]
    model = with_lora(Texts(way, "experts" if way == "one" else "layers"), "one", "two")
    la = make(model, target_modules=["one"] if way == "one" else None)
    for X in batches:
        Js, _ = la.backend.jacobians(X)
        expected = dense_jacobians(model, X)[..., : Js.shape[-1]]
        torch.testing.assert_close(Js, expected, rtol=1e-9, atol=1e-12)


def dense_jacobians(model: nn.Module, X: dict[str, torch.Tensor]) -> torch.Tensor:
    class OfTokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(X | {"input_ids": ids})

    return jacobians(OfTokens(), X["input_ids"])


@pytest.fixture
def passes(monkeypatch):
    """A list that gets an entry at each backward pass; small models take all seeds at once."""
    calls, grad = [], torch.autograd.grad

    def counting(*args, **kwargs):
        calls.append(1)
        return grad(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", counting)
    return calls


def proofs_of(la, batch, passes: list[int]) -> int:
    passes.clear()
    la(batch, link_approx="probit")
    return len(passes) - 1


def test_texts_are_proven_at_larger_sizes_and_other_inputs_every_time(passes):
    la = make(lora_model("bert"))
    (batch,) = ragged_batches(batch_size=8)
    la.fit([{key: value[:1] for key, value in batch.items()}])
    sizes = [3, 2, 3, 1, 4, 7, 8, 5, 2]
    found = [proofs_of(la, {k: v[:n] for k, v in batch.items()}, passes) for n in sizes]
    assert found == [1, 0, 0, 0, 1, 0, 1, 0, 0]
    la.recorder.layouts = Layouts()
    assert [proofs_of(la, {k: v[:n] for k, v in batch.items()}, passes) for n in (8, 2)] == [1, 0]
    known = la.recorder.layouts
    copies = copy.deepcopy(known), pickle.loads(pickle.dumps(known))
    for layouts, n_proofs in ((copies[0], 0), (copies[1], 0), (Layouts(), 1)):
        la.recorder.layouts = layouts
        assert proofs_of(la, batch, passes) == n_proofs
    embedded = la.model.transformer.get_input_embeddings()(batch["input_ids"]).detach()
    inputs = {"inputs_embeds": embedded, "attention_mask": batch["attention_mask"]}
    assert [proofs_of(la, inputs, passes) for _ in range(2)] == [1, 1]


TOGETHER = "BERT", "GPT-2", "OPT", "T5", "Qwen2-MoE", "Swin", "MobileViT", "TimeSformer", "Whisper"
ALONE = "DeBERTa-v3", "XLNet", "Longformer"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*TOGETHER, *ALONE])
def test_families_whose_examples_come_together(name):
    family = FAMILIES[name]
    examples = [
        {k: v.to(family.dtype) if v.is_floating_point() else v for k, v in example.items()}
        for example in family.examples(3)
    ]
    la = make(family.model(CLASSIFIER))
    batch = together(examples, "right")
    la.fit([batch | {"labels": torch.arange(3)}])
    calls = count_forward_passes(la)
    la(batch)
    assert len(calls) == (1 if name in TOGETHER else 1 + 3)
