"""What the README says can be run: every block of Python, every command line of the benchmarks."""

from __future__ import annotations

import re
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from laplace import Laplace
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

import laplace_lora_ext
from tests.support.models import (
    base_model,
    lora_model,
    ragged_batches,
)

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCKS = [code for _, code in FENCE.findall(README)]
WORDS = [
    "[PAD]",
    "[UNK]",
    "Question",
    "Answer",
    ":",
    "which",
    "one",
    "?",
    "A",
    "B",
    "C",
    "D",
]
PROMPTS = [
    "Question : which one ? Answer :",
    "Question : ? Answer :",
    "which ? Answer :",
] * 2
ANSWERS = [0, 1, 2, 3, 0, 2]


def write_adapter(folder: Path, kind: str) -> None:
    """An adapter with its base model and, for prompts, a tokenizer, as a user has them."""
    base = folder / "base"
    base_model(kind).save_pretrained(base)
    model = lora_model(kind, torch.float32)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder)
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(folder)


def a_trainer(folder: Path) -> Trainer:
    """Of a few steps on twenty texts."""
    (batch,) = ragged_batches(lengths=(7, 4, 5, 6) * 5, batch_size=20)
    texts: Any = [{key: values[row] for key, values in batch.items()} for row in range(20)]
    arguments = TrainingArguments(
        output_dir=str(folder / "trained"),
        max_steps=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
    )
    return Trainer(
        lora_model("bert", torch.float32),
        arguments,
        train_dataset=texts,
    )


def namespace(folder: Path) -> dict[str, object]:
    """What the examples take for granted, for three classes or more."""
    batches = ragged_batches()
    examples = list(zip(PROMPTS, ANSWERS, strict=True))
    loaders = {f"{part}_loader": batches for part in ("train", "validation", "test")}
    texts = {f"{part}_examples": examples for part in ("train", "validation", "test")}
    sft = [b | {"labels": b["input_ids"].where(b["attention_mask"] == 1, -100)} for b in batches]
    return {
        **loaders,
        **texts,
        "trainer": a_trainer(folder),
        "sft_loader": sft,
        "sft_validation_loader": sft[:1],
        "sft_batch": sft[0],
        "batch": batches[0],
        "prompts": PROMPTS,
        "answers": ANSWERS,
    }


def test_the_examples_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    names = namespace(tmp_path) | {
        "Laplace": Laplace,
        "laplace_lora_ext": laplace_lora_ext,
    }
    for number, code in enumerate(BLOCKS):
        for folder in set(re.findall(r'from_pretrained\(\s*"([^"]+)"', code)):
            write_adapter(
                tmp_path / folder,
                "gpt2" if "CausalLM" in code else "bert",
            )
        names["la"] = names["trained"] if "its trainer" in code else names.get("la")
        exec(
            compile(code, f"README.md, block {number}", "exec"),
            names,
        )
        names["trained"] = names["la"] if "trainer" in code else names["trained"]
        probabilities = names["probs"]
        assert probabilities.ndim == 2
        torch.testing.assert_close(probabilities.sum(1), torch.ones(len(probabilities)))
        for folder in names.get("folders", []):
            assert (folder / "adapter_model.safetensors").exists()


def test_every_file_tells_the_same_version():
    own = version("laplace-lora-ext")
    for name, line in (
        ("CHANGELOG.md", f"## {own} "),
        ("CITATION.cff", f"version: {own}\n"),
    ):
        assert line in (ROOT / name).read_text(encoding="utf-8")


def command_lines() -> list[str]:
    """What follows `python -m benchmarks` in code spans and in indented or fenced lines."""
    found = []
    pages = sorted(path for path in (ROOT / "benchmarks").rglob("*.md"))
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *pages,
    ):
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"\\\n\s*", " ", text)  # a line that goes on
        code = re.findall(r"^ {4,}(.+)$", text, re.MULTILINE)
        code += [line for _, block in FENCE.findall(text) for line in block.splitlines()]
        code += re.findall(r"`([^`]+)`", FENCE.sub("", text))
        for line in code:
            _, command, arguments = line.partition("python -m benchmarks")
            if command:
                arguments = re.split(r"&&|;|#|\||>", arguments)[0]
                found.append(" ".join(arguments.split()))
    return sorted(set(found))


@pytest.mark.parametrize("arguments", command_lines())
def test_every_command_line_is_understood(arguments):
    main = pytest.importorskip("benchmarks.__main__")
    parse = main.build_parser().parse_args
    if "--help" in arguments:
        with pytest.raises(SystemExit, match="0"):
            parse(shlex.split(arguments))
    elif arguments:
        parse(shlex.split(arguments))
