"""Scores' passes as one batch, against the same passes one after the other."""

import pytest
import torch

from laplace_lora_ext.text import joined
from laplace_lora_ext.text.perturbations import CentralDifference, ForwardMode, SampledWeights
from tests.support.models import lora_model
from tests.support.posteriors import generator
from tests.support.texts import fitted_text, pairs_of_texts, text_batches
from tests.support.together import ALONE, JOINED

N_DRAWS = 3
WAYS = {
    "forward": ForwardMode(),
    "difference": CentralDifference(1e-3),
    "adapters": SampledWeights(),
}


def texts(la):
    if la.model.is_encoder_decoder:
        return pairs_of_texts()
    return text_batches(batch_size=6)[0]


def posterior(model):
    batches = [pairs_of_texts()] if model.config.is_encoder_decoder else None
    return fitted_text(model.eval(), batches, prior_precision=20.0)


def scores(la, way="adapters", batch=None, n_samples=N_DRAWS):
    """Scores, and how many rows each call of the model had."""
    rows = []
    handle = la.model.model.register_forward_hook(lambda *call: rows.append(len(call[-1].logits)))
    la.products = WAYS[way]
    method = "adapters" if way == "adapters" else "linearized"
    found = la.score(texts(la) if batch is None else batch, n_samples, generator(), method)
    handle.remove()
    return found, rows


def assert_same(found, expected):
    for name, numbers in vars(expected.tokens).items():
        torch.testing.assert_close(getattr(found.tokens, name), numbers, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.log_prob, expected.log_prob, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", JOINED)
@pytest.mark.parametrize("way", WAYS)
def test_passes_of_one_batch_give_what_each_gives_alone(kind, way, monkeypatch):
    la = posterior(JOINED[kind]())
    found, rows = scores(la, way)
    n_rows, n_passes = rows[0], N_DRAWS * (2 if way == "difference" else 1)
    proof, together = [2 * n_rows, n_rows, n_rows], [N_DRAWS * n_rows] * (n_passes // N_DRAWS)
    assert rows == [n_rows, *proof, *together]
    assert scores(la, way)[1] == [n_rows, *together]  # it is proven once
    monkeypatch.setattr(joined, "TOKENS_AT_ONCE", 0)
    alone, rows = scores(la, way)
    assert rows == [n_rows] * (1 + n_passes)
    assert_same(found, alone)


@pytest.mark.parametrize("kind", ALONE)
def test_passes_run_alone_where_a_batch_would_mix_them(kind, monkeypatch):
    la = posterior(ALONE[kind]())
    scores(la)
    found, rows = scores(la)
    assert len(set(rows)) == 1
    monkeypatch.setattr(joined, "TOKENS_AT_ONCE", 0)
    assert_same(found, scores(la)[0])


@pytest.mark.parametrize("limit", ["TOKENS_AT_ONCE", "_LOGITS_AT_ONCE"])
def test_long_texts_and_large_vocabularies_take_a_few_passes_at_once(limit, monkeypatch):
    la = posterior(lora_model("gpt2"))
    batch = texts(la)
    n_rows = len(batch["labels"])
    of_pass = {
        "TOKENS_AT_ONCE": batch["input_ids"].numel(),
        "_LOGITS_AT_ONCE": la.tokens(batch)[0].numel(),
    }
    monkeypatch.setattr(joined, limit, 3 * of_pass[limit] - 1)
    assert scores(la)[1][4:] == [2 * n_rows, n_rows]
    monkeypatch.setattr(joined, limit, 2 * of_pass[limit] - 1)
    assert scores(la)[1] == [n_rows] * (1 + N_DRAWS)


@pytest.mark.parametrize("n_samples", [0, 1])
def test_one_pass_needs_no_proof(n_samples):
    assert len(scores(posterior(lora_model("gpt2")), n_samples=n_samples)[1]) == 1 + n_samples


def test_what_need_not_lie_by_text_is_not_joined():
    la = posterior(lora_model("gpt2"))
    batch = texts(la)
    shared = torch.arange(batch["input_ids"].shape[1])[None]
    rows = scores(la, batch=batch | {"position_ids": shared})[1]
    assert rows == [len(batch["labels"])] * (1 + N_DRAWS)
