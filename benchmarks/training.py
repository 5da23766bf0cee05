"""Training of a model that gives logits: AdamW, linear schedule, checkpoints of what is trained."""

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader
from tqdm import tqdm

Weights = dict[str, torch.Tensor]


def train(
    model: torch.nn.Module,
    loader: DataLoader,
    loss_of: Callable[[Any], torch.Tensor],
    steps: int,
    learning_rate: float,
    warmup_steps: int = 0,
    checkpoint_steps: Collection[int] = (),
    maximum_gradient_norm: float = math.inf,
    show_progress: bool = True,
) -> dict[int, Weights]:
    """Train the parameters that require gradients, without weight decay.

    Parameters
    ----------
    model : torch.nn.Module
        Is in evaluation mode afterwards.
    loader : DataLoader
        Shuffled batches, passed over as often as the steps need.
    loss_of : callable
        A batch's loss.
    steps : int
        Number of steps.
    learning_rate : float
        AdamW's learning rate after the warm-up, from which it falls linearly to zero.
    warmup_steps : int, default=0
        Steps in which the learning rate rises.
    checkpoint_steps : collection of int, default=()
        Steps after which the trained parameters are kept.
    maximum_gradient_norm : float, optional
        Length to which longer gradients are cut.
    show_progress : bool, default=True
        Whether to show a progress bar.

    Returns
    -------
    checkpoints : dict
        Copies of the trained parameters by the number of steps.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=learning_rate, weight_decay=0.0)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, warmup_steps, steps)
    checkpoints = {}
    batches = _endless(loader)
    model.train()
    with tqdm(total=steps, desc="Training", disable=not show_progress, unit="step") as progress:
        for step in range(1, steps + 1):
            loss = loss_of(next(batches))
            loss.backward()
            if maximum_gradient_norm < math.inf:
                torch.nn.utils.clip_grad_norm_(trained.values(), maximum_gradient_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if step in checkpoint_steps:
                checkpoints[step] = {name: p.detach().clone() for name, p in trained.items()}
            progress.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
            progress.update()
    if not math.isfinite(loss.item()):
        raise RuntimeError("Training diverged; lower the learning rate.")
    model.eval()
    return checkpoints


def _endless(loader: DataLoader) -> Iterator[Any]:
    while True:
        yield from loader
