"""The language model of the task choices: what it reads, and what it has to say where."""

import random
import re

import pytest
import torch

from benchmarks.tasks.language_model import (
    next_tokens,
    random_examples,
    train_tokenizer,
    verdicts_and_answers,
)
from benchmarks.tasks.paper_prompts import LETTERS, four_choices
from tests.benchmarks.support import pool


def test_it_reads_repeated_summaries_and_questions_by_turns():
    twice, of_name, of_summary = (
        random_examples(step, [pool()], 5, random.Random(0)) for step in range(3)
    )
    for text, label in twice:
        assert text[: len(text) // 2] == text[len(text) // 2 + 1 :]
        assert label is None
    for kind, examples in (("name", of_name), ("summary", of_summary)):
        for text, label in examples:
            number = re.search(rf"describe\? {kind} (\d+)", text).group(1)
            offered = dict(re.findall(r"([A-D])\. (name \d+)\.", text))
            assert offered[LETTERS[label]] == f"name {number}"


def test_it_learns_verdicts_and_answers_at_their_places():
    tokenizer = train_tokenizer([pool()], 300)
    prompts = [four_choices("which?", ["one", "two words", "three", "four"], n) for n in (2, 0)]
    encoded = tokenizer([text for text, _ in prompts], padding=True, return_tensors="pt")
    verdicts, answers = verdicts_and_answers(encoded["input_ids"], [2, 0], tokenizer)
    no, yes = (tokenizer(word)["input_ids"][0] for word in ("no", "yes"))
    assert no != yes
    assert verdicts.tokens.tolist() == [no, no, yes, no, yes, no, no, no]
    assert tokenizer.convert_ids_to_tokens(answers.tokens) == ["C", "A"]
    following = encoded["input_ids"].roll(-1, dims=1)[verdicts.where]
    assert tokenizer.convert_ids_to_tokens(following) == ["B", "C", "D", "Answer:"] * 2
    at = encoded["input_ids"][answers.where]
    assert tokenizer.convert_ids_to_tokens(at) == ["Answer:"] * 2


@pytest.mark.parametrize("padding", [0, 9])
def test_a_repeated_summary_is_predicted_token_by_token(padding):
    ids, mask = torch.tensor([[5, 6, 7], [8, 9, padding]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    where, tokens = next_tokens(ids, mask)
    assert where.tolist() == [[True, True, False], [True, False, False]]
    assert tokens.tolist() == [6, 7, 9]
