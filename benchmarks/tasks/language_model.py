"""A small language model in the shape of Llama, trained on docstrings of installed sources.

Its texts teach it to find again what it has read: summaries that are repeated, and questions that
ask which of four names fits a summary, or repeat one of the names. After each of the four names it
has to say whether this is the one, because so small a model learns too slowly from answers alone.
It never sees the functions that the task asks about.
"""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch
import transformers
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.data import DataLoader

from benchmarks.options import TextRun
from benchmarks.tasks.docstrings import LIBRARIES
from benchmarks.tasks.named import (
    QUESTION,
    Named,
    answerable,
    asked_for_choice,
    is_held_out,
    read_named,
)
from benchmarks.tasks.paper_prompts import LETTERS, SELECT
from benchmarks.tasks.task import Example
from benchmarks.training import Hyperparameters, train

ANSWER = "Answer:"
PADDING, UNKNOWN = "<pad>", "<unk>"
VERDICTS = "no", "yes"
ENCODING: Any = {"padding": True, "truncation": True, "return_tensors": "pt"}
ENCODING["return_token_type_ids"] = False
VOCABULARY, HIDDEN_SIZE, LAYERS, HEADS = 2000, 64, 3, 4
TRAINING = Hyperparameters(
    "docstring language model", (), 64, 128, learning_rate=4e-3, steps=3000, checkpoints=0
)


def language_model(options: TextRun) -> Path:
    """Find the language model in the cache, or train it and store it there."""
    steps, files = options.language_model_steps or TRAINING.steps, options.files_per_library
    settings = replace(TRAINING, steps=steps, warmup_steps=steps // 50)
    known = json.dumps([asdict(settings), VOCABULARY, HIDDEN_SIZE, LAYERS, HEADS, files])
    digest = hashlib.sha256(known.encode()).hexdigest()[:16]
    folder = options.cache / f"docstring-language-model-{digest}"
    if not (folder / "config.json").exists():
        named = (read_named(library, options, 0) for library in LIBRARIES)
        pools = [[one for one in answerable(pool) if not is_held_out(one)] for pool in named]
        tokenizer = train_tokenizer(pools, VOCABULARY)
        model = train_language_model(settings, pools, tokenizer, not options.quiet)
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    return folder


def train_tokenizer(pools: Sequence[Sequence[Named]], vocabulary: int) -> Any:
    """Train a byte-pair encoding of lower-case words; each fixed part of a prompt is one token."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=UNKNOWN))
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens([PADDING, UNKNOWN])
    for part in (SELECT, QUESTION, "Choices:", ANSWER, *LETTERS):
        single = part in LETTERS
        tokenizer.add_tokens([tokenizers.AddedToken(part, single_word=single, normalized=False)])
    texts = (text for pool in pools for one in pool for text in (one.name, one.summary))
    special = {"special_tokens": [PADDING, UNKNOWN], "show_progress": False}
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocabulary, **special)
    tokenizer.train_from_iterator(texts, trainer)
    special = {"pad_token": PADDING, "unk_token": UNKNOWN}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def train_language_model(
    settings: Hyperparameters, pools: Sequence[Sequence[Named]], tokenizer: Any, show_progress: bool
) -> transformers.LlamaForCausalLM:
    """Train the language model, and leave it in evaluation mode."""
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=5 * HIDDEN_SIZE // 2,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=settings.maximum_length,
        # With the default of 0.02, for wide models, a narrow one starts with even attention.
        initializer_range=HIDDEN_SIZE**-0.5,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = transformers.LlamaForCausalLM(config)
    tokenizer.truncation_side = "left"  # a long question keeps its list

    def collate(examples: list[Example]) -> tuple[Any, list[Targets]]:
        texts = [example.text for example in examples]
        encoded = tokenizer(texts, max_length=settings.maximum_length, **ENCODING)
        labels = [example.label for example in examples if example.label is not None]
        if labels:
            return encoded, verdicts_and_answers(encoded["input_ids"], labels, tokenizer)
        return encoded, [next_tokens(encoded["input_ids"], encoded["attention_mask"])]

    def loss_of(batch: tuple[Any, list[Targets]]) -> torch.Tensor:
        encoded, parts = batch
        hidden = model.model(**encoded).last_hidden_state
        # Each part counts alike, whatever its number of tokens.
        losses = [cross_entropy(model.lm_head(hidden[part.where]), part.tokens) for part in parts]
        return torch.stack(losses).sum()

    rng = random.Random(0)
    steps = range(settings.steps)
    batches: Any = [random_examples(step, pools, settings.batch_size, rng) for step in steps]
    loader = DataLoader(batches, batch_size=None, collate_fn=collate)
    train(model, loader, loss_of, settings, show_progress, maximum_gradient_norm=1.0)
    return model


class Targets(NamedTuple):
    """Positions in a batch, `(texts, length)` booleans, and the token to predict at each."""

    where: torch.Tensor
    tokens: torch.Tensor


def next_tokens(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Targets:
    """At each position, the next token."""
    where = torch.zeros_like(attention_mask, dtype=torch.bool)
    where[:, :-1] = attention_mask[:, 1:].bool()
    return Targets(where, input_ids[:, 1:][where[:, :-1]])


def verdicts_and_answers(
    input_ids: torch.Tensor, labels: Sequence[int], tokenizer: Any
) -> list[Targets]:
    """After each choice, whether it is right; after the whole prompt, the right letter."""
    letters = torch.tensor(tokenizer.convert_tokens_to_ids(list(LETTERS)))
    verdicts = torch.tensor([tokenizer(word)["input_ids"][0] for word in VERDICTS])
    answers = input_ids == tokenizer.convert_tokens_to_ids(ANSWER)
    ends = torch.zeros_like(answers)
    ends[:, :-1] = (torch.isin(input_ids, letters[1:]) | answers)[:, 1:]
    right = one_hot(torch.tensor(labels), len(LETTERS)).flatten()
    return [Targets(ends, verdicts[right]), Targets(answers, letters[torch.tensor(labels)])]


def random_examples(
    step: int, pools: Sequence[Sequence[Named]], count: int, rng: random.Random
) -> list[Example]:
    """Write texts of three kinds in turn: summaries said twice, questions by name, by summary."""
    pools = [pool for pool in pools if len({one.name for one in pool}) >= len(LETTERS)]
    examples = []
    for _ in range(count):
        (pool,) = rng.choices(pools, [len(pool) for pool in pools])
        one = rng.choice(pool)
        if step % 3 == 0:
            summary = one.summary.lower()
            examples.append(Example(f"{summary} {summary}", None))
        else:
            subject = one._replace(summary=one.name) if step % 3 == 1 else one
            examples.extend(asked_for_choice([subject], pool, rng))
    return examples
