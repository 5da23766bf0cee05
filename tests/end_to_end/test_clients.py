"""The guides to other libraries and to servers, each block run with its library.

vLLM's need an environment of its own.
"""

import gc
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import (
    AutoPeftModelForCausalLM,
    AutoPeftModelForSequenceClassification,
    LoraConfig,
    PeftModel,
    get_peft_model,
)
from torch import Tensor, nn
from torch.special import entr
from torch.testing import assert_close
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from laplace_lora_cli import main
from tests.support.models import VOCABULARY, lora_model, ragged_batches, without_labels
from tests.support.pages import DOCS, PROMPTS, run_section, write_adapter
from tests.support.posteriors import fitted, generator
from tests.support.saved_adapters import NAMES, SMALL, save_adapter, write_rows
from tests.support.texts import drawn_models, fitted_text, text_batches

SERVING = "serving.md"
LIBRARIES = "other_libraries.md"


# --- lm-polygraph ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def polygraph(tmp_path_factory) -> SimpleNamespace:
    """Run the guide's blocks on a small model."""
    pytest.importorskip("lm_polygraph")
    folder = tmp_path_factory.mktemp("adapter")
    write_adapter(folder, "gpt2")
    writer = fitted_text(prior_precision=20.0)
    given = {
        "writer": writer,
        "model": writer.model.transformer,
        "tokenizer": AutoTokenizer.from_pretrained(folder, padding_side="left"),
        "prompts": PROMPTS,
        "answers": [""] * len(PROMPTS),
    }
    return SimpleNamespace(**run_section(LIBRARIES, "lm-polygraph", given))


def test_lm_polygraph_has_a_number_for_each_prompt(polygraph):
    estimations = polygraph.manager.estimations
    # It drops estimators that fail.
    assert len(estimations) == 5
    for values in estimations.values():
        assert len(values) == len(PROMPTS)


def test_without_any_draws_the_ensemble_of_lm_polygraph_is_the_trained_model(polygraph):
    from lm_polygraph import estimators as lm
    from lm_polygraph.stat_calculators import EntropyCalculator, GreedyProbsCalculator

    calculators = [
        GreedyProbsCalculator(output_attentions=False),
        EntropyCalculator(),
        polygraph.EnsembleScores(polygraph.writer, 0),
    ]
    stats = {}
    for calculate in calculators:
        stats |= calculate(stats, PROMPTS, polygraph.polygraph_model, 4)

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
    expected |= dict.fromkeys(["Tmi", "Trmi", "Tepkl", "Srmi"], 0)
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
    scores = polygraph.EnsembleScores(writer, 5)
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
    pytest.importorskip("torch_uncertainty")
    model = lora_model("bert")
    batches = ragged_batches()
    la = fitted(model=model, batches=batches, rank=10)
    la.optimize_prior_precision(method="marglik")
    # Its data are pairs of inputs and labels.
    loader = [(without_labels(batch), batch["labels"]) for batch in batches]
    inputs, _ = loader[0]
    given = {"model": model, "train_loader": loader, "inputs": inputs}
    names = run_section(LIBRARIES, "torch-uncertainty", given)
    assert_close(names["probs"], la(inputs, link_approx="mean_field"))


def test_mapie_finds_a_limit_from_which_on_answers_are_right():
    pytest.importorskip("mapie")
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
    is_decided = run_section(LIBRARIES, "MAPIE", given)["is_decided"]
    is_right = test.argmax(1) == labels[2000:]
    assert is_right.mean() < 0.9
    assert is_right[is_decided].mean() > 0.95
    assert is_decided.mean() > 0.3


# --- servers --------------------------------------------------------------------------

