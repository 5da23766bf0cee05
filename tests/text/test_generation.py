"""Generated texts, against next-token distributions of scores and the model's own `generate`."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from laplace_lora_ext.models.weights import LoRAWeights
from laplace_lora_ext.text.draws import Noise
from laplace_lora_ext.text.perturbations import (
    CentralDifference,
    ForwardMode,
    SampledWeights,
    drawn_logits,
)
from laplace_lora_ext.tuning.loss_search import draw_seed
from tests.support.models import VOCABULARY, lora_model, ragged_batches
from tests.support.posteriors import generator
from tests.support.texts import encoder_decoder, fitted_text, pairs_of_texts

WAYS = {"forward": ForwardMode(), "difference": CentralDifference(1e-4)}
N_NEW = 5


def prompts(lengths=(4, 2, 3)):
    (batch,) = ragged_batches(lengths, padding_side="left", padded_to=4)
    return {key: batch[key] for key in ("input_ids", "attention_mask")}


def posterior(model=None, **keywords):
    return fitted_text(model, prior_precision=20.0, **keywords)


def predictive(la, way, tokens, source=None):
    """Log-probabilities `(V,)` of the token after a text, by passes without a cache.

    With a source, the text is what a decoder has read and written.
    """
    if source is None:
        text = {"input_ids": torch.cat([tokens, tokens[-1:]])[None]}
        text["labels"] = torch.full_like(text["input_ids"], -100)
    else:
        text = {"input_ids": source[None], "decoder_input_ids": tokens[None]}
        text["labels"] = torch.full_like(tokens[None], -100)
    text["labels"][0, -1] = 1
    weights = LoRAWeights(la.model, la.blocks)
    directions = Noise(3, draw_seed(generator())).directions(la.posterior_precision, la.blocks)
    with torch.no_grad():
        f = la.model(text)
        drawn = drawn_logits(
            way, weights.values, directions, partial(map, partial(weights.run, text)), f
        )
        return torch.stack(list(drawn)).softmax(-1).mean(0)[0].log()


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("way", ["forward", "difference", "adapters"])
def test_every_token_is_the_most_likely_one_under_the_predictive(way, cached):
    la = posterior(products=WAYS.get(way))
    method = "adapters" if way == "adapters" else "linearized"
    found = la.generate(
        **prompts(),
        n_samples=3,
        generator=generator(),
        method=method,
        max_new_tokens=N_NEW,
        do_sample=False,
        use_cache=cached,
        eos_token_id=-1,
        return_dict_in_generate=True,
        output_logits=True,
    )
    assert found.sequences.shape == (3, 4 + N_NEW)
    for row, length in enumerate((4, 2, 3)):
        tokens = found.sequences[row, 4 - length :]
        for new in range(N_NEW):
            log_p = predictive(la, WAYS.get(way, SampledWeights()), tokens[: length + new])
            torch.testing.assert_close(
                found.output.logits[new][row].double(), log_p, rtol=1e-5, atol=1e-5
            )
            assert tokens[length + new] == log_p.argmax()
            of_token = found.scores.tokens.log_prob[row, 4 + new]
            torch.testing.assert_close(of_token, log_p.max(), rtol=1e-5, atol=1e-5)
    assert torch.equal(found.scores.labelled.sum(1), torch.full((3,), N_NEW))


def sources():
    batch = pairs_of_texts()
    return {key: batch[key] for key in ("input_ids", "attention_mask")}


def posterior_of_pairs(kind, **keywords):
    return posterior(encoder_decoder(kind), batches=[pairs_of_texts()], **keywords)


@pytest.mark.parametrize("begun", [None, torch.tensor([[7, 9]] * 3), torch.tensor([[0, 9]] * 3)])
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("way", ["forward", "difference", "adapters"])
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_a_decoder_writes_what_its_draws_make_of_the_source(kind, way, cached, begun):
    la = posterior_of_pairs(kind, products=WAYS.get(way))
    found = la.generate(
        **sources(),
        **({} if begun is None else {"decoder_input_ids": begun}),
        n_samples=3,
        generator=generator(),
        method="adapters" if way == "adapters" else "linearized",
        max_new_tokens=N_NEW,
        do_sample=False,
        use_cache=cached,
        eos_token_id=-1,
        pad_token_id=-1,
        forced_eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    first = {None: 1}.get(begun) or (3 if begun[0, 0] else 2)  # transformers puts a 0 in front
    assert found.sequences.shape == (3, first + N_NEW)
    for row, length in enumerate((5, 3, 4)):
        source = sources()["input_ids"][row, :length]
        for new in range(N_NEW):
            tokens = found.sequences[row, : first + new]
            log_p = predictive(la, WAYS.get(way, SampledWeights()), tokens, source)
            torch.testing.assert_close(
                found.output.logits[new][row].double(), log_p, rtol=1e-5, atol=1e-5
            )
            assert found.sequences[row, first + new] == log_p.argmax()
            of_token = found.scores.tokens.log_prob[row, first + new - 1]
            torch.testing.assert_close(of_token, log_p.max(), rtol=1e-5, atol=1e-5)
    assert torch.equal(found.scores.labelled.sum(1), torch.full((3,), N_NEW))


def test_an_encoder_reads_the_source_once_for_all_draws():
    la, calls = posterior_of_pairs("t5", products=ForwardMode()), []
    encoder = la.model.transformer.get_encoder()
    encoder.register_forward_hook(lambda *_: calls.append(1))
    found = la.generate(**sources(), n_samples=3, max_new_tokens=N_NEW, eos_token_id=-1)
    proof, of_scores = 1 + 2, 1 + 3 + 1
    assert found.sequences.shape[1] == 1 + N_NEW
    assert len(calls) == (1 + proof + 1) + of_scores


OPTIONS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_k": 10},
    "beams": {"num_beams": 3, "do_sample": False},
    "several": {"do_sample": True, "num_return_sequences": 2},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["gpt2", "t5", "bart"])
def test_without_draws_texts_are_the_models_own(kind, options):
    la = posterior() if kind == "gpt2" else posterior_of_pairs(kind)
    given = prompts() if kind == "gpt2" else sources()
    texts = []
    for generate in (
        la.model.model.generate,
        lambda **given: la.generate(n_samples=0, **given).sequences,
    ):
        torch.manual_seed(0)
        texts.append(generate(**given, max_new_tokens=6, pad_token_id=0, **OPTIONS[options]))
    assert torch.equal(*texts)
    assert la.products is None  # nor does it matter how to multiply with Jacobians


@pytest.mark.parametrize("way", ["forward", "difference", "adapters"])
@pytest.mark.parametrize("options", ["beams", "several"])
@pytest.mark.parametrize("kind", ["gpt2", "t5", "bart"])
def test_caches_change_no_text(kind, options, way):
    own = posterior if kind == "gpt2" else partial(posterior_of_pairs, kind)
    la, given = own(products=WAYS.get(way)), prompts() if kind == "gpt2" else sources()
    read = given if kind == "gpt2" else given | {"decoder_input_ids": given["input_ids"]}
    cached_output = la.model.model(**read, use_cache=True).past_key_values
    if options == "beams" and isinstance(cached_output, tuple):
        with pytest.raises(NotImplementedError, match="newer transformers"):
            la.generate(**given, n_samples=2, **OPTIONS[options])
        return
    texts = []
    for cached in (True, False):
        torch.manual_seed(0)
        found = la.generate(
            **given,
            n_samples=2,
            generator=generator(),
            method="adapters" if way == "adapters" else "linearized",
            max_new_tokens=6,
            use_cache=cached,
            pad_token_id=0,
            eos_token_id=-1,
            **OPTIONS[options],
        )
        texts.append(found.sequences)
    assert torch.equal(*texts)


def test_what_transformers_own_processors_forbid_stays_forbidden():
    la = posterior(products=ForwardMode())
    usual = la.generate(**prompts(), n_samples=2, generator=generator(), max_new_tokens=1)
    forbidden = usual.sequences[:, -1].tolist()
    other = la.generate(
        **prompts(),
        n_samples=2,
        generator=generator(),
        max_new_tokens=1,
        suppress_tokens=forbidden,
    )
    assert not set(other.sequences[:, -1].tolist()) & set(forbidden)


def test_processors_see_log_probabilities_of_the_predictive():
    class Sum(LogitsProcessor):
        def __call__(self, input_ids, scores):
            sums.append(scores.exp().sum(-1))
            return scores

    sums = []
    la = posterior(products=ForwardMode())
    la.generate(
        **prompts(),
        n_samples=2,
        max_new_tokens=2,
        eos_token_id=-1,
        logits_processor=LogitsProcessorList([Sum()]),
    )
    torch.testing.assert_close(torch.stack(sums), torch.ones(2, 3), check_dtype=False)


def test_draws_are_seeded_and_the_model_stays_as_it_was():
    model = lora_model("gpt2")
    la = posterior(model)
    model.train()
    hooks = len(model.get_base_model()._forward_hooks)
    runs = [
        la.generate(**prompts(), n_samples=2, generator=generator(), max_new_tokens=3)
        for _ in range(2)
    ]
    assert torch.equal(runs[0].sequences, runs[1].sequences)
    assert torch.equal(runs[0].scores.tokens.total, runs[1].scores.tokens.total)
    assert model.training
    assert len(model.get_base_model()._forward_hooks) == hooks
    assert math.isfinite(runs[0].scores.log_prob.sum())


def test_a_prompt_of_one_token_is_continued():
    la = posterior()
    found = la.generate(input_ids=torch.tensor([[5]]), n_samples=2, max_new_tokens=2)
    assert found.sequences.shape[0] == 1
    assert (found.sequences < VOCABULARY).all()


class EveryThird(StoppingCriteria):
    """Stops texts after a token that three divides."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 3 == 0


@pytest.mark.parametrize("padding", [0, 2])
def test_padding_that_looks_like_an_ending_is_none_where_a_text_was_stopped(padding):
    la = posterior()
    options = {"eos_token_id": 2, "pad_token_id": padding, "max_new_tokens": 8, "n_samples": 0}
    options |= {"do_sample": True, "top_k": 20}
    options["stopping_criteria"] = StoppingCriteriaList([EveryThird()])
    given = {key: value.repeat(4, 1) for key, value in prompts().items()}
    torch.manual_seed(0)
    found = la.generate(**given, **options)
    new = found.sequences[:, 4:]
    labelled = found.scores.labelled[:, 4:]
    assert labelled.all(1).sum() < 12
    for row in range(12):
        stops = (((new[row] % 3 == 0) | (new[row] == 2)).nonzero()[:, 0]).tolist() or [7]
        assert labelled[row].sum() == stops[0] + 1
