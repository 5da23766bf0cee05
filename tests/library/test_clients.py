"""The guide to other libraries, each block run with its library."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.special import entr
from torch.testing import assert_close
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.support.models import VOCABULARY, lora_model, ragged_batches
from tests.support.posteriors import fitted, generator
from tests.support.texts import drawn_models, fitted_text, text_batches
from tests.test_readme import PROMPTS, write_adapter

PAGE = Path(__file__).parents[2] / "docs/other_libraries.md"
GUIDE = PAGE.read_text(encoding="utf-8")
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def run(
    section: str,
    names: dict[str, Any],
) -> dict[str, Any]:
    """Run a section's blocks, one after the other, if its library can be imported."""
    library = section.partition(",")[0]
    pytest.importorskip(library.lower().replace("-", "_"))
    (text,) = (part for part in GUIDE.split("\n## ") if part.startswith(section))
    for code in CODE.findall(text):
        exec(compile(code, section, "exec"), names)
    return names


def test_the_ensembles_of_lm_polygraph_are_draws_and_without_any_the_trained_model(
    tmp_path,
):
    write_adapter(tmp_path, "gpt2")
    writer = fitted_text(prior_precision=20.0)
    names = run(
        "lm-polygraph",
        {
            "writer": writer,
            "model": writer.model.transformer,
            "tokenizer": AutoTokenizer.from_pretrained(tmp_path, padding_side="left"),
            "prompts": PROMPTS,
            "answers": [""] * len(PROMPTS),
        },
    )
    estimations = names["manager"].estimations
    assert len(estimations) == 5  # it drops estimators that fail
    assert {len(values) for values in estimations.values()} == {len(PROMPTS)}

    from lm_polygraph import estimators as lm
    from lm_polygraph.stat_calculators import EntropyCalculator, GreedyProbsCalculator

    stats = {}
    for calculate in (
        GreedyProbsCalculator(output_attentions=False),
        EntropyCalculator(),
        names["EnsembleScores"](writer, 0),
    ):
        stats |= calculate(stats, PROMPTS, names["polygraph_model"], 4)
    entropy = lm.MeanTokenEntropy()(stats)
    likelihood = np.exp(-lm.Perplexity()(stats))
    # Of one model there is no disagreement: all measures but these are 0.
    of_one_model = {"Ttu": entropy, "Tdu": entropy, "Stu": -likelihood}
    for measure in ("Ttu", "Tdu", "Tmi", "Trmi", "Tepkl", "Stu", "Srmi"):
        expected = of_one_model.get(measure, 0)
        for mode in ("EP", "PE"):
            found = getattr(lm, mode + measure)()(stats)
            # They are in lm-polygraph's float32.
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)

    batch, *_ = text_batches()
    text = batch["input_ids"][:1]
    tokens = torch.tensor([5, 6, 7])
    whole = torch.cat([text, tokens[None]], 1)
    places = slice(text.shape[1] - 1, -1)  # whose logits are those of the tokens
    log_p = []
    with torch.no_grad():
        for model in (writer.model.model, *drawn_models(writer, 5, generator())):
            logits = model(whole).logits[0, places]
            log_p.append(logits.log_softmax(-1))
    of_trained_model, *of_draws = log_p
    found = names["EnsembleScores"](writer, 5).measures(text, tokens, of_trained_model)
    p = torch.stack(of_draws).exp()
    # What "ep" weighs each draw by: the probability that it gave the tokens so far.
    weights = torch.ones(5, 1).double()
    totals = {"pe": [], "ep": []}
    for place, token in enumerate(tokens):
        mean = p[:, place].mean(0)
        weighted_mean = (weights * p[:, place]).sum(0) / weights.sum()
        totals["pe"].append(entr(mean).sum())
        totals["ep"].append(entr(weighted_mean).sum())
        weights = weights * p[:, place, token, None]
    for mode, of_tokens in totals.items():
        scores = found[f"{mode}_token_level_scores"]
        total = torch.stack(of_tokens).mean()
        assert_close(scores["total_uncertainty"], total[None])
        assert_close(scores["log_probas"], weights.log() / len(tokens))


def test_the_wrapper_of_torch_uncertainty_predicts_as_the_posterior_does():
    model = lora_model("bert")
    batches = ragged_batches()
    la = fitted(model=model, batches=batches, rank=10)
    la.optimize_prior_precision(method="marglik")
    inputs = la.model.inputs(batches[0])
    loader = [(la.model.inputs(batch), batch["labels"]) for batch in batches]
    names = run(
        "torch-uncertainty",
        {"model": model, "train_loader": loader, "inputs": inputs},
    )
    assert_close(names["probs"], la(inputs))


def test_vllm_serves_draws_as_peft_does(tmp_path, monkeypatch):
    vllm = pytest.importorskip("vllm")
    monkeypatch.setattr(vllm, "LLM", partial(vllm.LLM, dtype="float32"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    write_adapter(tmp_path, "gpt2")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.save_pretrained("base")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained("base")
    lora = LoraConfig(
        r=8,
        target_modules=["q_proj", "v_proj"],
        init_lora_weights=False,
    )
    base = LlamaForCausalLM.from_pretrained("base")
    writer = fitted_text(get_peft_model(base, lora))
    names = run("vLLM", {"writer": writer, "base_model": "base", "prompts": PROMPTS})
    for folder, answers in zip(names["folders"], names["answers"], strict=True):
        base = LlamaForCausalLM.from_pretrained("base")
        model = PeftModel.from_pretrained(base, folder).eval()
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            with torch.no_grad():
                expected = model(ids).logits[0, -1].log_softmax(-1)
            for token, found in answer.outputs[0].logprobs[0].items():
                assert found.logprob == pytest.approx(expected[token].item(), abs=1e-5)
