"""The tasks of free text: a language model reads a description, and writes a name or a type."""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import transformers

from benchmarks.options import Text
from benchmarks.tasks.docstrings import LIBRARIES, read_library
from benchmarks.tasks.numpydoc import TYPES, read_parameters
from laplace_lora_ext.likelihoods import IGNORED

LONGEST = 14  # words of a description


class Written(NamedTuple):
    """A prompt and the answer to it."""

    prompt: str
    answer: str


def find(options: Text, seed: int) -> Iterator[Written]:
    """Ask for the function or parameter of a description, or for a type such as "callable"."""
    if options.task == "functions":
        for library in LIBRARIES:
            for one in read_library(library, options, seed):
                yield Written(f"{one.summary}\nFunction:", f" {one.name}")
        return
    for one in read_parameters(options, seed):
        if options.task == "parameters":
            yield Written(f"{one.description}\nParameter:", f" {one.name}")
        elif one.type in TYPES:
            yield Written(f"{one.description}\nType:", f" {one.type}")


def read(options: Text, seed: int) -> list[list[Written]]:
    """Draw short descriptions for training, validation and test, each of them once."""
    short = (one for one in find(options, seed) if len(one.prompt.split()) <= LONGEST)
    texts = list({one.prompt.casefold(): one for one in short}.values())
    random.Random(seed).shuffle(texts)
    sizes = (options.train_examples, options.validation_examples, options.test_examples)
    if sum(sizes) > len(texts):
        raise ValueError(f"{options.task} has only {len(texts)} short texts; ask for fewer.")
    return [[texts.pop() for _ in range(size)] for size in sizes]


def collate(tokenizer: Any, texts: list[Written]) -> Any:
    """A batch of texts, padded on the left, with labels on their answers."""
    records = []
    for one in texts:
        prompt = tokenizer(one.prompt)["input_ids"]
        answer = tokenizer(one.answer, add_special_tokens=False)["input_ids"]
        answer = [*answer, tokenizer.eos_token_id]
        labels = [IGNORED] * len(prompt) + answer
        records.append({"input_ids": prompt + answer, "labels": labels})
    return transformers.DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORED)(records)


def by_length(texts: list[Written], batch_size: int) -> list[list[Written]]:
    """Texts in batches, ordered by the length of their prompts."""
    ordered = sorted(texts, key=lambda one: len(one.prompt))
    return [ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size)]
