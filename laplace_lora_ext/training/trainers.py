"""The user's own trainer, on some of its examples and for a share of its steps."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from laplace_lora_ext.models.adapters import find_peft_model, read_adapter
from laplace_lora_ext.processes.shards import in_order

_MAPPINGS = (dict, OrderedDict, defaultdict)
_COLLECTIONS = (list, set, deque)


def check_trainer(trainer: Any) -> None:
    """Refuse what can't train again as it has trained, by a `ValueError`."""
    if not any(weight.requires_grad for weight in find_peft_model(trainer.model).parameters()):
        raise ValueError("The trainer's model is frozen: load its adapter with is_trainable=True.")
    if trainer.model_init is not None:
        raise ValueError("model_init makes a new model in each training: give the trainer a model.")
    if trainer.optimizer is not None and not trainer.state.global_step:
        raise ValueError(
            "The trainer was given an optimizer, but each training needs one of its own: choose it "
            "in the arguments (optim, learning_rate), or pass optimizer_cls_and_kwargs."
        )


def loader_of(trainer: Any, examples: Any) -> DataLoader:
    """A trainer's batches of some examples, each once and in order.

    They have the columns and the collator of training, and the batch size of evaluation.
    """
    before = trainer.train_dataset
    trainer.train_dataset = examples
    try:
        with same_random_states():
            made = trainer.get_train_dataloader()
    finally:
        trainer.train_dataset = before
    if len(made.dataset) != len(examples):
        raise ValueError(
            "The trainer can't train on some of its examples: its get_train_dataloader must read "
            "self.train_dataset."
        )
    return in_order(made.dataset, trainer.args.per_device_eval_batch_size, made.collate_fn)


def train(
    trainer: Any,
    examples: Any,
    share_of_steps: float,
    folder: Path,
    checkpoint: Path | None = None,
) -> None:
    """Train a trainer's model with an optimizer and a schedule of their own.

    It trains on some of its training data, for a share of the steps of a training on all of them,
    with checkpoints in a folder; one of these is where to go on. Its arguments and data are the
    user's again afterwards, also after an error.
    """
    args, data = trainer.args, trainer.train_dataset
    trainer.args = copy(args)
    trainer.args.output_dir = str(folder)
    if args.max_steps > 0:
        trainer.args.max_steps = max(1, round(share_of_steps * args.max_steps))
    else:
        epochs = share_of_steps * len(data) / len(examples) * args.num_train_epochs
        trainer.args.num_train_epochs = round(epochs, 9)  # rounding errors would add a step
    if args.warmup_steps >= 1:  # below 1 it is a share
        trainer.args.warmup_steps = round(share_of_steps * args.warmup_steps)
    trainer.train_dataset = examples
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.model_wrapped = trainer.model  # a wrapper knows the weights that were trained before
    try:
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    finally:
        trainer.args, trainer.train_dataset = args, data
        trainer.optimizer = trainer.lr_scheduler = None
    best, model = trainer.state.best_model_checkpoint, find_peft_model(trainer.model)
    adapter: Any = model.active_adapter
    if args.load_best_model_at_end and best is not None and adapter != "default":
        read_adapter(model, adapter, Path(best))  # the trainer has read "default"


@contextmanager
def with_attributes(trainer: Any, **values: Any) -> Iterator[None]:
    """Within, a trainer has some attributes of its own; afterwards those that it had, if any."""
    before = {name: vars(trainer)[name] for name in values if name in vars(trainer)}
    vars(trainer).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(trainer)[name]
        vars(trainer).update(before)


@contextmanager
def restored(trainer: Any) -> Iterator[None]:
    """Afterwards a trainer, its callbacks, its model's mode and all random states are as before.

    Within, callbacks that fit posteriors take no part.
    """
    handler = trainer.callback_handler
    before = _Contents(trainer)
    modes = [(module, module.training) for module in trainer.model.modules()]
    handler.callbacks = [c for c in handler.callbacks if not getattr(c, "fits_posteriors", False)]
    try:
        with same_random_states():
            yield
    finally:
        before.put_back()
        for module, mode in modes:
            module.training = mode


class _Contents:
    """What a trainer holds now, in attributes, dictionaries, lists and sets at any depth.

    Of its state, arguments, callbacks and accelerator, and of other data classes, attributes count;
    other objects and the data do not.
    """

    def __init__(self, trainer: Any) -> None:
        self._mappings: list[tuple[Any, dict[Any, Any]]] = []
        self._collections: list[tuple[Any, list[Any]]] = []
        found: list[Any] = [vars(trainer)]
        seen = {id(trainer.train_dataset), id(trainer.eval_dataset)}
        while found:
            value = found.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, TrainerCallback | Accelerator) or is_dataclass(value):
                found.append(getattr(value, "__dict__", None))
            elif type(value) in _MAPPINGS:
                self._mappings.append((value, dict(value)))
                found += value.values()
            elif type(value) in _COLLECTIONS:
                self._collections.append((value, list(value)))
                found += value
            elif isinstance(value, tuple):
                found += value

    def put_back(self) -> None:
        for mapping, before in self._mappings:
            mapping.clear()
            mapping.update(before)
        for collection, before in self._collections:
            collection.clear()
            add_all = collection.update if isinstance(collection, set) else collection.extend
            add_all(before)


@contextmanager
def same_random_states() -> Iterator[None]:
    """Restore every random state in the end."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
