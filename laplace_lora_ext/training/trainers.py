"""Examples of a training; the user's own trainer on some, left as it was."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer

from laplace_lora_ext.models.adapters import find_peft_model, read_adapter
from laplace_lora_ext.predictive.data_sets import Columns, over_loader
from laplace_lora_ext.processes.shards import (
    Division,
    check_divisible,
    contents_of,
    divide,
    in_order,
    in_order_like,
    own_examples,
)


def peft_model_of(trainer: Any, model: nn.Module) -> PeftModel:
    """Find the model of a posterior; refuse the trainer of another."""
    peft_model = find_peft_model(model)
    if find_peft_model(trainer.model) is not peft_model:
        raise ValueError(
            "Pass the trainer of the posterior's model: this one has another."
        )
    return peft_model


def loader_of(trainer: Any, examples: Any) -> DataLoader:
    """Make a trainer's batches of some examples, each once and in order.

    They have the columns and the collator of training, and the batch size of
    evaluation.
    """
    # The trainer makes the loader, since it alone knows which columns its model takes.
    with as_before(trainer):
        trainer.train_dataset = examples
        of_training = trainer.get_train_dataloader()
    if len(of_training.dataset) != len(examples):
        raise ValueError(
            "The trainer can't train on some of its examples: its get_train_dataloader "
            "must read self.train_dataset."
        )
    return in_order_like(
        of_training, of_training.dataset, trainer.args.per_device_eval_batch_size
    )


@dataclass(frozen=True)
class Examples:
    """All examples of a training, and how some of them become batches.

    Attributes
    ----------
    loader : DataLoader
        of all; examples of the data set that its sampler leaves out are not used
    batches : callable
        loads given examples as for a fit, each once and in order
    """

    loader: DataLoader
    batches: Callable[[Any], DataLoader]

    @classmethod
    def of_trainer(cls, trainer: Any) -> Examples:
        """Take a trainer's; refuse one that can't train again (`ValueError`)."""
        if trainer.model_init is not None:
            raise ValueError(
                "model_init makes a new model in each training: give the trainer a "
                "model."
            )
        if _was_given_optimizer(trainer):
            raise ValueError(
                "The trainer was given an optimizer, but each training needs one of "
                "its own: choose it in the arguments (optim, learning_rate), or pass "
                "optimizer_cls_and_kwargs."
            )
        # The data set itself has the columns that a trainer asks for.
        return cls(in_order(trainer.train_dataset, 1), partial(loader_of, trainer))

    @classmethod
    def of_loader(cls, loader: DataLoader) -> Examples:
        """Take a loader's, with its collator and the size of its batches."""
        return cls(loader, partial(in_order_like, loader))

    @property
    def all(self) -> Any:
        """Return the data set of all examples."""
        return own_examples(self.loader)

    def divided(
        self, la: Any, held_out: float, generator: torch.Generator | None
    ) -> Division:
        """Hold out a share of each class, and copies of a text together."""
        # First, since groups take a pass over the data.
        check_divisible(self.loader, held_out)
        groups, contents = self._groups_and_contents(la)
        return divide(self.loader, held_out, groups, contents, generator)

    def _groups_and_contents(self, la: Any) -> tuple[Tensor, Tensor]:
        """Number examples' groups `(N,)`, such as their classes, and what they hold."""
        everything = self.all
        # Texts and numbers have no class.
        has_classes = not (la.task.has_tokens or la.task.has_noise)

        def of_batch(batch: Any) -> Columns:
            X, targets = la.model.split(batch)
            # Annotators may have given a text several labels.
            contents = contents_of(la.model.unlabelled(X), len(targets))
            return (contents, targets.cpu()) if has_classes else (contents,)

        with same_random_states():
            contents, *targets = over_loader(self.batches(everything), of_batch)
        groups = torch.zeros(len(everything), dtype=torch.long)
        numbers = torch.arange(len(everything))
        # What is held out is whole examples of the data set, and these may be whole
        # batches.
        if len(contents) != len(everything):
            return groups, numbers
        if has_classes:
            groups = la.task.groups(*targets)
        return groups, contents if contents.all() else numbers