TEXTS = ["red sky", "green grass", "sky", "red red red grass"]
TARGETS = ["q_proj", "v_proj"]


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Iterator[None]:
    """Works in a folder in which the guide's two commands have run."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("serving")
    config = LlamaConfig(**SMALL, pad_token_id=0)
    adapter = save_adapter(
        folder,
        LlamaForSequenceClassification(config),
        task_type="SEQ_CLS",
        target_modules=TARGETS,
    )
    adapter.rename(folder / "out")
    write_rows(folder / "train.csv", 24)
    write_rows(folder / "held_out.csv", 40, n_wrong=6)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for line in (DOCS / SERVING).read_text("utf-8").splitlines():
            _, command, given = line.partition("    laplace-lora ")
            if command:
                names = ["--class_names", *NAMES] if "calibrate" in given else []
                main([*given.split(), *names])
        yield


def by_peft(folder: str, texts: list[str]) -> torch.Tensor:
    """Compute probabilities of classes, text by text."""
    model = AutoPeftModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = [model(**tokenizer(x, return_tensors="pt")).logits[0] for x in texts]
    return torch.stack(logits).softmax(-1)


def test_a_pipeline_and_peft_open_a_student(here):
    names = run_section(SERVING, "pipeline", {"texts": TEXTS, "names": NAMES})
    expected = by_peft("student/calibrated", TEXTS)
    for answer, p in zip(names["answers"], expected, strict=True):
        found = {row["label"]: row["score"] for row in answer}
        assert [found[name] for name in NAMES] == pytest.approx(p.tolist(), abs=1e-5)
    assert names["answers"][0][0]["label"] == "plant"


def test_an_endpoint_tells_its_doubt(here):
    pytest.importorskip("fastapi")
    answers = run_section(SERVING, "FastAPI", {})["classify"](TEXTS)
    assert [answer["label"] for answer in answers] == ["plant", "air", "plant", "air"]
    for answer in answers:
        assert sum(answer["probabilities"]) == pytest.approx(1)
        assert answer["doubt"] >= 0


@pytest.fixture
def serve_in(monkeypatch) -> Callable[..., None]:
    """Lets vLLM run in this process, with a precision and other options."""
    vllm = pytest.importorskip("vllm")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    gc.collect()  # the engine of another test

    def set_options(dtype: str, **options: Any) -> None:
        given = partial(vllm.LLM, dtype=dtype, **options)
        monkeypatch.setattr(vllm, "LLM", given)

    return set_options


# In half precision, by the distance of a probability's neighbours: from 1/2 to 1 that
# is 2**-8.
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 2**-8)])
def test_vllm_serves_students_of_classes_as_peft_does(here, serve_in, dtype, bound):
    serve_in(dtype, max_lora_cls_labels=2)
    names = run_section(SERVING, "Classes", {"texts": TEXTS})
    expected = by_peft("student/calibrated", TEXTS)
    found = torch.tensor(names["probs"])
    assert_close(found, expected, rtol=0, atol=bound)


def test_vllm_serves_students_of_answers_as_peft_does(tmp_path, serve_in, monkeypatch):
    serve_in("float32")
    monkeypatch.chdir(tmp_path)
    base = LlamaForCausalLM(LlamaConfig(**SMALL, pad_token_id=0))
    adapter = save_adapter(
        tmp_path, base, ("A", "B"), task_type="CAUSAL_LM", target_modules=TARGETS
    )
    train = write_rows(tmp_path / "train.csv", 24, ("A", "B"))
    given = ["--adapter", str(adapter), "--train", str(train)]
    main(["calibrate", *given, "--answers", "A", "B"])
    main(["distill", *given, "--output", "answers"])
    names = run_section(
        SERVING, "Answers", {"prompts": TEXTS, "base_model": str(tmp_path / "base")}
    )
    model = AutoPeftModelForCausalLM.from_pretrained("answers/calibrated").eval()
    assert_as_by_peft(names["outputs"], model, "answers/calibrated", TEXTS)


def assert_as_by_peft(
    outputs: list[Any], model: nn.Module, tokenizer: str, prompts: list[str]
) -> None:
    """Compare log-probabilities of the next token."""
    tokenize = partial(AutoTokenizer.from_pretrained(tokenizer), return_tensors="pt")
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            log_p = model(**tokenize(prompt)).logits[0, -1].log_softmax(-1)
        for token, found in output.outputs[0].logprobs[0].items():
            assert found.logprob == pytest.approx(log_p[token].item(), abs=1e-5)


def test_vllm_serves_draws_as_peft_does(tmp_path, serve_in, monkeypatch):
    # By itself it would take half precision, in which log-probabilities differ more.
    serve_in("float32")
    monkeypatch.chdir(tmp_path)
    write_adapter(tmp_path, "gpt2")
    AutoTokenizer.from_pretrained(tmp_path).save_pretrained("base")
    config = LlamaConfig(**SMALL | {"vocab_size": VOCABULARY})
    LlamaForCausalLM(config).save_pretrained("base")
    lora = LoraConfig(r=8, target_modules=TARGETS, init_lora_weights=False)
    base = LlamaForCausalLM.from_pretrained("base")
    writer = fitted_text(get_peft_model(base, lora))
    given = {"writer": writer, "base_model": "base", "prompts": PROMPTS}
    names = run_section(LIBRARIES, "vLLM", given)
    for folder, answers in zip(names["folders"], names["answers"], strict=True):
        base = LlamaForCausalLM.from_pretrained("base")
        model = PeftModel.from_pretrained(base, folder).eval()
        assert_as_by_peft(answers, model, "base", PROMPTS)
