"""LoRA on a causal language model's output layer, and posteriors over some layers alone."""

import laplace
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tiny_models import CLASS_TOKEN_IDS, VOCABULARY, ragged_batches


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    settings = LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj", "lm_head"]
    )
    model = get_peft_model(LlamaForCausalLM(config), settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return model


def fit(model, **selection):
    la = laplace.Laplace(
        model,
        "classification",
        "lora",
        "lowrank_kron",
        class_token_ids=CLASS_TOKEN_IDS,
        **selection,
    )
    la.fit(ragged_batches())
    return la


@pytest.mark.parametrize(
    ("selection", "layers"),
    [
        ({"target_modules": ["lm_head"]}, ["lm_head"]),
        ({"layers_to_transform": range(2)}, ["model.layers.0", "model.layers.1"]),
    ],
)
def test_a_posterior_over_some_layers_is_a_part_of_that_over_all(model, selection, layers):
    part, whole = fit(model, **selection), fit(model)
    assert list(part.variance_by_layer(ragged_batches()[0]).by_layer) == layers
    batch = ragged_batches(seed=4)[0]
    chosen = [block.transformer_layer in layers for block in whole.blocks]
    precision = torch.where(torch.tensor(chosen), 0.5, torch.inf)
    expected = whole.predictive_statistics([batch]).moments(precision)
    part.prior_precision = 0.5
    f_mu, f_var = part._glm_predictive_distribution(batch)
    torch.testing.assert_close(f_mu, expected.f_mu)
    torch.testing.assert_close(f_var, expected.f_var, rtol=1e-4, atol=1e-6)

    whole.prior_precision = part.prior_precision
    shares = whole.variance_by_layer(batch).by_layer
    all_layers = whole._glm_predictive_distribution(batch)[1]
    trace = [v.diagonal(dim1=1, dim2=2).sum().item() for v in (f_var, all_layers)]
    assert sum(shares[layer] for layer in layers) == pytest.approx(trace[0] / trace[1], rel=1e-4)


def test_shares_of_the_first_and_the_last_layers_come_in_one_call(model):
    shares = fit(model).variance_by_layer(ragged_batches()[0]).by_layer
    assert list(shares) == ["model.layers.0", "model.layers.1", "model.layers.2", "lm_head"]
    assert sum(shares.values()) == pytest.approx(1)
    assert min(shares.values()) > 0


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_vocabulary_is_scored_at_one_position_a_row(model, side):
    rows = []
    head = model.base_model.model.lm_head
    head.base_layer.register_forward_hook(lambda _, __, output: rows.append(output.shape))
    la = fit(model)
    batches = ragged_batches(padding_side=side)
    la.fit(batches)
    la(batches[0])
    la.predictive_statistics(batches)
    assert {shape[1:] for shape in rows} == {(1, VOCABULARY)}
