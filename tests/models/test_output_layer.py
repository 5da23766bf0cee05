"""The output layer, run for a few positions of each text."""

from __future__ import annotations

import pytest
import torch

from laplace_lora_ext.models.output_layer import selecting
from tests.support.models import VOCABULARY, base_model

N_TEXTS, T = 2, 5


@pytest.fixture
def model():
    torch.manual_seed(0)
    return base_model("gpt2").double().eval()


@pytest.fixture
def tokens():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (N_TEXTS, T), generator=generator)


def test_it_sees_the_places_of_the_index_alone(model, tokens):
    index = torch.tensor([[4, 0], [2, 3]])
    expected = model(tokens).logits.take_along_dim(index[..., None], dim=1)
    with selecting(model, index, T) as calls:
        logits = model(tokens).logits
    assert calls == [(N_TEXTS, T, 12)]
    torch.testing.assert_close(logits, expected)
    assert model(tokens).logits.shape == (N_TEXTS, T, VOCABULARY)  # the hook is gone


def test_hidden_states_at_other_positions_are_left_alone(model, tokens):
    with selecting(model, torch.zeros(N_TEXTS, 1, dtype=torch.long), T + 1) as calls:
        assert model(tokens).logits.shape == (N_TEXTS, T, VOCABULARY)
    assert not calls


def test_a_model_may_have_no_output_layer(model, tokens, monkeypatch):
    monkeypatch.setattr(type(model), "get_output_embeddings", lambda _: None)
    with selecting(model, torch.zeros(N_TEXTS, 1, dtype=torch.long), T) as calls:
        assert model(tokens).logits.shape == (N_TEXTS, T, VOCABULARY)
    assert not calls
