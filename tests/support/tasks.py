"""A small model of each task, its data, and posteriors around two adapters of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from laplace_lora_ext import LaplaceMixture
from laplace_lora_ext.models.adapters import add_fresh_adapter
from tests.support.cases import Bernoullis, Case, Gaussian, unpadded_rows
from tests.support.choices import (
    ANSWERS,
    batches_of_own_choices,
    logits_of_choices,
    of_prompts,
    unpadded_choices,
)
from tests.support.models import (
    CLASS_TOKEN_IDS,
    N_CLASSES,
    Batch,
    built,
    lora_model,
    part_of,
    ragged_batches,
)
from tests.support.posteriors import generator, make, normal
from tests.support.texts import encoder_decoder


def numbers() -> list[Batch]:
    """Make one batch of texts with two numbers each."""
    (batch,) = ragged_batches(batch_size=8)
    return [batch | {"labels": normal(8, 2, seed=2)}]


def preferences() -> list[Batch]:
    """Make one batch of pairs of texts, of which one is preferred."""
    (batch,) = ragged_batches(batch_size=8, n_classes=2)
    pairs = {"labels": batch["labels"]}
    for key in ("input_ids", "attention_mask"):
        text = batch[key]
        # Beside the text before it, so that no pair is another one turned round.
        pairs[key] = torch.stack([text, text.roll(1, 0)], dim=1)
    return [pairs]


LABELS = torch.tensor([[0, 1, 1], [0, 0, 0], [1, 1, 1], [1, 0, 0]])
"""Three labels of each of four examples."""


def texts_of_several_labels(n_labels: int = 3) -> list[Batch]:
    """Make texts with labels, 0 or 1."""
    batches = ragged_batches()
    for number, batch in enumerate(batches):
        shape = (len(batch["input_ids"]), n_labels)
        labels = torch.randint(0, 2, shape, generator=generator(4)).double()
        # Rolled, since each batch is given the same labels.
        batch["labels"] = labels.roll(number, 0)
    return batches


IGNORED = -100
"""The label that transformers' own loss passes over."""


