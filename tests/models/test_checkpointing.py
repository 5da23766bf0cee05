"""Layers that the user's training checkpoints are checkpointed in recorded passes too."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from laplace_lora_ext.models.checkpointing import checkpointed_layers
from tests.support.models import TARGET_MODULES, lora_model, ragged_batches
from tests.support.posteriors import fitted

KINDS = list(TARGET_MODULES)


def enable(model: nn.Module, use_reentrant: bool = False) -> None:
    model.get_base_model()._set_gradient_checkpointing(
        enable=True,
        gradient_checkpointing_func=lambda *args, **kwargs: torch.utils.checkpoint.checkpoint(
            *args, use_reentrant=use_reentrant, **kwargs
        ),
    )


def forward_passes_of(layer: nn.Module) -> list[int]:
    """A list that gets an entry each time a layer computes its attention."""
    calls: list[int] = []
    inner = next(m for m in layer.modules() if "Attention" in type(m).__name__)
    inner.register_forward_hook(lambda *_: calls.append(1))
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
    torch.testing.assert_close(la.H.to_matrix(), plain.H.to_matrix())
    assert la.log_marginal_likelihood() == pytest.approx(plain.log_marginal_likelihood().item())
    batch = ragged_batches()[0]
    for link_approx in ("mean_field", "probit"):
        expected = plain(batch, link_approx=link_approx)
        torch.testing.assert_close(la(batch, link_approx=link_approx), expected)
    # The model is as it was.
    assert not any("forward" in vars(layer) for layer in layers)
    assert all(layer.gradient_checkpointing for layer in layers)


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
    lora = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    model = get_peft_model(BertForSequenceClassification(config), lora).double()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)
    plain = fitted(model=model.train())
    enable(model)
    la = fitted(model=model.train())
    torch.testing.assert_close(la.H.to_matrix(), plain.H.to_matrix())
    assert model.training


def test_inputs_of_layers_are_not_kept(monkeypatch):
    """Where layers are checkpointed, what LoRA layers are given goes with their activations."""
    from laplace_lora_ext.passes import graph

    kept: list[bool] = []
    initialise = graph.Graph.__init__

    def note(self, logits, calls, *args) -> None:
        initialise(self, logits, calls, *args)
        kept.extend(call.inputs is not None for of_layer in calls for call in of_layer)

    monkeypatch.setattr(graph.Graph, "__init__", note)
    model = lora_model("gpt2")
    enable(model)
    fitted("gpt2", model=model)
    assert kept
    assert not any(kept)
