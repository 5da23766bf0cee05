"""The guide to servers, each block run; vLLM's need an environment of its own."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    AutoPeftModelForCausalLM,
    AutoPeftModelForSequenceClassification,
)
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from laplace_lora_cli.main import main
from tests.support.pages import FENCE
from tests.support.saved_adapters import NAMES, SMALL, save_adapter, write_rows

GUIDE = (Path(__file__).parents[2] / "docs/serving.md").read_text(encoding="utf-8")
TEXTS = ["red sky", "green grass", "sky", "red red red grass"]
TARGETS = ["q_proj", "v_proj"]


def run(section: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run the blocks of a section, one after the other."""
    (text,) = [each for each in GUIDE.split("\n## ") if each.startswith(section)]
    for _, code in FENCE.findall(text):
        exec(compile(code, section, "exec"), names)
    return names


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder in which the guide's two commands have run."""
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
    before = Path.cwd()
    os.chdir(folder)
    try:
        for line in GUIDE.splitlines():
            _, command, given = line.partition("    laplace-lora ")
            if command:
                names = ["--class_names", *NAMES] if "calibrate" in given else []
                main([*given.split(), *names])
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def here(folder, monkeypatch) -> Path:
    """That folder, as the present one."""
    monkeypatch.chdir(folder)
    return folder


def by_peft(folder: str, texts: list[str]) -> torch.Tensor:
    """Compute probabilities of classes, text by text."""
    model = AutoPeftModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = [model(**tokenizer(x, return_tensors="pt")).logits[0] for x in texts]
    return torch.stack(logits).softmax(-1)


def test_a_pipeline_and_peft_open_a_student(here):
    names = run("pipeline", {"texts": TEXTS, "names": NAMES})
    expected = by_peft("student/calibrated", TEXTS)
    for answer, p in zip(names["answers"], expected, strict=True):
        found = {row["label"]: row["score"] for row in answer}
        assert [found[name] for name in NAMES] == pytest.approx(p.tolist(), abs=1e-5)
    assert names["answers"][0][0]["label"] == "plant"


def test_an_endpoint_tells_its_doubt(here):
    pytest.importorskip("fastapi")
    answers = run("FastAPI", {})["classify"](TEXTS)
    assert [answer["label"] for answer in answers] == ["plant", "air", "plant", "air"]
    for answer in answers:
        assert sum(answer["probabilities"]) == pytest.approx(1)
        assert answer["doubt"] >= 0


def test_vllm_serves_students_as_peft_does(here, monkeypatch):
    vllm = pytest.importorskip("vllm")
    # By itself it would take half precision.
    monkeypatch.setattr(vllm, "LLM", partial(vllm.LLM, dtype="float32"))
    # In this process rather than in one of its own.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    base = LlamaForCausalLM(LlamaConfig(**SMALL, pad_token_id=0))
    answers = here / "of_answers"
    adapter = save_adapter(
        answers, base, ("A", "B"), task_type="CAUSAL_LM", target_modules=TARGETS
    )
    train = write_rows(answers / "train.csv", 24, ("A", "B"))
    given = ["--adapter", str(adapter), "--train", str(train)]
    main(["calibrate", *given, "--answers", "A", "B"])
    main(["distill", *given, "--output", "answers"])

    given = {"texts": TEXTS, "prompts": TEXTS, "base_model": str(answers / "base")}
    names = run("vLLM", given)
    expected = by_peft("student/calibrated", TEXTS)
    torch.testing.assert_close(
        torch.tensor(names["probs"]), expected, rtol=0, atol=1e-5
    )
    model = AutoPeftModelForCausalLM.from_pretrained("answers/calibrated").eval()
    tokenizer = AutoTokenizer.from_pretrained("answers/calibrated")
    for text, output in zip(TEXTS, names["outputs"], strict=True):
        with torch.no_grad():
            logits = model(**tokenizer(text, return_tensors="pt")).logits[0, -1]
        log_p = logits.log_softmax(-1)
        for token, found in output.outputs[0].logprobs[0].items():
            assert found.logprob == pytest.approx(log_p[token].item(), abs=1e-5)
