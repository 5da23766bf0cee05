"""Training of what gives a loss: AdamW, a linear schedule, checkpoints, and a cache of them."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader
from tqdm import tqdm

Weights = dict[str, torch.Tensor]
Records = list[dict[str, Any]]
LossOf = Callable[[Any], torch.Tensor]  # of a batch


@dataclass(frozen=True)
class Hyperparameters:
    """How a model is fine-tuned; the defaults are the paper's (its appendix "Hyperparameters").

    The learning rate rises in the warm-up steps and then falls linearly to zero; checkpoints are
    at equal distances.
    """

    model: str
    target_modules: tuple[str, ...]
    batch_size: int
    maximum_length: int
    rank: int = 8
    alpha: int = 16
    dropout: float = 0.1
    learning_rate: float = 5e-5
    steps: int = 10_000
    checkpoints: int = 10
    warmup_steps: int = 0

    @property
    def checkpoint_steps(self) -> list[int]:
        """Steps after which a checkpoint is kept, the last step among them."""
        count = min(self.checkpoints, self.steps)
        return [self.steps * number // count for number in range(1, count + 1)]

    def for_epochs(self, epochs: int, texts: int) -> "Hyperparameters":
        """Train for so many passes over the texts, with one step of twenty as a warm-up."""
        steps = epochs * math.ceil(texts / self.batch_size)
        return replace(self, steps=steps, warmup_steps=steps // 20)


def train(
    model: torch.nn.Module,
    loader: DataLoader,
    loss_of: LossOf,
    settings: Hyperparameters,
    maximum_gradient_norm: float = math.inf,
    show_progress: bool = True,
) -> dict[int, Weights]:
    """Train the parameters that require gradients, without weight decay.

    Returns copies of the trained parameters by the number of steps; the model is in evaluation
    mode afterwards.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=settings.learning_rate, weight_decay=0.0)
    schedule = transformers.get_linear_schedule_with_warmup(
        optimizer, settings.warmup_steps, settings.steps
    )
    checkpoints = {}
    batches = _endless(loader)
    model.train()
    steps = range(1, settings.steps + 1)
    progress = tqdm(steps, desc="Training", disable=not show_progress, unit="step")
    for step in progress:
        loss = loss_of(next(batches))
        loss.backward()
        if maximum_gradient_norm < math.inf:
            torch.nn.utils.clip_grad_norm_(trained.values(), maximum_gradient_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step in settings.checkpoint_steps:
            checkpoints[step] = {name: p.detach().clone() for name, p in trained.items()}
        progress.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
    if not math.isfinite(loss.item()):
        raise RuntimeError("Training diverged; lower the learning rate.")
    model.eval()
    return checkpoints


def _endless(loader: DataLoader) -> Iterator[Any]:
    while True:
        yield from loader


def train_or_read(
    model: torch.nn.Module,
    loader: DataLoader,
    loss_of: LossOf,
    settings: Hyperparameters,
    seed: int,
    cache: Path,
    show_progress: bool,
) -> dict[int, Weights]:
    """Train a model, or read the checkpoints that the same training has left in the cache.

    The seed is that of dropout and of the order of the loader's records. The model is left in
    evaluation mode, with the weights of the last step.
    """
    device = next(model.parameters()).device
    records: Any = loader.dataset
    path = cache / f"fine-tuned-{training_digest(model, settings, records, seed)}.pt"
    if path.exists():
        checkpoints = torch.load(path, map_location=device, weights_only=True)
        model.load_state_dict(checkpoints[settings.steps], strict=False)
        model.eval()
        return checkpoints
    checkpoints = train(model, loader, loss_of, settings, show_progress=show_progress)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")  # of a run that is cut off, nothing is read
    torch.save(checkpoints, unfinished)
    unfinished.replace(path)
    return checkpoints


def training_digest(
    model: torch.nn.Module, settings: Hyperparameters, records: Records, seed: int
) -> str:
    """Hash everything that a training's result depends on, but for versions of packages."""
    digest = hashlib.sha256(json.dumps([asdict(settings), records, seed]).encode())
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
