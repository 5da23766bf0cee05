"""Layers that training checkpoints are checkpointed in recorded passes."""

import weakref
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertForSequenceClassification

from laplace_lora_ext.models.running import checkpointed_layers
from laplace_lora_ext.passes.graph import Graph
from tests.support.dense import EXACT
from tests.support.models import (
    TARGET_MODULES,
    lora_model,
    pairs,
    ragged_batches,
    with_lora,
)
from tests.support.posteriors import KFAC_APPROX, STRUCTURES, fitted, make

KINDS = list(TARGET_MODULES)


def enable(
    model: nn.Module,
    use_reentrant: bool = False,
) -> None:
    model.get_base_model()._set_gradient_checkpointing(
        enable=True,
        gradient_checkpointing_func=partial(checkpoint, use_reentrant=use_reentrant),
    )


def forward_passes_of(layer: nn.Module) -> list[int]:
    """Make a list that gets an entry each time a layer computes its attention."""
    calls: list[int] = []
    attention, *_ = [
        module for module in layer.modules() if "Attention" in type(module).__name__
    ]
    attention.register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("kfac_approx", ["gradient", "expand"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointed_passes_give_the_same_numbers(kind, use_reentrant, kfac_approx):
    plain = fitted(kind, rank=100, kfac_approx=kfac_approx)
    model = lora_model(kind)
    enable(model, use_reentrant)
    layers = checkpointed_layers(model)
    assert len(layers) == 2
    calls = forward_passes_of(layers[0])
    la = fitted(kind, model=model, rank=100, kfac_approx=kfac_approx)
    assert len(calls) > len(ragged_batches())  # computed anew
    assert_close(la.H.to_matrix(), plain.H.to_matrix())
    evidence = plain.log_marginal_likelihood().item()
    assert la.log_marginal_likelihood() == pytest.approx(evidence)
    batch = ragged_batches()[0]
    for link in ("mean_field", "probit"):
        expected = plain(batch, link_approx=link)
        assert_close(la(batch, link_approx=link), expected)
    # The model is as it was.
    for layer in layers:
        assert "forward" not in vars(layer)
        assert layer.gradient_checkpointing


def test_dropout_of_checkpointed_layers_stays_off():
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
    plain = fitted(model=model.train())
    enable(model)
    la = fitted(model=model.train())
    assert_close(la.H.to_matrix(), plain.H.to_matrix())
    assert model.training


@pytest.mark.parametrize("is_checkpointed", [True, False])
def test_inputs_of_layers_are_computed_anew_with_their_activations(
    monkeypatch, is_checkpointed
):
    """A checkpointed layer's LoRA inputs are gone after a forward pass."""
    inputs: list[weakref.ref] = []
    n_alive: list[int] = []
    initialise = Graph.__init__

    def note_input(layer, args, output) -> None:
        inputs.append(weakref.ref(args[0]))

    def note_graph(self, *args) -> None:
        alive = [each for each in inputs if each() is not None]
        n_alive.append(len(alive))
        initialise(self, *args)

    model = lora_model("gpt2")
    if is_checkpointed:
        enable(model)
    for name, layer in model.named_modules():
        if name.endswith("lora_A.default"):
            layer.register_forward_hook(note_input)
    monkeypatch.setattr(Graph, "__init__", note_graph)
    fitted("gpt2", ragged_batches()[:1], model=model)
    assert inputs
    if is_checkpointed:
        assert n_alive == [0]
    else:
        assert n_alive[0] > 0


class Checkpointing(nn.Module):
    """Checkpoints the middle of three layers in its own code, in training or not."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant  # None does not checkpoint
        self.before = nn.Linear(5, 4)
        self.within = nn.Linear(4, 4)
        self.after = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x).tanh()
        if self.use_reentrant is None:
            x = self._middle(x)
        else:
            x = checkpoint(self._middle, x, use_reentrant=self.use_reentrant)
        return self.after(x)

    def _middle(self, x: torch.Tensor) -> torch.Tensor:
        return self.within(x.sin()).tanh()


ALL = ("before", "within", "after")


def posterior_of(model: nn.Module, **settings):
    """Fit a posterior with full factors to pairs."""
    la = make(model, backend_kwargs={"rank": 100, **settings})
    la.fit(pairs(2))
    return la


def slope_of_jacobians(la, X: torch.Tensor) -> torch.Tensor:
    """Differentiate the sum of squared Jacobians in the inputs."""
    x = X.clone().requires_grad_()
    Js, _ = la.backend.jacobians(x, enable_backprop=True)
    (slope,) = torch.autograd.grad(Js.square().sum(), x)
    return slope


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_a_model_that_checkpoints_in_its_own_code_gives_the_same_numbers(kfac_approx):
    X, _ = pairs(2)[0]
    plain_model = with_lora(Checkpointing(use_reentrant=None), *ALL)
    plain = posterior_of(plain_model, kfac_approx=kfac_approx)
    model = with_lora(Checkpointing(use_reentrant=False), *ALL)
    la = posterior_of(model, kfac_approx=kfac_approx)
    assert_close(la.H.to_matrix(), plain.H.to_matrix(), **EXACT)
    expected = plain.predictive_moments(X)
    assert_close(la.predictive_moments(X), expected, **EXACT)
    slope = slope_of_jacobians(plain, X)
    assert_close(slope_of_jacobians(la, X), slope, **EXACT)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(
    "layers",
    [ALL, ("within",), ("before", "after"), ("within", "after")],
)
def test_reentrant_checkpointing_in_a_models_own_code_is_refused(layers, structure):
    model = with_lora(Checkpointing(use_reentrant=True), *layers)
    la = make(model, structure)
    message = r"reentrant.*pass use_reentrant=False"
    with pytest.raises(NotImplementedError, match=message):
        la.fit(pairs())
    assert la.n_data == 0


def test_reentrant_checkpointing_without_adapted_layers_before_or_in_it_does_no_harm():
    plain = posterior_of(with_lora(Checkpointing(use_reentrant=None), "after"))
    la = posterior_of(with_lora(Checkpointing(use_reentrant=True), "after"))
    assert_close(la.H.to_matrix(), plain.H.to_matrix(), **EXACT)
