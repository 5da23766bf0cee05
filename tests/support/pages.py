"""Code of pages, and what it reads: an adapter, its tokenizer, and prompts."""

import re
from pathlib import Path
from typing import Any

import torch
import transformers

import laplace_lora_ext
from tests.support.models import base_model, lora_model
from tests.support.saved_adapters import tokenizer

DOCS = Path(__file__).parents[2] / "docs"
# What guides take for granted.
GIVEN: dict[str, Any] = {
    "laplace_lora_ext": laplace_lora_ext,
    "torch": torch,
    "transformers": transformers,
}
FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Those of the prompts and of their answers.
_WORDS = "[PAD] [UNK] Question Answer : which one ? A B C D"
WORDS = _WORDS.split()
PROMPTS = [
    "Question : which one ? Answer :",
    "Question : ? Answer :",
    "which ? Answer :",
] * 2


def blocks_of(page: str, title: str = "") -> list[str]:
    """Find a guide's blocks of code, or those of a section, by how its title begins."""
    _, found, text = (DOCS / page).read_text("utf-8").partition(f"## {title}")
    assert found
    if title:
        text, *_ = re.split("\n##+ ", text)
    return [code for _, code in FENCE.findall(text)]


def run_section(page: str, title: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run the blocks of a section, one after the other."""
    for code in blocks_of(page, title):
        run(code, names, title)
    return names


def run(code: str, names: dict[str, Any], place: str) -> None:
    """Run a page's block, with its place in what an error says."""
    exec(compile(code, place, "exec"), names)


def assert_probabilities(p: torch.Tensor) -> None:
    """Check that the last dimension adds up to one."""
    sums = p.sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums))


def write_adapter(folder: Path, kind: str) -> None:
    """Write an adapter with base model and, for prompts, a tokenizer."""
    base = folder / "base"
    base_model(kind).save_pretrained(base)
    model = lora_model(kind, torch.float32)
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder)
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of the prompts' words."""
    settings = {"model_input_names": ["input_ids", "attention_mask"]}
    tokenizer(WORDS, padding_side="right", **settings).save_pretrained(folder)
