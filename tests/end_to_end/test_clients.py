"""The guide to other libraries, each block run with its library."""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.special import entr
from torch.testing import assert_close
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.support.models import VOCABULARY, lora_model, ragged_batches, without_labels
from tests.support.pages import PROMPTS, write_adapter
from tests.support.posteriors import fitted, generator
from tests.support.texts import drawn_models, fitted_text, text_batches

PAGE = Path(__file__).parents[2] / "docs/other_libraries.md"
GUIDE = PAGE.read_text(encoding="utf-8")
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def run(section: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run a section's blocks, one after the other, if its library can be imported."""
    library = section.partition(",")[0]
    module = library.lower().replace("-", "_")
    pytest.importorskip(module)
    sections = GUIDE.split("\n## ")
    (text,) = [each for each in sections if each.startswith(section)]
    for block in CODE.findall(text):
        code = compile(block, section, "exec")
        exec(code, names)
    return names


# --- lm-polygraph ---------------------------------------------------------------------


@dataclass(frozen=True)
class Polygraph:
    """A language model that writes, and what the guide's blocks have made."""

    writer: Any
    model: Any
    manager: Any
    ensemble_scores: Any


@pytest.fixture(scope="module")
def polygraph(tmp_path_factory) -> Polygraph:
    """Run the guide's blocks on a small model."""
    folder = tmp_path_factory.mktemp("adapter")
    write_adapter(folder, "gpt2")
    writer = fitted_text(prior_precision=20.0)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    given = {
        "writer": writer,
        "model": writer.model.transformer,
        "tokenizer": tokenizer,
        "prompts": PROMPTS,
        "answers": [""] * len(PROMPTS),
    }
    names = run("lm-polygraph", given)
    return Polygraph(
        writer=writer,
        model=names["polygraph_model"],
        manager=names["manager"],
        ensemble_scores=names["EnsembleScores"],
    )


def test_lm_polygraph_has_a_number_for_each_prompt(polygraph):
    estimations = polygraph.manager.estimations
    # It drops estimators that fail.
    assert len(estimations) == 5
    for values in estimations.values():
        assert len(values) == len(PROMPTS)


# Measures of disagreement between the draws.
OF_DISAGREEMENT = ["Tmi", "Trmi", "Tepkl", "Srmi"]


def test_without_any_draws_the_ensemble_of_lm_polygraph_is_the_trained_model(polygraph):
    from lm_polygraph import estimators as lm
    from lm_polygraph.stat_calculators import EntropyCalculator, GreedyProbsCalculator

    calculators = [
        GreedyProbsCalculator(output_attentions=False),
        EntropyCalculator(),
        polygraph.ensemble_scores(polygraph.writer, 0),
    ]
    stats = {}
    for calculate in calculators:
        stats |= calculate(stats, PROMPTS, polygraph.model, 4)

    def estimated(name: str) -> np.ndarray:
        estimator = getattr(lm, name)()
        return np.asarray(estimator(stats))

    entropy = estimated("MeanTokenEntropy")
    perplexity = estimated("Perplexity")
    expected = {
        "Ttu": entropy,
        "Tdu": entropy,
        # The likelihood, less of which is more doubt.
        "Stu": -np.exp(-perplexity),
    }
    # One model does not disagree with itself.
    expected |= dict.fromkeys(OF_DISAGREEMENT, 0)
    for measure, of_model in expected.items():
        for mode in ("EP", "PE"):
            found = estimated(mode + measure)
            # They are in lm-polygraph's float32.
            np.testing.assert_allclose(found, of_model, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def log_probabilities(model: nn.Module, text: Tensor, tokens: Tensor) -> Tensor:
    """Compute `(tokens, vocabulary)` log-probabilities where a text goes on."""
    logits = model(torch.cat([text, tokens[None]], dim=1)).logits
    # The logits at a place are those of the token behind it.
    return logits[0, text.shape[1] - 1 : -1].log_softmax(-1)


def test_the_ensembles_of_lm_polygraph_are_draws(polygraph):
    writer = polygraph.writer
    batch, *_ = text_batches()
    text = batch["input_ids"][:1]
    tokens = torch.tensor([5, 6, 7])
    of_trained_model = log_probabilities(writer.model.model, text, tokens)
    draws = drawn_models(writer, 5, generator())
    of_draws = [log_probabilities(model, text, tokens) for model in draws]
    # (draws, tokens, vocabulary)
    p = torch.stack(of_draws).exp()

    # What "ep" weighs each draw by: the probability that it gave the tokens so far.
    weights = torch.ones(5, 1).double()
    of_pe = []
    of_ep = []
    for place, token in enumerate(tokens):
        of_place = p[:, place]
        of_pe.append(entr(of_place.mean(0)).sum())
        of_ep.append(entr((weights * of_place).sum(0) / weights.sum()).sum())
        weights = weights * of_place[:, token, None]
    scores = polygraph.ensemble_scores(writer, 5)
    found = scores.measures(text, tokens, of_trained_model)
    log_probas = weights.log() / len(tokens)
    entropies = {"pe": of_pe, "ep": of_ep}
    for mode, of_tokens in entropies.items():
        of_mode = found[f"{mode}_token_level_scores"]
        total = torch.stack(of_tokens).mean()
        assert_close(of_mode["total_uncertainty"], total[None])
        assert_close(of_mode["log_probas"], log_probas)


# --- other libraries ------------------------------------------------------------------


def test_the_wrapper_of_torch_uncertainty_predicts_as_the_posterior_does():
    model = lora_model("bert")
    batches = ragged_batches()
    la = fitted(model=model, batches=batches, rank=10)
    la.optimize_prior_precision(method="marglik")
    # Its data are pairs of inputs and labels.
    loader = [(without_labels(batch), batch["labels"]) for batch in batches]
    inputs, _ = loader[0]
    given = {"model": model, "train_loader": loader, "inputs": inputs}
    names = run("torch-uncertainty", given)
    assert_close(names["probs"], la(inputs))


def test_mapie_finds_a_limit_from_which_on_answers_are_right():
    random = np.random.default_rng(0)
    p = random.dirichlet([0.2] * 3, size=4000)
    labels = np.array([random.choice(3, p=row) for row in p])
    # Loaders are what is predicted of their texts.
    held_out, test = p[:2000], p[2000:]
    given = {
        "la": SimpleNamespace(predict_proba=lambda loader: loader),
        "held_out_loader": held_out,
        "labels": labels[:2000],
        "test_loader": test,
    }
    is_decided = run("MAPIE", given)["is_decided"]
    is_right = test.argmax(1) == labels[2000:]
    assert is_right.mean() < 0.9
    assert is_right[is_decided].mean() > 0.95
    assert is_decided.mean() > 0.3


def write_base(folder: Path) -> None:
    """Write a small model that vLLM can run, and its tokenizer."""
    AutoTokenizer.from_pretrained(folder.parent).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def test_vllm_serves_draws_as_peft_does(tmp_path, monkeypatch):
    vllm = pytest.importorskip("vllm")
    # By itself it would take half precision, in which log-probabilities differ more.
    in_float32 = partial(vllm.LLM, dtype="float32")
    monkeypatch.setattr(vllm, "LLM", in_float32)
    monkeypatch.chdir(tmp_path)
    # In this process rather than in one of its own.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    write_adapter(tmp_path, "gpt2")
    write_base(tmp_path / "base")
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    base = LlamaForCausalLM.from_pretrained("base")
    model = get_peft_model(base, lora)
    writer = fitted_text(model)
    names = run("vLLM", {"writer": writer, "base_model": "base", "prompts": PROMPTS})
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    answers_of_draws = zip(names["folders"], names["answers"], strict=True)
    for folder, answers in answers_of_draws:
        base = LlamaForCausalLM.from_pretrained("base")
        model = PeftModel.from_pretrained(base, folder)
        model.eval()
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            text = tokenizer(prompt, return_tensors="pt")
            with torch.no_grad():
                expected = model(text.input_ids).logits[0, -1].log_softmax(-1)
            for token, found in answer.outputs[0].logprobs[0].items():
                assert found.logprob == pytest.approx(expected[token].item(), abs=1e-5)