def _was_given_optimizer(trainer: Any) -> bool:
    """Tell whether a trainer's optimizer is none that it would make again."""
    if trainer.optimizer is None:
        return False
    if not trainer.state.global_step:
        return True
    makes_others = type(trainer).create_optimizer is not Trainer.create_optimizer
    if makes_others or trainer.optimizer_cls_and_kwargs is not None:
        return False
    # The one that it has trained with may be its own, which has the arguments' rate.
    own = trainer.args.learning_rate
    groups = trainer.optimizer.param_groups
    return any(group.get("initial_lr", own) != own for group in groups)


# --- a training -----------------------------------------------------------------------


def train_with(
    trainer: Any,
    examples: Any,
    share_of_steps: float,
    folder: Path,
    checkpoint: Path | None = None,
) -> None:
    """Train a trainer's model with an optimizer and a schedule of their own.

    It trains on some of its training data, for a share of the steps of a training on
    all of them, with checkpoints in a folder; one of these is where to go on. The
    trainer then has the training's state, and all else as before.
    """
    args = copy(trainer.args)
    args.output_dir = str(folder)
    # A repository gets what ends in the trainer's own folder.
    args.push_to_hub = args.push_to_hub and folder == Path(trainer.args.output_dir)
    if args.max_steps > 0:
        args.max_steps = max(1, round(share_of_steps * args.max_steps))
    else:
        # An epoch of fewer examples has fewer steps.
        whole = len(trainer.train_dataset) / len(examples) * args.num_train_epochs
        # Rounding errors would add a step, since trainers round up.
        args.num_train_epochs = round(share_of_steps * whole, 9)
    # Below 1, transformers takes the number for a share of all steps.
    if args.warmup_steps >= 1:
        args.warmup_steps = round(share_of_steps * args.warmup_steps)
    with as_before(trainer):
        trainer.args = args
        trainer.train_dataset = examples
        # The training makes its own.
        trainer.optimizer = None
        trainer.lr_scheduler = None
        # A wrapper knows the weights that were trained before.
        trainer.model_wrapped = trainer.model
        has_others = len(find_peft_model(trainer.model).peft_config) > 1
        if checkpoint is not None and has_others:
            _read_active(trainer, checkpoint)
        trainer.train(
            resume_from_checkpoint=None if checkpoint is None else str(checkpoint)
        )
        state = trainer.state
    trainer.state = state
    best = state.best_model_checkpoint
    if args.load_best_model_at_end and best:
        _read_active(trainer, Path(best))


def _read_active(trainer: Any, checkpoint: Path) -> None:
    """Read the adapter that is trained from a checkpoint.

    PEFT saves "default" beside the other adapters' folders. Some releases of
    transformers read it alone, and others all but it.
    """
    model = find_peft_model(trainer.model)
    read_adapter(model, str(model.active_adapter), checkpoint)


@contextmanager
def as_before(trainer: Any) -> Iterator[None]:
    """Give a trainer the attributes again that it has now."""
    attributes = dict(vars(trainer))
    try:
        yield
    finally:
        vars(trainer).clear()
        vars(trainer).update(attributes)


@contextmanager
def without_trace(trainer: Any) -> Iterator[None]:
    """Restore a trainer, its model's mode and random states; copies of callbacks act.

    Each training makes a state of its own.
    """
    handler = copy(trainer.callback_handler)
    handler.callbacks = list(map(copy, handler.callbacks))
    modes = {module: module.training for module in trainer.model.modules()}
    try:
        with as_before(trainer), same_random_states():
            trainer.callback_handler = handler
            yield
    finally:
        for module, training in modes.items():
            # Not `train`, which would change the modules within too.
            module.training = training


@contextmanager
def same_random_states() -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch in the end."""
    of_python = random.getstate()
    of_numpy = np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
