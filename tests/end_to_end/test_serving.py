"""The guide to servers, each block run; vLLM's need an environment of its own."""

import gc
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification
from transformers import (
    AutoConfig,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from laplace_lora_cli import main
from tests.support.pages import FENCE
from tests.support.saved_adapters import NAMES, SMALL, save_adapter, write_rows

GUIDE = (Path(__file__).parents[2] / "docs/serving.md").read_text(encoding="utf-8")
SECTIONS = re.compile(r"\n##+ ")
TEXTS = ["red sky", "green grass", "sky", "red red red grass"]
TARGETS = ["q_proj", "v_proj"]


def run(section: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run the blocks of a section, one after the other."""
    (text,) = [each for each in SECTIONS.split(GUIDE) if each.startswith(section)]
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


def write_student(folder: Path, names: tuple[str, ...]) -> None:
    """Write an adapter of the same base for other classes, and its student."""
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL, pad_token_id=0, num_labels=len(names))
    base = LlamaForSequenceClassification(config)
    adapter = save_adapter(folder, base, task_type="SEQ_CLS", target_modules=TARGETS)
    train = write_rows(folder / "train.csv", 24, names)
    given = ["--adapter", str(adapter), "--train", str(train)]
    main(["calibrate", *given, "--class_names", *names])
    main(["distill", *given, "--output", str(folder / "student")])


# In half precision, by the distance of a probability's neighbours: from 1/2 to 1 that
# is 2**-8.
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 2**-8)])
def test_vllm_serves_students_of_classes_as_peft_does(here, serve_in, dtype, bound):
    serve_in(dtype, max_lora_cls_labels=3, max_loras=2)
    config = AutoConfig.from_pretrained("student/calibrated/base")
    assert config.id2label == dict(enumerate(NAMES))
    names = run("Classes", {"texts": TEXTS})
    expected = by_peft("student/calibrated", TEXTS)
    found = torch.tensor(names["probs"])
    torch.testing.assert_close(found, expected, rtol=0, atol=bound)
    # Another student in the same server and the same batches, of more classes.
    write_student(here / dtype, ("plant", "air", "water"))
    folder = f"{dtype}/student/calibrated"
    other = names["LoRARequest"]("other", 2, folder)
    both = [names["student"], other] * len(TEXTS)
    texts = [text for text in TEXTS for _ in range(2)]
    outputs = names["llm"].classify(texts, lora_request=both)
    probs = [output.outputs.probs for output in outputs]
    for one, p in ((probs[::2], expected), (probs[1::2], by_peft(folder, TEXTS))):
        torch.testing.assert_close(torch.tensor(one), p, rtol=0, atol=bound)


def test_vllm_serves_classes_of_a_base_without_a_head(here, serve_in):
    serve_in("float32", convert="classify", max_lora_cls_labels=2)
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    folder = "student/calibrated"
    classifier = LlamaForSequenceClassification.from_pretrained(f"{folder}/base")
    base = LlamaForCausalLM(LlamaConfig(**SMALL, pad_token_id=0))
    base.model.load_state_dict(classifier.model.state_dict())
    base.save_pretrained("headless")
    AutoTokenizer.from_pretrained(folder).save_pretrained("headless")
    llm = LLM("headless", runner="pooling", enable_lora=True)
    student = LoRARequest("student", 1, folder)
    outputs = llm.classify(TEXTS, lora_request=student)
    found = torch.tensor([output.outputs.probs for output in outputs])
    torch.testing.assert_close(found, by_peft(folder, TEXTS), rtol=0, atol=1e-5)


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
    names = run("Answers", {"prompts": TEXTS, "base_model": str(tmp_path / "base")})
    model = AutoPeftModelForCausalLM.from_pretrained("answers/calibrated").eval()
    tokenizer = AutoTokenizer.from_pretrained("answers/calibrated")
    for text, output in zip(TEXTS, names["outputs"], strict=True):
        with torch.no_grad():
            logits = model(**tokenizer(text, return_tensors="pt")).logits[0, -1]
        log_p = logits.log_softmax(-1)
        for token, found in output.outputs[0].logprobs[0].items():
            assert found.logprob == pytest.approx(log_p[token].item(), abs=1e-5)
