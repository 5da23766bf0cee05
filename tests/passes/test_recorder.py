"""Layers without a gradient, and batches in parts."""

import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from tests.support.cases import assert_exact
from tests.support.dense import EXACT, full_rank
from tests.support.models import (
    Detour,
    TwoLinear,
    first_batch,
    lora_model,
    pairs,
    ragged_batches,
    with_lora,
)
from tests.support.posteriors import STRUCTURES, count_forward_passes, fitted, make
from tests.support.snapshots import facts_of


def test_a_layer_that_the_logits_do_not_depend_on_has_no_curvature():
    model = with_lora(Detour(), "used", "unused")
    ((X, y),) = pairs()
    la = make(model, **full_rank())
    la.fit([(X, y)])
    assert_exact(la, model, [X])


# --- parts of predictions -------------------------------------------------------------


def allow_at_once(monkeypatch, n_rows: int) -> None:
    """Let so many rows through a layer at once: tokens of all texts, for each logit."""
    monkeypatch.setattr("laplace_lora_ext.passes.recorder._ON_CPU", n_rows)


def test_parts_bring_the_same_numbers(monkeypatch):
    la = fitted()
    batch = first_batch(batch_size=8)

    def facts() -> dict[str, Any]:
        statistics = la.predictive_statistics([batch], dtype=torch.float64)
        return {
            "moments": tuple(la.predictive_moments(batch)),
            "of statistics": tuple(statistics.moments(0.1)),
            "targets": statistics.targets,
        }

    whole = facts()
    calls = count_forward_passes(la)
    # Two texts of seven tokens each, for each of three outputs.
    allow_at_once(monkeypatch, 2 * 7 * 3)
    assert_close(facts(), whole, **EXACT)
    # Four parts of moments, and of statistics; once all texts are compared with their
    # parts.
    assert len(calls) == 2 * 4 + 1
    # Covariances between examples come of the whole batch.
    la.predictive_moments(batch, joint=True)
    assert len(calls) == 2 * 4 + 1 + 1
    # Wrong labels are named by the batch, and not by the part.
    wrong = batch | {"labels": batch["labels"] + 5}
    with pytest.raises(ValueError, match="batch 0: labels must be from 0 to 2"):
        la.predictive_statistics([wrong])


# --- a pretended machine that holds a few rows ----------------------------------------

_MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB."


@dataclass
class Machine:
    """Has room for so many rows in forward, and in backward passes."""

    forward: float = torch.inf
    backward: float = torch.inf
    # Whether backward passes of several seeds together have no room.
    one_seed: bool = False
    # Rows of forward passes with a graph.
    tried: list[int] = field(default_factory=list)
    # What these graphs hold, and how many were still alive when another one began.
    graphs: list[weakref.ref] = field(default_factory=list)
    alive: list[int] = field(default_factory=list)

    def limit(self, x: Tensor) -> Tensor:
        """Pass rows through, if there is room for them."""
        return _Limit.apply(x, self)

    def limit_first(self, module: nn.Module, args: tuple[Tensor, ...]) -> Any:
        """Limit a module's first argument, as its forward pre-hook."""
        return self.limit(args[0]), *args[1:]


class _Limit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, machine):
        ctx.machine = machine
        if torch.is_grad_enabled() or x.requires_grad:
            # Counted without a name for any, which would itself keep it alive.
            machine.alive.append(sum(graph() is not None for graph in machine.graphs))
            machine.tried.append(len(x))
            if len(x) > machine.forward:
                raise torch.OutOfMemoryError(_MESSAGE)
        saved = x.clone()
        machine.graphs.append(weakref.ref(saved))
        ctx.save_for_backward(saved)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (saved,) = ctx.saved_tensors
        several = torch._C._functorch.is_batchedtensor(gradient)
        if len(saved) > ctx.machine.backward or (several and ctx.machine.one_seed):
            raise torch.OutOfMemoryError(_MESSAGE)
        return gradient, None


