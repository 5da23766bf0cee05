"""Passes that run as one batch, against the same passes one after the other."""

from __future__ import annotations

import pickle

import pytest
import torch
import transformers
from transformers import DynamicCache

from laplace_lora_ext.text import joined
from laplace_lora_ext.text.perturbations import CentralDifference, ForwardMode
from tests.support.families import FAMILIES, RIGHT
from tests.support.models import lora_model, ragged_batches
from tests.support.posteriors import generator
from tests.support.texts import fitted_text, pairs_of_texts
from tests.support.together import ALONE, JOINED

N_ROWS, N_TOKENS, N_DRAWS, N_NEW = 3, 4, 3, 4
with_caches = pytest.mark.skipif(transformers.__version__ < "5", reason="caches that are tuples")
BEAMS = pytest.param({"num_beams": 2, "num_return_sequences": 2}, marks=with_caches)
SAMPLES = {"do_sample": True, "num_return_sequences": 2}


def posterior(model, way=None):
    batches = [pairs_of_texts()] if model.config.is_encoder_decoder else None
    return fitted_text(model.eval(), batches, prior_precision=20.0, products=way)


def written(la, method="linearized", lengths=(4, 2, 3), **options):
    """Logits of each new token, and how many rows each call of the model had."""
    sizes = {"padded_to": N_TOKENS, "batch_size": len(lengths)}
    (batch,) = ragged_batches(lengths, padding_side="left", **sizes)
    rows = []
    handle = la.model.transformer.register_forward_hook(
        lambda *call: rows.append(len(call[-1].logits))
    )
    torch.manual_seed(0)
    found = la.generate(
        **{key: batch[key] for key in ("input_ids", "attention_mask")},
        n_samples=N_DRAWS,
        generator=generator(),
        method=method,
        max_new_tokens=N_NEW,
        eos_token_id=-1,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    handle.remove()
    return torch.stack(found.output.logits), rows


@pytest.mark.parametrize("options", [{"use_cache": False}, {}, BEAMS, SAMPLES])
@pytest.mark.parametrize("kind", JOINED)
@pytest.mark.parametrize("way", ["forward", "difference", "adapters"])
def test_passes_of_one_batch_give_what_each_gives_alone(kind, way, options, monkeypatch):
    products = {"forward": ForwardMode(), "difference": CentralDifference(1e-3)}.get(way)
    la = posterior(JOINED[kind](), products)
    method = "adapters" if way == "adapters" else "linearized"
    together, rows = written(la, method, **options)
    n_rows = together.shape[1]
    n_passes = N_DRAWS * (2 if way == "difference" else 1)
    assert n_passes * n_rows in rows
    monkeypatch.setattr(joined, "TOKENS_AT_ONCE", 0)
    alone, rows = written(la, method, **options)
    assert max(rows) == n_rows
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)


def test_each_new_token_takes_two_calls_and_the_first_text_a_proof():
    la = posterior(lora_model("gpt2"))
    together, proof = N_DRAWS * N_ROWS, [2 * N_ROWS, N_ROWS, N_ROWS]
    expected = [N_ROWS, together] * N_NEW
    rows = written(la, "adapters")[1]
    assert rows[: len(expected) + 3] == [N_ROWS, *proof, *expected[1:]]
    assert written(la, "adapters")[1][: len(expected)] == expected
    types = torch.zeros(N_ROWS, N_TOKENS, dtype=torch.long)  # other inputs are proven anew
    assert written(la, "adapters", token_type_ids=types)[1][1:4] == proof


@pytest.mark.parametrize("shape", [(-1,), (1, -1)])
def test_what_all_rows_share_is_given_to_all_passes_as_it_is(shape):
    la = posterior(lora_model("gpt2"))
    own = la.model.transformer.prepare_inputs_for_generation

    def prepare(*args, **kwargs):
        inputs = own(*args, **kwargs)
        length, n_new = inputs["attention_mask"].shape[1], inputs["input_ids"].shape[1]
        return inputs | {"position_ids": torch.arange(length)[-n_new:].reshape(shape)}

    la.model.transformer.prepare_inputs_for_generation = prepare
    # As many texts as they have positions, so that lengths alone don't tell the two apart.
    assert N_DRAWS * N_TOKENS in written(la, "adapters", lengths=(4, 2, 3, 4))[1]


def test_long_prompts_are_read_by_a_few_passes_at_once(monkeypatch):
    monkeypatch.setattr(joined, "TOKENS_AT_ONCE", 2 * N_ROWS * N_TOKENS)
    rows = written(posterior(lora_model("gpt2")), "adapters")[1]
    assert rows[4:6] == [2 * N_ROWS, N_ROWS]


@pytest.mark.parametrize("kind", ALONE)
def test_passes_run_alone_where_a_batch_would_mix_them(kind, monkeypatch):
    la, tried = posterior(ALONE[kind]()), []
    la.model.transformer.register_forward_pre_hook(lambda *_: tried.append(1))
    logits, rows = written(la, "adapters")
    assert max(rows) <= 2 * N_ROWS
    if kind in ("DoRA", "embedding"):  # no proof is even tried: small changes might pass it
        assert (max(rows), len(tried)) == (N_ROWS, len(rows))
    monkeypatch.setattr(joined, "TOKENS_AT_ONCE", 0)
    torch.testing.assert_close(logits, written(la, "adapters")[0], rtol=0, atol=0)


@with_caches
@pytest.mark.parametrize("way", ["difference", "adapters"])
def test_a_text_that_a_processor_reads_in_turn_has_caches_of_its_own(way):
    la = posterior(lora_model("gpt2"), CentralDifference(1e-3))
    method = "adapters" if way == "adapters" else "linearized"
    cached, uncached = (
        written(la, method, guidance_scale=1.5, use_cache=cached)[0] for cached in (True, False)
    )
    torch.testing.assert_close(cached, uncached, rtol=1e-6, atol=1e-6)


def test_a_cache_that_no_draw_has_filled_is_refused():
    la = posterior(lora_model("gpt2"))
    ids = torch.tensor([[5, 7, 9]])
    before = la.model.model(ids[:, :2], use_cache=True).past_key_values
    with pytest.raises(NotImplementedError, match="leave them out"):
        la.generate(input_ids=ids, past_key_values=before, n_samples=2, max_new_tokens=2)


@with_caches
def test_a_cache_that_is_returned_is_an_ordinary_one():
    model = lora_model("gpt2").eval()
    ids, cache = torch.tensor([[5, 7, 9]]), DynamicCache()
    found = posterior(model).generate(
        input_ids=ids,
        past_key_values=cache,
        n_samples=2,
        max_new_tokens=2,
        eos_token_id=-1,
        return_dict_in_generate=True,
    )
    assert found.output.past_key_values is cache
    again = pickle.loads(pickle.dumps(cache))
    assert again.get_seq_length() == cache.get_seq_length() == 4
    assert not {"reorder_cache", "crop", "reset"} & vars(cache).keys()


@with_caches
def test_models_that_keep_other_things_than_a_cache_write_without_them():
    model = FAMILIES["Mamba"].model(RIGHT)
    la = fitted_text(model, prior_precision=20.0)
    given = {"input_ids": torch.tensor([[5, 7, 9, 11]]), "max_new_tokens": 2}
    given |= {"eos_token_id": -1, "pad_token_id": -1}
    with pytest.raises(NotImplementedError, match="pass use_cache=False"):
        la.generate(**given, n_samples=2)
    found = la.generate(**given, n_samples=2, use_cache=False)
    assert found.sequences.shape == (1, 6)
    assert found.scores.log_prob.isfinite().all()
