"""Prompts and pairs from rows of the paper's data sets.

The prompts follow the paper's table of templates (appendix "Prompt templates for LlaMA2
common sense reasoning tasks"). Where the table prints "choice2" for the third and
fourth choices, we take these. WinoGrande's "B" has no full stop in the table or in the
authors' program, and so has none here. We leave out the template's full stop after a
text that ends with one.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks.tasks.task import Example

Row = dict[str, Any]

LETTERS = ("A", "B", "C", "D")
SELECT = "Select one of the choices that answers the following question:"
TRUE_OR_FALSE = "Answer the question with only True or False:"


def with_full_stop(text: str) -> str:
    """End a text with one full stop."""
    return text if text.endswith(".") else f"{text}."


def winogrande(row: Row) -> Example:
    """Ask which of two options fills the gap."""
    sentence = row["sentence"]
    first = with_full_stop(row["option1"])
    second = with_full_stop(row["option2"])
    # As it is: a full stop after "B" would be another prompt than the authors'.
    prompt = f"{SELECT} {sentence} Choices: A. {first} B {second} Answer:"
    label = ("1", "2").index(row["answer"])
    return Example(prompt, label)


def four_choices(question: str, choices: Sequence[str], label: int) -> Example | None:
    """Ask which of four choices is right; None if there aren't four."""
    # A few questions of ARC have three or five, for which there is no letter's class.
    if len(choices) != len(LETTERS):
        return None
    lettered = []
    for letter, choice in zip(LETTERS, choices, strict=True):
        lettered.append(f"{letter}. {with_full_stop(choice)}")
    listed = " ".join(lettered)
    prompt = f"{SELECT} {question} Choices: {listed} Answer:"
    return Example(prompt, label)


def arc(row: Row) -> Example | None:
    """Ask a question of ARC, which labels its choices by letters or digits."""
    choices = row["choices"]
    label = choices["label"].index(row["answerKey"])
    return four_choices(row["question"], choices["text"], label)


def openbookqa(row: Row) -> Example | None:
    """Ask a question of OpenBookQA, whose rows are like ARC's."""
    question = row["question_stem"]
    return arc({**row, "question": question})


def boolq_label(row: Row) -> int:
    """Read BoolQ's answer, whose field has two names."""
    # SuperGLUE's copy calls it "label", and the original data "answer".
    if "label" in row:
        return int(row["label"])
    return int(row["answer"])


def boolq(row: Row) -> Example:
    """Ask whether something is true according to a passage."""
    question = row["question"]
    passage = with_full_stop(row["passage"])
    # Without "Answer:", which the template has for choices only.
    prompt = f"{TRUE_OR_FALSE} {question} Context: {passage}"
    return Example(prompt, boolq_label(row))


def boolq_pair(row: Row) -> Example:
    """Pair a passage with a question about it, for an encoder."""
    pair = (row["passage"], row["question"])
    return Example(pair, boolq_label(row))


def sentence(row: Row) -> Example:
    """Take the one sentence of CoLA, for an encoder."""
    return Example(row["sentence"], int(row["label"]))


def sentence_pair(row: Row) -> Example:
    """Pair the sentences of MRPC, RTE, WNLI or WiC (without its word)."""
    pair = (row["sentence1"], row["sentence2"])
    return Example(pair, int(row["label"]))