class Limited(TwoLinear):
    """Its hidden layer is on a machine of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = Machine()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.machine.limit(self.first(x)).tanh())


def limited(structure: str = "lowrank_kron", kind: type[Limited] = Limited):
    """Make a posterior, and the machine that its model runs on."""
    model = with_lora(kind(), "first", "second")
    # So that the curvature is the same in any parts, if draws are each example's.
    options = full_rank(structure, stochastic=True, num_samples=1)
    return make(model, structure, **options), model.machine


@pytest.mark.parametrize(
    ("structure", "where"),
    [("lowrank_kron", "backward"), *((each, "forward") for each in STRUCTURES)],
)
def test_a_batch_that_does_not_fit_is_learnt_and_predicted_in_parts(structure, where):
    batches = pairs(2, 11)
    X, _ = batches[0]
    whole, _ = limited(structure)
    whole.fit(batches)
    la, machine = limited(structure)
    # Halves of eleven, and halves of these, do not fit either.
    setattr(machine, where, 3)
    la.fit(batches)
    assert la.n_data == 2 * 11
    assert max(machine.tried) == 11
    assert_close(facts_of(la, X), facts_of(whole, X), **EXACT)
    if structure == "lowrank_kron":
        found = la.predictive_statistics(batches)
        setattr(machine, where, torch.inf)
        assert_close(la.predictive_statistics(batches).columns, found.columns, **EXACT)


# Eight rows where two fit: what does not fit is halved, and the rest goes in twos.
FIRST = [8, 4, 2, 2, 2, 2]
LATER = [2, 2, 2, 2]


def test_no_part_is_added_twice():
    """The last layers have their gradients when a backward pass fails."""
    model = lora_model("bert")
    machine = Machine()
    last_layer = model.base_model.model.bert.encoder.layer[-1]
    last_layer.register_forward_pre_hook(machine.limit_first)
    batches = ragged_batches(batch_size=8)
    la = make(model, **full_rank())

    # Texts are proven once: later ones are not, before layers are visited.
    la.fit(batches)
    expected = la.H.to_matrix()
    machine.tried.clear()
    machine.backward = 2
    la.fit(batches)
    assert_close(la.H.to_matrix(), expected, **EXACT)
    assert machine.tried == FIRST
    # What did not fit was let go when a smaller part began.
    assert not any(machine.alive)


def test_what_fits_is_remembered_for_later_batches_and_fits():
    la, machine = limited()
    machine.forward = 2
    la.fit(pairs(3, n=8))
    assert machine.tried == FIRST + LATER + LATER
    machine.tried.clear()
    la.fit(pairs(n=8))
    assert machine.tried == LATER
    # Of predictions it is found out by themselves.
    ((X, _),) = pairs(n=8)
    for inputs, tried in [(X, FIRST), (X, LATER), (X[:3], [2, 1])]:
        machine.tried.clear()
        la(inputs)
        assert machine.tried == tried


def test_seeds_that_do_not_fit_together_go_one_by_one():
    """Where a single example has too many vectors to pass back at once."""
    ((X, y),) = pairs(n=8)
    whole, _ = limited()
    la, machine = limited()
    machine.one_seed = True
    for each in (whole, la):
        each.fit([(X, y)])
    assert_close(facts_of(la, X), facts_of(whole, X), **EXACT)
    layouts = la.recorder.layouts
    # It is not taken for an operation that can't run under vmap.
    assert (layouts.seeds_at_most, layouts.is_batchable) == (1, None)


def test_one_text_that_does_not_fit_is_told_with_its_length():
    model = lora_model("bert")
    classifier = model.base_model.model.classifier
    classifier.register_forward_pre_hook(Machine(forward=0).limit_first)
    la = make(model)
    with pytest.raises(torch.OutOfMemoryError, match=r"One example of 7 tokens.*2.00"):
        la.fit(ragged_batches(lengths=(4, 4)))
    assert not la.n_data


# --- examples that depend on each other -----------------------------------------------


class Standardising(Limited):
    """Reads examples as they stand among the others, which no gradient shows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x - x.mean(0)) / x.std(0))


def test_examples_that_depend_on_each_other_are_not_learnt_in_parts():
    la, machine = limited(kind=Standardising)
    machine.forward = 5
    with pytest.raises(torch.OutOfMemoryError, match="depend on each other"):
        la.fit(pairs(n=6))


def test_logits_that_depend_on_the_batch_are_not_divided(monkeypatch):
    ((X, y),) = pairs(n=8)
    la, _ = limited(kind=Standardising)
    la.fit([(X, y)])
    whole = la.predictive_moments(X)
    function = la.function(seed=0)(X)
    # Of two examples, for each of three outputs.
    allow_at_once(monkeypatch, 2 * 3)
    calls = count_forward_passes(la)
    for n_calls in (6, 1, 1):  # four parts, the comparison, and all of them
        calls.clear()
        assert_close(tuple(la.predictive_moments(X)), tuple(whole), **EXACT)
        assert len(calls) == n_calls
    assert_close(la.function(seed=0)(X), function, **EXACT)
    statistics = la.predictive_statistics([(X, y)], dtype=torch.float64)
    assert_close(statistics.f_mu, whole.f_mu, **EXACT)
