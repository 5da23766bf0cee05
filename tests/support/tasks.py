"""A small model of each task, its data, and posteriors around two adapters of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from peft import LoraConfig
from torch import nn

from laplace_lora_ext import LaplaceMixture
from laplace_lora_ext.models.adapters import add_fresh_adapter
from tests.support.choices import batches_of_own_choices
from tests.support.labels import several_labels
from tests.support.models import (
    CLASS_TOKEN_IDS,
    Batch,
    lora_model,
    ragged_batches,
    real_targets,
)
from tests.support.posteriors import make
from tests.support.tokens import labelled_batches, token_classifier


def numbers() -> list[Batch]:
    """Make one batch of texts with two numbers each."""
    (batch,) = ragged_batches(batch_size=8)
    return [batch | {"labels": real_targets(8, n_outputs=2)}]


def preferences() -> list[Batch]:
    """Make one batch of pairs of texts, of which one is preferred."""
    batch, *_ = ragged_batches(n_classes=2)
    pairs = {"labels": batch["labels"]}
    for key in ("input_ids", "attention_mask"):
        text = batch[key]
        pairs[key] = torch.stack([text, text.flip(0)], dim=1)
    return [pairs]


def texts_of_several_labels() -> list[Batch]:
    """Make texts with three labels each, 0 or 1."""
    batches = ragged_batches()
    for batch in batches:
        batch["labels"] = several_labels(batch, 3)
    return batches


CLASSIFIER = partial(lora_model, "bert")


@dataclass(frozen=True)
class Task:
    """A model, its data, and what its posteriors are made with."""

    model: Callable[[], nn.Module] = CLASSIFIER
    data: Callable[[], list[Batch]] = ragged_batches
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def fitted(self, model: nn.Module | None = None, **keywords: Any) -> Any:
        """Fit a posterior to all data, of a model of its own by default."""
        la = make(model or self.model(), **self.keywords | keywords)
        la.fit(self.data())
        return la


TASKS = {
    "classes": Task(),
    "diagonal": Task(keywords={"structure": "diag"}),
    "head": Task(keywords={"modules_to_save": True}),
    "numbers": Task(
        partial(lora_model, "bert", n_labels=2), numbers, {"likelihood": "regression"}
    ),
    "rewards": Task(
        partial(lora_model, "bert", n_labels=1),
        preferences,
        {"likelihood": "reward_modeling"},
    ),
    "several labels": Task(
        data=texts_of_several_labels,
        keywords={"likelihood": "multi_label_classification"},
    ),
    "tokens": Task(
        token_classifier, labelled_batches, {"likelihood": "token_classification"}
    ),
    "answers": Task(
        partial(lora_model, "gpt2"), keywords={"class_token_ids": CLASS_TOKEN_IDS}
    ),
    "choices": Task(
        partial(lora_model, "gpt2"), batches_of_own_choices, {"normalised": True}
    ),
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
