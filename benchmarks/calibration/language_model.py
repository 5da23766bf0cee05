"""A small Llama-shaped language model, trained from scratch on the installed sources' docstrings.

No pretrained causal language model comes as a package, so the benchmark makes its own. Its texts
teach it to find again what it has read: summaries that are said twice, and lists of names with
questions, which one is this, and which does this summary describe? The functions and classes of the
benchmark's own task are kept out of them.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from benchmarks.calibration.docstring_tasks import (
    QUESTION,
    Named,
    answerable,
    asked_for_choice,
    is_held_out,
    read_named,
)
from benchmarks.calibration.paper_prompts import LETTERS, SELECT, listed
from benchmarks.docstrings import LIBRARIES
from benchmarks.training import train

ANSWER = "Answer:"
PADDING, UNKNOWN = "<pad>", "<unk>"
MAXIMUM_LENGTH = 128
IGNORED = -100  # label of a position without a loss


@dataclass(frozen=True)
class LanguageModelSettings:
    """Shape and training of the language model.

    Attributes
    ----------
    vocabulary, hidden_size, layers, heads : int
        Its shape.
    steps, batch_size, learning_rate : int, int, float
        Its training.
    files_per_library : int, optional
        Number of source files of a library above which some are left out.
    """

    vocabulary: int = 2000
    hidden_size: int = 64
    layers: int = 3
    heads: int = 4
    steps: int = 12_000
    batch_size: int = 32
    learning_rate: float = 4e-3
    files_per_library: int | None = None


def language_model_folder(
    settings: LanguageModelSettings, cache: Path, show_progress: bool
) -> Path:
    """Find the language model in the cache, or train it and put it there.

    Parameters
    ----------
    settings : LanguageModelSettings
        Shape and training, on which the name of the folder depends.
    cache : Path
        Folder of trained models.
    show_progress : bool
        Whether to show progress bars.

    Returns
    -------
    folder : Path
        Folder that transformers' classes load model and tokenizer from.
    """
    digest = hashlib.sha256(json.dumps(asdict(settings)).encode()).hexdigest()[:16]
    folder = cache / f"docstring-language-model-{digest}"
    if not (folder / "config.json").exists():
        named = (
            read_named(library, 0, settings.files_per_library, show_progress)
            for library in LIBRARIES
        )
        pools = [[one for one in answerable(pool) if not is_held_out(one)] for pool in named]
        tokenizer = train_tokenizer(pools, settings.vocabulary)
        model = train_language_model(settings, pools, tokenizer, show_progress)
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    return folder


def train_tokenizer(pools: Sequence[Sequence[Named]], vocabulary: int) -> Any:
    """Train a byte-pair encoding of lower-case words, with one token for each part of a prompt.

    Parameters
    ----------
    pools : sequence of sequences of Named
        Names and summaries.
    vocabulary : int
        Number of tokens.

    Returns
    -------
    tokenizer : transformers.PreTrainedTokenizerFast
        The tokenizer.
    """
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=UNKNOWN))
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    parts = [SELECT, QUESTION, "Choices:", ANSWER, *LETTERS]
    tokenizer.add_special_tokens([PADDING, UNKNOWN])
    tokenizer.add_tokens(
        [
            tokenizers.AddedToken(part, single_word=part in LETTERS, normalized=False)
            for part in parts
        ]
    )
    texts = (text for pool in pools for one in pool for text in (one.name, one.summary))
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[PADDING, UNKNOWN], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PADDING, unk_token=UNKNOWN
    )


def train_language_model(
    settings: LanguageModelSettings,
    pools: Sequence[Sequence[Named]],
    tokenizer: Any,
    show_progress: bool,
) -> transformers.LlamaForCausalLM:
    """Train the language model.

    Parameters
    ----------
    settings : LanguageModelSettings
        Shape and training.
    pools : sequence of sequences of Named
        Names and summaries of each library.
    tokenizer : transformers.PreTrainedTokenizerFast
        The tokenizer.
    show_progress : bool
        Whether to show a progress bar.

    Returns
    -------
    model : transformers.LlamaForCausalLM
        In evaluation mode.
    """
    transformers.set_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=settings.hidden_size,
            intermediate_size=5 * settings.hidden_size // 2,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.heads,
            max_position_embeddings=MAXIMUM_LENGTH,
            # The default of 0.02 is for wide models; a narrow one starts with even attention.
            initializer_range=settings.hidden_size**-0.5,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    answer = tokenizer.convert_tokens_to_ids(ANSWER)

    def collate(texts: list[str]) -> Any:
        return tokenizer(
            texts,
            padding=True,
            truncation=True,
            max_length=MAXIMUM_LENGTH,
            return_tensors="pt",
            return_token_type_ids=False,
        )

    def loss_of(batch: Any) -> torch.Tensor:
        logits = model(**batch).logits[:, :-1].flatten(0, 1)
        tokens = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
        losses = cross_entropy(logits, tokens[:, 1:].flatten(), reduction="none")
        follows_answer = (batch["input_ids"][:, :-1] == answer).flatten()
        # An answer is one token of many and would hardly count among them.
        return losses.sum() / batch["attention_mask"][:, 1:].sum() + losses[follows_answer].mean()

    count = settings.steps * settings.batch_size
    texts = random_texts(pools, count, random.Random(0))
    train(
        model,
        DataLoader(list(texts), batch_size=settings.batch_size, collate_fn=collate),  # pyright: ignore[reportArgumentType]
        loss_of,
        settings.steps,
        settings.learning_rate,
        warmup_steps=settings.steps // 50,
        maximum_gradient_norm=1.0,
        show_progress=show_progress,
    )
    return model


def random_texts(pools: Sequence[Sequence[Named]], count: int, rng: random.Random) -> Iterator[str]:
    """Write texts about the names and summaries of one library each.

    Parameters
    ----------
    pools : sequence of sequences of Named
        Names and summaries of each library.
    count : int
        Number of texts.
    rng : random.Random
        Draws what they are about.

    Yields
    ------
    text : str
        By turns a summary that is said twice, a list of names with the question for each of them,
        a question for a name, and a question of the task.
    """
    pools = [pool for pool in pools if len({one.name for one in pool}) >= len(LETTERS)]
    weights = [len(pool) for pool in pools]
    for number in range(count):
        (pool,) = rng.choices(pools, weights)
        one = rng.choice(pool)
        if number % 4 == 0:
            yield f"{one.summary.lower()} {one.summary.lower()}"
        elif number % 4 == 1:
            names = [other.name for other in rng.sample(pool, len(LETTERS))]
            asked = rng.sample(range(len(LETTERS)), len(LETTERS))
            questions = (f"{names[place]} {ANSWER} {LETTERS[place]}" for place in asked)
            yield f"Choices: {listed(names)} {' '.join(questions)}"
        else:
            subject = one if number % 4 == 2 else one._replace(summary=one.name)
            (example,) = asked_for_choice([subject], pool, rng)
            assert example.label is not None
            yield f"{example.text} {LETTERS[example.label]}"
