"""Examples of a training; the user's own trainer on some, left as it was."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
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
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import SchedulerType, TrainerCallback

from laplace_lora_ext.messages import warn
from laplace_lora_ext.models.adapters import find_peft_model, read_adapter
from laplace_lora_ext.predictive.data_sets import Columns, over_loader
from laplace_lora_ext.processes.shards import (
    Division,
    check_divisible,
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
    with with_attributes(trainer, train_dataset=examples):
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

    def divided(
        self, la: Any, held_out: float, generator: torch.Generator | None
    ) -> tuple[Division, str]:
        """Hold out a share of each class; return a hash of which, and of what else."""
        check_divisible(self.loader, held_out)
        groups = self._groups(la)
        division = divide(self.loader, held_out, groups, generator)
        # In another order, examples have their classes elsewhere.
        identity = str([division.places, groups.tolist()])
        return division, hashlib.sha256(identity.encode()).hexdigest()[:16]

    def _groups(self, la: Any) -> Tensor:
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


# --- averages of weights --------------------------------------------------------------

SHARE = 0.6
"""Steps to average over, the last ones of a training."""

State = dict[str, Any]


class WeightAverage:
    """Average a model's trainable weights over the end of a training.

    The mean of adapter and heads at a constant learning rate is a better centre of a
    posterior than where a rate that decays to zero ends (Izmailov et al., "Averaging
    weights leads to wider optima and better generalization", UAI 2018; for LoRA Onal et
    al., arXiv:2405.03425).

        average = WeightAverage(model)
        for step, batch in enumerate(batches):
            ...  # loss, gradients, optimizer.step()
            if step >= 0.4 * n_steps:
                average.update()
        average.finish()

    Sums are in float32, or in float64 where weights are, on the weights' own devices.
    Running statistics, as those of batch norms, are not averaged. Ranks that share a
    model (DDP, FSDP2) each have an average of their own part.

    Parameters
    ----------
    model : torch.nn.Module
        what requires a gradient now is averaged

    Attributes
    ----------
    n_updates : int
        how often weights were added
    """

    def __init__(self, model: nn.Module) -> None:
        self._weights = [each for each in model.parameters() if each.requires_grad]
        self._sums: list[Tensor] = []
        for weight in self._weights:
            dtype = torch.promote_types(weight.dtype, torch.float32)
            zeros = torch.zeros_like(weight, dtype=dtype, requires_grad=False)
            self._sums.append(zeros)
        self.n_updates = 0

    @torch.no_grad()
    def update(self) -> None:
        """Add the present weights to the sums."""
        for total, weight in zip(self._sums, self._weights, strict=True):
            total += weight
        self.n_updates += 1

    @torch.no_grad()
    def finish(self) -> None:
        """Give the model the mean; `ValueError` if nothing was added."""
        if not self.n_updates:
            raise ValueError("There is nothing to average: call update() after steps.")
        for total, weight in zip(self._sums, self._weights, strict=True):
            weight.copy_(total / self.n_updates)

    def state_dict(self) -> State:
        """Return the sums of this process, to go on with after an interruption."""
        return {"n_updates": self.n_updates, "sums": [_local(s) for s in self._sums]}

    def load_state_dict(self, state: State) -> None:
        """Go on with the sums of an equal model."""
        for total, saved in zip(self._sums, state["sums"], strict=True):
            _local(total).copy_(saved)
        self.n_updates = state["n_updates"]


class AveragingCallback(TrainerCallback):
    """Leaves the mean of a training's last weights in the model.

        trainer.add_callback(AveragingCallback())

    The learning rate is to be constant after the warm-up: give the trainer's arguments
    `lr_scheduler_type="constant_with_warmup"`. Evaluations and checkpoints during the
    training have its own weights. A checkpoint has the sums too, so that a training
    which goes on there (`resume_from_checkpoint`) ends with the same mean.

    Parameters
    ----------
    share : float, default=0.6
        of the steps, the last of which are averaged over

    Raises
    ------
    ValueError
        For a share that is not between 0 and 1; and before a training with
        `load_best_model_at_end`, whose choice among checkpoints the mean would replace.
    FileNotFoundError
        Before a training that goes on from a checkpoint without sums.

    Warns
    -----
    UserWarning
        If the training has ended before any weights were averaged.
    """

    def __init__(self, share: float = SHARE) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"average must be above 0 up to 1, not {share}.")
        self._share = share

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        """Begin with sums of zero, or go on with those of a checkpoint."""
        if args.load_best_model_at_end:
            raise ValueError(
                "Averaged weights and load_best_model_at_end are two ways to choose "
                "what a training leaves: turn one of them off."
            )
        self._average = WeightAverage(kwargs["model"])
        n_averaged = steps_to_average(state.max_steps, self._share)
        self._last_left_out = state.max_steps - n_averaged
        if state.global_step > self._last_left_out:
            file = _file_of(args, state)
            sums = torch.load(file, map_location="cpu", weights_only=True)
            self._average.load_state_dict(sums)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the weights after a step of the optimizer."""
        if state.global_step > self._last_left_out:
            self._average.update()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write this process's sums into the checkpoint."""
        file = _file_of(args, state)
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(self._average.state_dict(), file)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give the model the mean."""
        if self._average.n_updates:
            self._average.finish()
        else:
            warn(
                f"Training ended after {state.global_step} steps, before weights were "
                f"averaged: the model has the last ones. Average from step "
                f"{self._last_left_out + 1} on, or train longer."
            )
        del self._average  # its sums take memory


def share_of(average: bool | float) -> float:
    """Return the share of the steps that is asked for: `SHARE` for True, 0 for none."""
    return SHARE if average is True else float(average)


def steps_to_average(n_steps: int, share: float) -> int:
    """Count the last steps of a training that are averaged over."""
    return max(1, round(share * n_steps))


def _local(total: Tensor) -> Tensor:
    """Return this process's part of a tensor, all of it unless FSDP2 shards it."""
    return total.to_local() if isinstance(total, DTensor) else total


def _file_of(args: Any, state: Any) -> Path:
    """Name the file of a process's sums, in the checkpoint of the last step."""
    checkpoint = Path(args.output_dir, f"checkpoint-{state.global_step}")
    return checkpoint / f"sums_of_weights_{args.process_index}.pt"


# --- a training -----------------------------------------------------------------------


def train_with(
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
    best = trainer.state.best_model_checkpoint
    if args.load_best_model_at_end and best:
        # The trainer has read "default", which PEFT saves beside the other adapters'
        # folders.
        model = find_peft_model(trainer.model)
        read_adapter(model, str(model.active_adapter), Path(best))


def _forget_optimizer(trainer: Any) -> None:
    """Let a trainer make an optimizer and a schedule when it next trains."""
    trainer.optimizer = None
    trainer.lr_scheduler = None


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
    """Restore a trainer, its callbacks, mode and random states at the end.

    Attributes count, and what is in lists and dictionaries among them. Flags, and what
    an accelerator holds, are set anew by each training.
    """
    parts = (trainer, trainer.state, *trainer.callback_handler.callbacks)
    held = [
        (container, copy(container))
        for part in parts
        for container in (vars(part), *vars(part).values())
        if type(container) in (dict, list)
    ]
    modes = {module: module.training for module in trainer.model.modules()}
    try:
        with same_random_states():
            yield
    finally:
        for container, before in held:
            # In place: others may refer to it.
            container.clear()
            if isinstance(container, dict):
                container.update(before)
            else:
                container.extend(before)
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
