"""The tasks of free text: a language model reads a description and writes a name or a type.

The texts are real and come from installed sources: first paragraphs of docstrings, for which
the function is to be named, and descriptions of parameters.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import transformers

from benchmarks.options import Text
from benchmarks.tasks.docstrings import LIBRARIES, read_library
from benchmarks.tasks.parameters import TYPES, read_parameters

LONGEST = 14  # words of a description
IGNORED = -100  # label of a token that is no part of an answer


@dataclass(frozen=True)
class Written:
    """A prompt and the answer to it."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class WritingTask:
    """Disjoint sets of texts."""

    name: str
    train: list[Written]
    validation: list[Written]
    test: list[Written]


def functions(options: Text, seed: int) -> Iterator[Written]:
    """Name the function that a summary documents."""
    for library in LIBRARIES:
        for one in read_library(library, options, seed):
            yield Written(f"{one.summary}\nFunction:", f" {one.name}")


def parameters(options: Text, seed: int) -> Iterator[Written]:
    """Name the parameter that a description is about."""
    for one in read_parameters(options, seed):
        yield Written(f"{one.description}\nParameter:", f" {one.name}")


def types(options: Text, seed: int) -> Iterator[Written]:
    """Write the type of the parameter that a description is about, such as "int" or "callable"."""
    for one in read_parameters(options, seed):
        if one.type in TYPES:
            yield Written(f"{one.description}\nType:", f" {one.type}")


SOURCES: dict[str, Callable[[Text, int], Iterator[Written]]] = {
    "functions": functions,
    "parameters": parameters,
    "types": types,
}


def read(options: Text, seed: int) -> WritingTask:
    """Draw short descriptions, each of them once.

    Raises
    ------
    ValueError
        If there are too few.
    """
    found = {
        one.prompt.casefold(): one
        for one in SOURCES[options.task](options, seed)
        if len(one.prompt.split()) <= LONGEST
    }
    texts = list(found.values())
    random.Random(seed).shuffle(texts)
    sets = []
    for size in (options.train_examples, options.validation_examples, options.test_examples):
        if len(texts) < size:
            raise ValueError(f"{options.task} has only {len(found)} short texts; ask for fewer.")
        sets.append([texts.pop() for _ in range(size)])
    return WritingTask(options.task, *sets)


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
