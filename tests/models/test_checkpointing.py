"""Layers that training checkpoints are checkpointed in recorded passes."""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertForSequenceClassification

from laplace_lora_ext.models.tree import Tree
from laplace_lora_ext.passes.graph import Graph
from tests.support.dense import EXACT, full_rank
from tests.support.models import (
    TARGET_MODULES,
    first_batch,
    lora_model,
    pairs,
    ragged_batches,
    with_lora,
)
from tests.support.posteriors import KFAC_APPROX, fitted, make, with_structures

KINDS = list(TARGET_MODULES)

assert_same = partial(assert_close, **EXACT)


def enable(model: nn.Module, use_reentrant: bool = False) -> None:
    """Switch checkpointing on, as a trainer does."""
    base = model.get_base_model()
    run = partial(checkpoint, use_reentrant=use_reentrant)
    base._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=run)


def forward_passes_of(layer: nn.Module) -> list[int]:
    """Make a list that gets an entry each time a layer computes its attention."""
    calls: list[int] = []
    for module in layer.modules():
        if "Attention" in type(module).__name__:
            module.register_forward_hook(lambda *_: calls.append(1))
            # Those within it would be counted again.
            break
    return calls


# --- layers of transformers -----------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "use_reentrant", "kfac_approx"),
    [
        *((kind, False, "gradient") for kind in KINDS),
        (KINDS[0], True, "gradient"),
        (KINDS[-1], False, "expand"),
    ],
)
def test_layers_are_computed_anew_give_the_same_numbers_and_stay_as_they_were(
    kind, use_reentrant, kfac_approx
):
    settings = {"rank": 100, "kfac_approx": kfac_approx}
    plain = fitted(kind, model=lora_model(kind), **settings)
    model = lora_model(kind)
    enable(model, use_reentrant)
    layers = [
        each for each in Tree(model).checkpointable if each.gradient_checkpointing
    ]
    assert len(layers) == 2
    calls = forward_passes_of(layers[0])
    la = fitted(kind, model=model, **settings)
    assert len(calls) > len(ragged_batches())
    assert_close(la.H.to_matrix(), plain.H.to_matrix())
    assert_close(la.log_marginal_likelihood(), plain.log_marginal_likelihood())
    batch = first_batch()
    for link in ("mean_field", "probit"):
        assert_close(la(batch, link_approx=link), plain(batch, link_approx=link))
    for layer in layers:
        assert "forward" not in vars(layer)
        assert layer.gradient_checkpointing


def test_dropout_of_checkpointed_layers_stays_off():
    # So much that a single pass with dropout would be seen.
    config = BertConfig(
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        vocab_size=60,
        hidden_dropout_prob=0.5,
        attention_probs_dropout_prob=0.5,
        num_labels=3,
    )
    torch.manual_seed(0)
    base = BertForSequenceClassification(config)
    lora = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    model = get_peft_model(base, lora).double()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)
    model.train()
    plain = fitted(model=model)
    enable(model)
    la = fitted(model=model)
    found = la.H.to_matrix()
    assert_close(found, plain.H.to_matrix())
    assert model.training


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


ALL = ("before", "within", "after")


def posterior_of(
    use_reentrant: bool | None, layers: Sequence[str] = ALL, **settings: Any
):
    """Fit a posterior with full factors to pairs."""
    base = Checkpointing(use_reentrant)
    model = with_lora(base, *layers)
    keywords = full_rank(**settings)
    la = make(model, **keywords)
    la.fit(pairs(2))
    return la


def slope_of_jacobians(la: Any, X: Tensor) -> Tensor:
    """Differentiate the sum of squared Jacobians in the inputs."""
    x = X.clone().requires_grad_()
    Js, _ = la.backend.jacobians(x, enable_backprop=True)
    total = Js.square().sum()
    (slope,) = torch.autograd.grad(total, x)
    return slope


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_a_model_that_checkpoints_in_its_own_code_gives_the_same_numbers(kfac_approx):
    ((X, _),) = pairs()
    plain = posterior_of(use_reentrant=None, kfac_approx=kfac_approx)
    la = posterior_of(use_reentrant=False, kfac_approx=kfac_approx)
    assert_same(la.H.to_matrix(), plain.H.to_matrix())
    assert_same(la.predictive_moments(X), plain.predictive_moments(X))
    assert_same(slope_of_jacobians(la, X), slope_of_jacobians(plain, X))


@pytest.mark.parametrize(
    ("structure", "layers"),
    with_structures([ALL, ("within",), ("before", "after"), ("within", "after")]),
)
def test_reentrant_checkpointing_in_a_models_own_code_is_refused(layers, structure):
    base = Checkpointing(use_reentrant=True)
    model = with_lora(base, *layers)
    la = make(model, structure)
    # Ours, or torch's own.
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        la.fit(pairs())
    # No half of a fit is left.
    assert la.n_data == 0


def test_reentrant_checkpointing_without_adapted_layers_before_or_in_it_does_no_harm():
    plain = posterior_of(use_reentrant=None, layers=["after"])
    la = posterior_of(use_reentrant=True, layers=["after"])
    found = la.H.to_matrix()
    assert_same(found, plain.H.to_matrix())