def token_classifier(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Make a classifier of tokens with an adapter that is not 0."""
    base = built(
        "BertForTokenClassification",
        hidden_size=12,
        num_hidden_layers=2,
        attn_implementation="eager",
    )
    # With B at 0, as PEFT begins, the gradient of A would be 0 everywhere.
    targets = ["query", "value"]
    lora = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    return get_peft_model(base, lora).to(dtype).eval()


def is_real(batch: Batch) -> Tensor:
    """Tell tokens from padding, `(texts, tokens)`."""
    return batch["attention_mask"].bool()


def labelled_batches(batch_size: int = 3) -> list[Batch]:
    """Make ragged texts of which some tokens are labelled, and one text has none."""
    found = ragged_batches(batch_size=batch_size)
    draws = generator(3)
    for number, batch in enumerate(found):
        shape = batch["input_ids"].shape
        labels = torch.randint(0, N_CLASSES, shape, generator=draws)
        # Few enough that texts have gaps, and many enough that most have labels.
        is_drawn = torch.rand(shape, generator=draws) < 0.6
        labels[~(is_drawn & is_real(batch))] = IGNORED
        if number == 1:
            labels[1] = IGNORED
        batch["labels"] = labels
    return found


CLASSIFIER = partial(lora_model, "bert")


@dataclass(frozen=True)
class Task:
    """A model, its data, and what its posteriors are made with."""

    model: Callable[[], nn.Module] = CLASSIFIER
    data: Callable[[], list[Batch]] = ragged_batches
    keywords: Mapping[str, Any] = field(default_factory=dict)
    # What a case is told beside: how each example's logits are found by itself.
    dense: Mapping[str, Any] = field(default_factory=dict)

    def fitted(self, model: nn.Module | None = None, **keywords: Any) -> Any:
        """Fit a posterior to all data, of a model of its own by default."""
        la = make(model or self.model(), **self.keywords | keywords)
        la.fit(self.data())
        return la

    def case(self) -> Case:
        """Build the model, and make batches of three examples at most."""
        batches = [
            part_of(batch, slice(start, start + 3))
            for batch in self.data()
            for start in range(0, len(batch["labels"]), 3)
        ]
        return Case(self.model(), batches, self.keywords, **self.dense)


def rewards_of(model: nn.Module, pair: Batch) -> Tensor:
    """Compute the rewards of both texts of a pair."""
    texts = {key: pair[key][0] for key in ("input_ids", "attention_mask")}
    return model(**texts).logits[:, 0]


def of_labelled_tokens(model: nn.Module, text: Batch) -> Tensor:
    """Compute logits `(tokens, C)` where an unpadded text is labelled."""
    logits = model(text["input_ids"]).logits
    return logits[text["labels"] != IGNORED]


def of_answers(normalised: bool = False, answers: Any = None) -> dict[str, Any]:
    """Sum log-probabilities of each choice of a text, or of each of some answers."""

    def split(batch: Batch) -> list[Any]:
        if answers is not None:
            (batch,) = of_prompts([batch], answers)
        return unpadded_choices(batch)

    logits = partial(logits_of_choices, normalised=normalised)
    return {"split": split, "logits_of": logits}


def of_written_answers(model: nn.Module, text: Batch) -> Tensor:
    """Sum log-probabilities that an encoder-decoder gives to each answer alone."""
    start = model.config.decoder_start_token_id
    logits = []
    for answer in ANSWERS:
        decoded = torch.tensor([[start, *answer]])
        output = model(text["input_ids"], decoder_input_ids=decoded)
        log_p = output.logits[0].log_softmax(-1)
        # The last place would predict what comes behind the answer.
        logits.append(log_p[torch.arange(len(answer)), answer].sum())
    return torch.stack(logits)


GPT2 = partial(lora_model, "gpt2")
CHOICES = Task(
    GPT2, batches_of_own_choices, {"normalised": True}, of_answers(normalised=True)
)
SEVERAL_LABELS = Task(
    data=texts_of_several_labels,
    keywords={"likelihood": "multi_label_classification"},
    dense={"target": Bernoullis()},
)
TOKENS = Task(
    token_classifier,
    labelled_batches,
    {"likelihood": "token_classification"},
    {"split": unpadded_rows, "logits_of": of_labelled_tokens},
)
OF_TARGETS = {
    "numbers": Task(
        partial(lora_model, "bert", n_labels=2),
        numbers,
        {"likelihood": "regression", "sigma_noise": Gaussian.noise},
        {"target": Gaussian()},
    ),
    "rewards": Task(
        partial(lora_model, "bert", n_labels=1),
        preferences,
        {"likelihood": "reward_modeling"},
        {"logits_of": rewards_of},
    ),
    "several labels": SEVERAL_LABELS,
    "one label": replace(
        SEVERAL_LABELS,
        model=partial(lora_model, "bert", n_labels=1),
        data=partial(texts_of_several_labels, 1),
    ),
    "tokens": TOKENS,
    "answers of several tokens": Task(
        GPT2,
        partial(ragged_batches, n_classes=len(ANSWERS)),
        {"class_token_ids": ANSWERS},
        of_answers(answers=ANSWERS),
    ),
    # Of one width, to which others are not padded.
    "means of choices": replace(
        CHOICES, data=partial(batches_of_own_choices, "left", 5)
    ),
    "answers of T5": Task(
        partial(encoder_decoder, "t5"),
        partial(ragged_batches, n_classes=len(ANSWERS)),
        {"class_token_ids": ANSWERS},
        # Norms of T5 run in float32.
        {"split": unpadded_rows, "logits_of": of_written_answers, "tolerance": 1e-7},
    ),
}
"""What models are trained to predict beside one class."""

TASKS = OF_TARGETS | {
    "classes": Task(),
    "diagonal": Task(keywords={"structure": "diag"}),
    "answers": Task(GPT2, keywords={"class_token_ids": CLASS_TOKEN_IDS}),
    "choices": CHOICES,
}


@dataclass(frozen=True)
class Two:
    """Posteriors around two adapters of one model, and their data."""

    first: Any
    second: Any
    batches: list[Batch]

    @property
    def members(self) -> list[Any]:
        """Both, in order."""
        return [self.first, self.second]

    @property
    def batch(self) -> Batch:
        """The first batch."""
        return self.batches[0]

    def mixture(self) -> LaplaceMixture:
        """Mix both."""
        return LaplaceMixture(self.members)


def add_second(model: Any, **lora_config: Any) -> None:
    """Add and activate an adapter with random weights, by default like the first."""
    if lora_config:
        model.add_adapter("second", LoraConfig(r=2, **lora_config))
        model.set_adapter("second")
    else:
        add_fresh_adapter(model, "second")
    model.double()
    for name, weight in model.named_parameters():
        if ".second" in name:
            # So large that the members disagree.
            nn.init.normal_(weight, std=0.4)


def two(name: str = "classes", **lora_config: Any) -> Two:
    """Fit posteriors with priors that differ; the second's adapter may, too."""
    task = TASKS[name]
    model: Any = task.model()
    first = task.fitted(model, prior_precision=2.0)
    add_second(model, **lora_config)
    second = task.fitted(model, prior_precision=0.5)
    # As it was: a posterior activates its own adapter by itself.
    model.set_adapter("default")
    return Two(first, second, task.data())
