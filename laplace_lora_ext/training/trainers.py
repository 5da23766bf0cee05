"""Examples of a training; the user's own trainer on some, left as it was.

A training may go on where an interrupted run stopped. A mark in its folder says whose
it is and what decides it, and once it has ended what its log is. So do marks in its
checkpoints: a folder may hold those of other runs, and may have been copied since.
"""

from __future__ import annotations

import json
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from accelerate import Accelerator
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import SchedulerType, TrainerCallback

from laplace_lora_ext.models.adapters import (
    find_peft_model,
    read_adapter,
    write_adapter,
)
from laplace_lora_ext.predictive.data_sets import Columns, over_loader
from laplace_lora_ext.processes.exchange import of_first
from laplace_lora_ext.processes.shards import in_order, in_order_like, own_examples
from laplace_lora_ext.saving import write_whole
from laplace_lora_ext.training.averaging import AveragingCallback

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)
_MARK = "laplace_stage.json"
# Arguments of a trainer that decide what it learns, beside model and data.
_DECISIVE = (
    "seed",
    "data_seed",
    "max_steps",
    "num_train_epochs",
    "train_batch_size",
    "gradient_accumulation_steps",
    "optim",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
)

Log = list[dict[str, Any]]
"""What a trainer has logged."""


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
    # One that shuffles may draw a seed as soon as it is made.
    with with_attributes(trainer, train_dataset=examples), same_random_states():
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
        weights = find_peft_model(trainer.model).parameters()
        if not any(weight.requires_grad for weight in weights):
            raise ValueError(
                "The trainer's model is frozen: load its adapter with "
                "is_trainable=True."
            )
        if trainer.model_init is not None:
            raise ValueError(
                "model_init makes a new model in each training: give the trainer a "
                "model."
            )
        if trainer.optimizer is not None and not trainer.state.global_step:
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

    def groups(self, la: Any) -> Tensor:
        """Number examples' groups `(N,)`, such as their classes."""
        everything = self.all
        one_group = torch.zeros(len(everything), dtype=torch.long)
        if la.task.has_tokens or la.task.has_noise:
            return one_group  # texts and numbers have no class

        def targets_of(batch: Any) -> Columns:
            _, targets = la.model.split(batch)
            return (targets.cpu(),)

        with same_random_states():
            (targets,) = over_loader(self.batches(everything), targets_of)
        # What is held out is whole examples of the data set, and these may be whole
        # batches.
        if len(targets) != len(everything):
            return one_group
        return la.task.groups(targets)


