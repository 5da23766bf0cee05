"""What the README says runs: blocks of Python, and command lines."""

from __future__ import annotations

import re
import shlex
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from laplace import Laplace
from transformers import Trainer, TrainingArguments

import laplace_lora_ext
from tests.support.models import (
    Batch,
    lora_model,
    ragged_batches,
)
from tests.support.pages import FENCE, PROMPTS, write_adapter
from tests.support.ranks import Texts

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = [code for _, code in FENCE.findall(README)]
ANSWERS = [0, 1, 2, 3, 0, 2]


def a_trainer(folder: Path) -> Trainer:
    """Of a few steps on twenty texts."""
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
        train_dataset=Texts(20),
    )


def for_fine_tuning(batch: Batch) -> Batch:
    """Label each real token, as collators of supervised fine-tuning do."""
    is_padding = batch["attention_mask"] == 0
    tokens = batch["input_ids"]
    labels = tokens.masked_fill(is_padding, -100)
    return batch | {"labels": labels}


def namespace(folder: Path) -> dict[str, object]:
    """Make what the examples take for granted, for three classes or more."""
    batches = ragged_batches()
    examples = list(zip(PROMPTS, ANSWERS, strict=True))
    sft = [for_fine_tuning(batch) for batch in batches]
    return {
        "train_loader": batches,
        "validation_loader": batches,
        "test_loader": batches,
        "train_examples": examples,
        "validation_examples": examples,
        "test_examples": examples,
        "trainer": a_trainer(folder),
        "sft_loader": sft,
        "sft_validation_loader": sft[:1],
        "sft_batch": sft[0],
        "batch": batches[0],
        "prompts": PROMPTS,
        "answers": ANSWERS,
    }


def test_the_examples_run_one_after_the_other(tmp_path, monkeypatch):
    # The examples read and write beside where they run, and download nothing.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    names = namespace(tmp_path) | {
        "Laplace": Laplace,
        "laplace_lora_ext": laplace_lora_ext,
    }
    for number, code in enumerate(BLOCKS):
        kind = "gpt2" if "CausalLM" in code else "bert"
        for folder in set(re.findall(r'from_pretrained\(\s*"([^"]+)"', code)):
            write_adapter(tmp_path / folder, kind)
        # Other examples have made another `la` since the one of the trainer.
        if "its trainer" in code:
            names["la"] = names["trained"]
        exec(compile(code, f"README.md, block {number}", "exec"), names)
        if "trainer" in code:
            names["trained"] = names["la"]
        probabilities = names["probs"]
        assert probabilities.ndim == 2
        sums = probabilities.sum(1)
        torch.testing.assert_close(sums, torch.ones_like(sums))
        for folder in names.get("folders", []):
            assert (folder / "adapter_model.safetensors").exists()


def test_every_file_tells_the_same_version():
    own = version("laplace-lora-ext")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"## {own} " in changes
    assert f"version: {own}\n" in citation


def code_of(page: str) -> list[str]:
    """Find a page's lines of code, indented or fenced, and its code spans."""
    # Lines that go on are one.
    page = re.sub(r"\\\n\s*", " ", page)
    code = re.findall(r"^ {4,}(.+)$", page, re.MULTILINE)
    for _, block in FENCE.findall(page):
        code += block.splitlines()
    # Without the fences, whose backticks would be taken for spans'.
    code += re.findall(r"`([^`]+)`", FENCE.sub("", page))
    return code


def command_lines() -> list[str]:
    """Find what follows `python -m benchmarks` on any page."""
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "benchmarks").rglob("*.md"),
    ]
    found = set()
    for path in pages:
        for line in code_of(path.read_text(encoding="utf-8")):
            _, command, arguments = line.partition("python -m benchmarks")
            if command:
                # Up to the next command, a comment or a redirection.
                arguments = re.split(r"&&|;|#|\||>", arguments)[0]
                found.add(" ".join(arguments.split()))
    return sorted(found)


def test_every_command_line_is_understood():
    main = pytest.importorskip("benchmarks.__main__")
    parse = main.build_parser().parse_args
    for arguments in command_lines():
        words = shlex.split(arguments)
        if "--help" in words:
            # Help is printed, and the program ends without an error.
            with pytest.raises(SystemExit, match="0"):
                parse(words)
        elif words:
            parse(words)
