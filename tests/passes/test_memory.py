"""Batches that do not fit into memory, on a pretended machine that holds a few rows."""

import weakref
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.support.dense import EXACT, full_rank
from tests.support.models import (
    TwoLinear,
    laplace_keywords,
    lora_model,
    pairs,
    plain_model,
    ragged_batches,
    with_lora,
)
from tests.support.posteriors import STRUCTURES, make
from tests.support.snapshots import facts_of

_MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB."


@dataclass
class Machine:
    """Has room for so many rows in forward, and in backward passes."""

    forward: float = torch.inf
    backward: float = torch.inf
    # Rows of forward passes with a graph.
    tried: list[int] = field(default_factory=list)
    # What these graphs hold, and how many were still alive when another one began.
    graphs: list[weakref.ref] = field(default_factory=list)
    alive: list[int] = field(default_factory=list)

    def limit(self, x: torch.Tensor) -> torch.Tensor:
        """Pass rows through, if there is room for them."""
        return _Limit.apply(x, self)

    def limit_first(
        self,
        module: nn.Module,
        args: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, ...]:
        """Limit a module's first argument, as its forward pre-hook."""
        x, *others = args
        return self.limit(x), *others


class _Limit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, machine):
        ctx.machine = machine
        if torch.is_grad_enabled() or x.requires_grad:
            n_alive = sum(graph() is not None for graph in machine.graphs)
            machine.alive.append(n_alive)
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
        # Rows of all seeds that come at once.
        n_rows = gradient.numel() / saved.shape[1:].numel()
        if n_rows > ctx.machine.backward:
            raise torch.OutOfMemoryError(_MESSAGE)
        return gradient, None


class Limited(TwoLinear):
    """Its hidden layer is on a machine of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = Machine()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.machine.limit(self.first(x)).tanh())


def limited(structure: str = "lowrank_kron"):
    """Make a posterior, and the machine that its model runs on."""
    model = with_lora(Limited(), "first", "second")
    la = make(model, structure, **full_rank(structure))
    return la, model.machine


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_batch_that_does_not_fit_is_learnt_and_predicted_in_parts(structure, where):
    batches = pairs(2, n=11)
    X, _ = batches[0]
    whole, _ = limited(structure)
    whole.fit(batches)
    la, machine = limited(structure)
    setattr(machine, where, 3)
    la.fit(batches)
    assert la.n_data == 22
    assert max(machine.tried) == 11
    assert_close(facts_of(la, X), facts_of(whole, X), **EXACT)


def test_no_part_is_added_twice():
    """The last layers have their gradients when a backward pass fails."""
    model = lora_model("bert")
    machine = Machine()
    last_layer = model.base_model.model.bert.encoder.layer[1]
    last_layer.register_forward_pre_hook(machine.limit_first)
    batches = ragged_batches(batch_size=8)
    la = make(model, **full_rank())
    # Texts are proven once: later ones are not, before layers are visited.
    la.fit(batches)
    whole = la.H_facs
    machine.tried.clear()
    machine.backward = 2
    la.fit(batches)
    assert machine.tried == [8, 4, 2, 2, 2, 2]
    for block, expected in zip(la.H_facs.blocks, whole.blocks, strict=True):
        assert_close(block.normalizer, expected.normalizer, **EXACT)
        of_outputs = expected.output_factor.trace
        assert_close(block.output_factor.trace, of_outputs, **EXACT)
        of_inputs = expected.input_factor.trace
        assert_close(block.input_factor.trace, of_inputs, **EXACT)


def test_what_fits_is_remembered():
    la, machine = limited()
    machine.forward = 2
    la.fit(pairs(3, n=8))
    first = [8, 4, 2, 2, 2, 2]
    assert machine.tried == first + 2 * [2, 2, 2, 2]
    machine.tried.clear()
    X, _ = pairs(n=8)[0]
    la(X)
    # A prediction is another kind of pass.
    assert machine.tried == first
    machine.tried.clear()
    la(X)
    la(X[:3])
    assert machine.tried == [2, 2, 2, 2, 2, 1]
    machine.tried.clear()
    la.fit(pairs(n=8))
    assert machine.tried == [2, 2, 2, 2]


def test_what_did_not_fit_is_let_go():
    la, machine = limited()
    machine.backward = 2
    la.fit(pairs(n=8))
    assert machine.alive == [0] * len(machine.tried)


def test_seeds_that_do_not_fit_together_go_one_by_one():
    """Where a single example has too many vectors to pass back at once."""
    X, _ = pairs(n=6)[0]
    la, machine = limited()
    la.fit(pairs(n=6))
    expected = facts_of(la, X)
    machine.backward = 1  # of three classes
    assert_close(facts_of(la, X), expected, **EXACT)
    assert la.recorder.layouts.seeds_at_most == 1


def test_statistics_are_made_in_parts():
    X, y = pairs(n=6)[0]
    la, machine = limited()
    la.fit([(X, y)])
    expected = la.predictive_statistics([(X, y)])
    machine.forward = 2
    found = la.predictive_statistics([(X, y)])
    for mine, its in zip(found.columns, expected.columns, strict=True):
        assert_close(mine, its, **EXACT)


class Normalising(Limited):
    """What an example is taken for depends on the others, unseen by gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = super().forward(x)
        return logits - logits.mean(0)


def test_examples_that_depend_on_each_other_are_not_divided():
    model = with_lora(Normalising(), "first", "second")
    la = make(model)
    batches = pairs(n=6)
    la.fit(batches)
    machine = model.machine
    machine.forward = 5
    message = "depend on each other: pass smaller batches"
    with pytest.raises(torch.OutOfMemoryError, match=message):
        la.fit(batches)
    no_batch_is_proven = make(model)
    with pytest.raises(torch.OutOfMemoryError, match=message):
        no_batch_is_proven.fit(batches)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_one_text_that_does_not_fit_is_told_with_its_length(checkpointed):
    model = lora_model("bert")
    if checkpointed:
        model.gradient_checkpointing_enable()
    machine = Machine(forward=0)
    classifier = model.base_model.model.classifier
    classifier.register_forward_pre_hook(machine.limit_first)
    la = make(model, **laplace_keywords("bert"))
    # Four tokens, padded to seven.
    batches = ragged_batches(lengths=(4, 4))
    with pytest.raises(torch.OutOfMemoryError) as error:
        la.fit(batches)
    message = str(error.value)
    assert message.startswith(
        "One text of 4 tokens does not fit into the memory of cpu: "
    )
    assert ("gradient checkpointing" in message) is not checkpointed
    assert "cut texts shorter, or load the base model in 4-bit" in message
    assert _MESSAGE in message
    assert not la.n_data


class OfMask(nn.Module):
    """Keeps only some rows of a batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(x["rows"][x["mask"]])


def test_a_batch_without_a_row_for_each_label_is_not_divided():
    """As of tokens, which have a label each."""
    model = with_lora(Limited(), "first", "second")
    X, y = pairs(n=6)[0]
    mask = torch.tensor([1, 1, 1, 0, 1, 0]).bool()
    la = make(OfMask(model))
    model.machine.forward = 3
    message = "have a row for each example: pass smaller"
    with pytest.raises(torch.OutOfMemoryError, match=message):
        la.fit([({"rows": X, "mask": mask}, y[mask])])


def test_other_errors_are_not_taken_for_memory():
    model = plain_model()

    def fail(*_: object) -> None:
        raise RuntimeError("something else")

    model.first.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="something else"):
        make(model).fit(pairs())
