"""Layers that training checkpoints are checkpointed in recorded passes."""

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from laplace_lora_ext.models.tree import Tree
from laplace_lora_ext.passes.graph import Graph
from tests.support.dense import EXACT, full_rank
from tests.support.models import (
    first_batch,
    lora_model,
    pairs,
    ragged_batches,
    with_lora,
)
from tests.support.posteriors import KFAC_APPROX, fitted, make


def enable(model: nn.Module, use_reentrant: bool = False) -> None:
    """Switch checkpointing on, as a trainer does."""
    base = model.get_base_model()
    run = partial(checkpoint, use_reentrant=use_reentrant)
    base._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=run)


# --- layers of transformers -----------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "use_reentrant", "kfac_approx"),
    [
        ("bert", False, "gradient"),
        ("gpt2", True, "gradient"),
        ("gpt_neox", False, "expand"),
    ],
)
def test_layers_are_computed_anew_give_the_same_numbers_and_stay_as_they_were(
    kind, use_reentrant, kfac_approx
):
    settings = {"rank": 100, "kfac_approx": kfac_approx}
    plain = fitted(kind, model=lora_model(kind), **settings)
    # With dropout in the layers, which stays off.
    model = lora_model(kind, lora_dropout=0.5).train()
    enable(model, use_reentrant)
    layers = [
        each for each in Tree(model).checkpointable if each.gradient_checkpointing
    ]
    assert len(layers) == 2
    calls: list[int] = []
    attention = next(m for m in layers[0].modules() if "Attention" in type(m).__name__)
    attention.register_forward_hook(lambda *_: calls.append(1))
    la = fitted(kind, model=model, **settings)
    assert len(calls) > len(ragged_batches())
    assert_close(la.H.to_matrix(), plain.H.to_matrix())
    batch = first_batch()
    for link in ("mean_field", "probit"):
        assert_close(la(batch, link_approx=link), plain(batch, link_approx=link))
    assert model.training
    for layer in layers:
        assert "forward" not in vars(layer)
        assert layer.gradient_checkpointing


def inputs_at_the_graph(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int]:
    """Fit one batch; count LoRA layers' inputs, and those alive after its pass."""
    inputs: list[weakref.ref] = []
    alive: list[weakref.ref] = []
    initialise = Graph.__init__

    def note_graph(self: Graph, *args: Any) -> None:
        # A graph is made when the forward pass has ended.
        alive.extend(given for given in inputs if given() is not None)
        initialise(self, *args)

    for name, layer in model.named_modules():
        if name.endswith("lora_A.default"):
            layer.register_forward_hook(
                lambda layer, args, output: inputs.append(weakref.ref(args[0]))
            )
    monkeypatch.setattr(Graph, "__init__", note_graph)
    fitted("gpt2", [first_batch()], model=model)
    return len(inputs), len(alive)


def test_inputs_of_checkpointed_layers_are_gone_after_a_forward_pass(monkeypatch):
    plain, model = lora_model("gpt2"), lora_model("gpt2")
    enable(model)
    n_inputs, n_alive = inputs_at_the_graph(model, monkeypatch)
    assert n_inputs > 0
    assert n_alive == 0
    # Otherwise that would say nothing.
    _, n_alive = inputs_at_the_graph(plain, monkeypatch)
    assert n_alive > 0


# --- a model's own checkpoints --------------------------------------------------------


class Checkpointing(nn.Module):
    """Checkpoints the middle of three layers in its own code, in training or not."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        # None does not checkpoint.
        self.use_reentrant = use_reentrant
        self.before = nn.Linear(5, 4)
        self.within = nn.Linear(4, 4)
        self.after = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x).tanh()
        if self.use_reentrant is None:
            x = self._middle(x)
        else:
            x = checkpoint(self._middle, x, use_reentrant=self.use_reentrant)
        return self.after(x)

    def _middle(self, x: Tensor) -> Tensor:
        # Its inputs aren't those of the checkpoint.
        x = self.within(x.sin())
        return x.tanh()


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_a_model_that_checkpoints_in_its_own_code_gives_the_same_numbers(kfac_approx):
    X = pairs()[0][0].requires_grad_()
    results = []
    for use_reentrant in (None, False):
        model = with_lora(Checkpointing(use_reentrant), "before", "within", "after")
        la = make(model, **full_rank(kfac_approx=kfac_approx))
        la.fit(pairs(2))
        Js, _ = la.backend.jacobians(X, enable_backprop=True)
        (slope,) = torch.autograd.grad(Js.square().sum(), X)
        covariances = la.predictive_moments(X.detach()).f_var
        results.append([la.H.to_matrix(), covariances, slope])
    assert_close(*results, **EXACT)


@pytest.mark.parametrize(
    ("structure", "layers"),
    [
        ("lowrank_kron", ("before", "within", "after")),
        ("lowrank_kron", ("within",)),
        ("full", ("before", "after")),
    ],
)
def test_reentrant_checkpointing_in_a_models_own_code_is_refused(layers, structure):
    la = make(with_lora(Checkpointing(use_reentrant=True), *layers), structure)
    # Ours, or torch's own.
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        la.fit(pairs())
    # No half of a fit is left.
    assert la.n_data == 0
    # Without adapted layers before or in it, it does no harm.
    make(with_lora(Checkpointing(use_reentrant=True), "after")).fit(pairs())
