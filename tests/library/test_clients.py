"""The guide to other libraries, each of its blocks run with the library that it is about."""

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

GUIDE = (Path(__file__).parents[2] / "docs/other_libraries.md").read_text(encoding="utf-8")


def run(section: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run a section's blocks, one after the other, if its library can be imported."""
    pytest.importorskip(section.partition(",")[0].lower().replace("-", "_"))
    (text,) = (part for part in GUIDE.split("\n## ") if part.startswith(section))
    for code in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        exec(compile(code, section, "exec"), names)
    return names


def test_the_ensembles_of_lm_polygraph_are_draws_and_without_any_the_trained_model(tmp_path):
    write_adapter(tmp_path, "gpt2")
    writer = fitted_text(prior_precision=20.0)
    names = {"writer": writer, "model": writer.model.transformer}
    names["tokenizer"] = AutoTokenizer.from_pretrained(tmp_path, padding_side="left")
    names = run("lm-polygraph", names | {"prompts": PROMPTS, "answers": [""] * len(PROMPTS)})
    assert {len(found) for found in names["manager"].estimations.values()} == {len(PROMPTS)}
    assert len(names["manager"].estimations) == 5  # it drops estimators that fail

    from lm_polygraph import estimators as lm
    from lm_polygraph.stat_calculators import EntropyCalculator, GreedyProbsCalculator

    read = PROMPTS, names["polygraph_model"], 4
    stats = GreedyProbsCalculator(output_attentions=False)({}, *read)
    stats |= EntropyCalculator()(stats, *read) | names["EnsembleScores"](writer, 0)(stats, *read)
    entropy = lm.MeanTokenEntropy()(stats)
    likelihood = np.exp(-lm.Perplexity()(stats))
    wanted = {"Ttu": entropy, "Tdu": entropy, "Stu": -likelihood}
    for measure in ("Ttu", "Tdu", "Tmi", "Trmi", "Tepkl", "Stu", "Srmi"):
        for mode in ("EP", "PE"):  # in lm-polygraph's float32
            found = getattr(lm, mode + measure)()(stats)
            np.testing.assert_allclose(found, wanted.get(measure, 0), rtol=1e-6, atol=1e-6)

    text = text_batches()[0]["input_ids"][:1]
    tokens = torch.tensor([5, 6, 7])
    whole = torch.cat([text, tokens[None]], 1)
    of_models = [writer.model.model, *drawn_models(writer, 5, generator())]
    with torch.no_grad():
        logits = torch.stack([m(whole).logits[0, text.shape[1] - 1 : -1] for m in of_models])
    own, *draws = logits.log_softmax(-1)
    found = names["EnsembleScores"](writer, 5).measures(text, tokens, own)
    p = torch.stack(draws).exp()
    weights = torch.ones(5, 1).double()
    totals = {"pe": [], "ep": []}
    for place, token in enumerate(tokens):
        totals["pe"].append(entr(p[:, place].mean(0)).sum())
        totals["ep"].append(entr((weights * p[:, place]).sum(0) / weights.sum()).sum())
        weights = weights * p[:, place, token, None]
    for mode, total in totals.items():
        scores = found[f"{mode}_token_level_scores"]
        assert_close(scores["total_uncertainty"], torch.stack(total).mean()[None])
        assert_close(scores["log_probas"], weights.log() / 3)


def test_the_wrapper_of_torch_uncertainty_predicts_as_the_posterior_does():
    model = lora_model("bert")
    batches = ragged_batches()
    la = fitted(model=model, batches=batches, rank=10)
    la.optimize_prior_precision(method="marglik")
    inputs = la.model.inputs(batches[0])
    loader = [(la.model.inputs(batch), batch["labels"]) for batch in batches]
    found = run("torch-uncertainty", {"model": model, "train_loader": loader, "inputs": inputs})
    assert_close(found["probs"], la(inputs))


def test_vllm_serves_draws_as_peft_does(tmp_path, monkeypatch):
    vllm = pytest.importorskip("vllm")
    monkeypatch.setattr(vllm, "LLM", partial(vllm.LLM, dtype="float32"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    write_adapter(tmp_path, "gpt2")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.save_pretrained("base")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=2, **sizes)
    LlamaForCausalLM(config).save_pretrained("base")
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    writer = fitted_text(get_peft_model(LlamaForCausalLM.from_pretrained("base"), lora))
    names = run("vLLM", {"writer": writer, "base_model": "base", "prompts": PROMPTS})
    for folder, answers in zip(names["folders"], names["answers"], strict=True):
        model = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained("base"), folder).eval()
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            with torch.no_grad():
                expected = model(ids).logits[0, -1].log_softmax(-1)
            for token, found in answer.outputs[0].logprobs[0].items():
                assert found.logprob == pytest.approx(expected[token].item(), abs=1e-5)
