"""Weights averaged over the end of a training: a centre for a posterior."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from laplace_lora_ext.messages import warn

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
