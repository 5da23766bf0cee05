"""Tasks of free text: a language model reads a description, and writes."""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import transformers

from benchmarks.options import Text
from benchmarks.tasks.docstrings import LIBRARIES, read_library
from benchmarks.tasks.numpydoc import LIBRARIES as DESCRIBED
from benchmarks.tasks.numpydoc import TYPES, read_parameters
from laplace_lora_ext.models.batches import IGNORED

LONGEST = 14  # words of a description


class Written(NamedTuple):
    """A prompt and the answer to it."""

    prompt: str
    answer: str


def find(options: Text, seed: int) -> Iterator[Written]:
    """Ask for the name of what a description is of, or for its type."""
    if options.task == "functions":
        yield from find_functions(options, seed)
        return
    for parameter in read_parameters(DESCRIBED, options, seed):
        description = parameter.description
        # An answer begins with a space, as a word does to most tokenizers.
        if options.task == "parameters":
            yield Written(f"{description}\nParameter:", f" {parameter.name}")
        elif parameter.type in TYPES:
            yield Written(f"{description}\nType:", f" {parameter.type}")


def find_functions(options: Text, seed: int) -> Iterator[Written]:
    """Ask for the functions and classes that summaries describe."""
    for library in LIBRARIES:
        for one in read_library(library, options, seed):
            yield Written(f"{one.summary}\nFunction:", f" {one.name}")


def read(
    options: Text,
    seed: int,
) -> list[list[Written]]:
    """Draw short descriptions for training, validation and test, each of them once."""
    by_prompt = {}
    for one in find(options, seed):
        if len(one.prompt.split()) <= LONGEST:
            by_prompt[one.prompt.casefold()] = one
    texts = list(by_prompt.values())
    random.Random(seed).shuffle(texts)
    sizes = (
        options.train_examples,
        options.validation_examples,
        options.test_examples,
    )
    if sum(sizes) > len(texts):
        raise ValueError(
            f"{options.task} has only {len(texts)} short texts; ask for fewer."
        )
    return [[texts.pop() for _ in range(size)] for size in sizes]


def collate(tokenizer: Any, texts: list[Written]) -> Any:
    """Make a padded batch of texts, with labels on their answers."""
    records = []
    for one in texts:
        prompt = tokenizer(one.prompt)["input_ids"]
        # The two are tokenized apart, so that no token is part of both.
        answer = tokenizer(one.answer, add_special_tokens=False)["input_ids"]
        # The end is learnt too: whoever writes has to stop.
        answer = [*answer, tokenizer.eos_token_id]
        of_prompt = [IGNORED] * len(prompt)
        record = {
            "input_ids": prompt + answer,
            "labels": of_prompt + answer,
        }
        records.append(record)
    pad = transformers.DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORED)
    return pad(records)


def by_length(
    texts: list[Written],
    batch_size: int,
) -> list[list[Written]]:
    """Divide texts into batches of prompts of like lengths, to pad little."""
    ordered = sorted(texts, key=lambda one: len(one.prompt))
    starts = range(0, len(ordered), batch_size)
    return [ordered[start : start + batch_size] for start in starts]