def train(
    trainer: Any,
    examples: Any,
    share_of_steps: float,
    folder: Path,
    *,
    average: float = 0.0,
    checkpoint: Path | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> None:
    """Train a trainer's model with an optimizer and a schedule of their own.

    It trains on some of its training data, for a share of the steps of a training on
    all of them, with checkpoints in a folder; one of these is where to go on. With a
    share of the steps to `average` over, the rate is constant and their mean remains.
    Arguments, data and callbacks are the user's again afterwards, also after an error.
    """
    args = copy(trainer.args)
    args.output_dir = str(folder)
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
    if average:
        args.lr_scheduler_type = SchedulerType.CONSTANT_WITH_WARMUP
        args.lr_scheduler_kwargs = {}  # those of another schedule
        # First, so that a checkpoint is whole when the others hear of it.
        callbacks = [AveragingCallback(average), *callbacks]
    for callback in callbacks:
        trainer.add_callback(callback)
    _forget_optimizer(trainer)
    # A wrapper knows the weights that were trained before.
    trainer.model_wrapped = trainer.model
    try:
        with with_attributes(trainer, args=args, train_dataset=examples):
            trainer.train(
                resume_from_checkpoint=None if checkpoint is None else str(checkpoint)
            )
    finally:
        for callback in callbacks:
            trainer.remove_callback(callback)
        _forget_optimizer(trainer)
    model = find_peft_model(trainer.model)
    best = trainer.state.best_model_checkpoint
    # The trainer has read "default", which PEFT saves beside the other adapters'
    # folders.
    if args.load_best_model_at_end and best and model.active_adapter != "default":
        read_adapter(model, str(model.active_adapter), Path(best))


def _forget_optimizer(trainer: Any) -> None:
    """Let a trainer make an optimizer and a schedule when it next trains."""
    trainer.optimizer = None
    trainer.lr_scheduler = None


class MarkCheckpoints(TrainerCallback):
    """Marks each checkpoint with its run's name once it is whole."""

    def __init__(self, run: str) -> None:
        self.run = run

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the mark, last of all files of the checkpoint."""
        if args.should_save:
            checkpoint = Path(args.output_dir, f"checkpoint-{state.global_step}")
            _write(checkpoint, {"run": self.run})


def forget(folder: Path) -> None:
    """Remove the mark of an earlier run, which nobody is to go on with."""
    (folder / _MARK).unlink(missing_ok=True)


def train_or_read(
    trainer: Any,
    examples: Any,
    share_of_steps: float,
    folder: Path,
    *,
    average: float,
    decided_by: Mapping[str, Any],
    resume: bool,
) -> Log:
    """Train and save the active adapter, or resume where a run stopped.

    `decided_by` is what decides the training beside the trainer's arguments: a run with
    other values is refused (`ValueError`). Returns the training's log.
    """
    model = find_peft_model(trainer.model)
    adapter = str(model.active_adapter)
    arguments = {name: getattr(trainer.args, name) for name in _DECISIVE}
    deciding = {**arguments, **decided_by, "share": share_of_steps, "average": average}
    # As text: types are lost in a file.
    deciding = {name: str(value) for name, value in deciding.items()}
    # Processes may see other files, where each machine has a disk of its own.
    mark, checkpoint = of_first(_begun(folder) if resume else (None, None))
    if mark is None:
        # A name that no other run has: checkpoints of an earlier one may lie in the
        # same folder.
        mark = {"run": of_first(uuid4().hex), "decided_by": deciding, "log": None}
        if trainer.args.should_save:
            _write(folder, mark)
    _check_alike(folder, mark["decided_by"], deciding)
    # The training had ended: there is nothing left but to read what it learnt.
    if mark["log"] is not None:
        read_adapter(model, adapter, folder)
        return mark["log"]
    train(
        trainer,
        examples,
        share_of_steps,
        folder,
        average=average,
        checkpoint=checkpoint,
        callbacks=[MarkCheckpoints(mark["run"])],
    )
    log = trainer.state.log_history
    if trainer.args.should_save:
        write_adapter(model, adapter, {}, folder)
        # Last: a log says that the adapter is whole.
        _write(folder, mark | {"log": log})
    return log


def _begun(folder: Path) -> tuple[dict[str, Any] | None, Path | None]:
    """Find a training's mark, and its last checkpoint that is whole."""
    if not (folder / _MARK).exists():
        return None, None
    mark = _read(folder)
    marks = folder.glob(f"checkpoint-*/{_MARK}")
    own = [each.parent for each in marks if _read(each.parent)["run"] == mark["run"]]
    return mark, max(own, key=lambda path: int(path.name.split("-")[1]), default=None)


def _check_alike(
    folder: Path, before: Mapping[str, str], now: Mapping[str, str]
) -> None:
    """Refuse to go on with a training that another one has begun."""
    for name, value in now.items():
        if before.get(name) != value:
            raise ValueError(
                f"{folder} is of a training with {name}={before.get(name)}, and this "
                f"one has {value}: resume with the same trainer, data and options, or "
                "train anew without resuming."
            )


def _read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / _MARK).read_text(encoding="utf-8"))


def _write(folder: Path, content: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / _MARK, json.dumps(content).encode())


@contextmanager
def with_attributes(trainer: Any, **values: Any) -> Iterator[None]:
    """Give a trainer some attributes within, and its own back afterwards."""
    attributes = vars(trainer)
    before = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        # A trainer's methods are its class's: an attribute put back would hide later
        # changes.
        for name in values:
            del attributes[name]
        attributes.update(before)


@contextmanager
def restored(trainer: Any) -> Iterator[None]:
    """Restore a trainer, its callbacks, mode and random states at the end."""
    held = [(container, copy(container)) for container in _containers_of(trainer)]
    modes = {module: module.training for module in trainer.model.modules()}
    try:
        with same_random_states():
            yield
    finally:
        for container, before in held:
            # In place: others may refer to it.
            container.clear()
            if isinstance(container, dict | set):
                container.update(before)
            else:
                container.extend(before)
        for module, training in modes.items():
            # Not `train`, which would change the modules within too.
            module.training = training


def _containers_of(trainer: Any) -> Iterator[Any]:
    """Yield a trainer's attributes, and the containers within, at any depth.

    Of its state, arguments, callbacks and accelerator, and of other data classes,
    attributes count; other objects and the data do not.
    """
    waiting: list[Any] = [vars(trainer)]
    # Data are large, and no training changes them.
    seen = {id(trainer.train_dataset), id(trainer.eval_dataset)}
    while waiting:
        value = waiting.pop()
        # Callbacks may hold their trainer, and so themselves.
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, TrainerCallback | Accelerator) or is_dataclass(value):
            waiting.append(getattr(value, "__dict__", None))
        # Exact types alone: a subclass may refuse to be cleared.
        elif type(value) in _CONTAINERS:
            waiting += value.values() if isinstance(value, dict) else value
            yield value
        elif isinstance(value, tuple):
            waiting += value


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
