"""Training of anything with a loss: AdamW, a schedule, cached checkpoints."""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import transformers
from peft import LoraConfig
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from benchmarks.options import Run

Weights = dict[str, Tensor]
Checkpoints = dict[int, Weights]  # by the number of steps
Records = list[dict[str, Any]]
Element = TypeVar("Element")


def as_dataset(elements: Sequence[Element]) -> Dataset[Element]:
    """Return a sequence as a data set, of which loaders read nothing more."""
    return cast("Dataset[Element]", elements)


@dataclass(frozen=True)
class Hyperparameters:
    """How to fine-tune; the defaults are the paper's (appendix)."""

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
        """List steps after which a checkpoint is kept, the last step among them."""
        count = min(self.checkpoints, self.steps)
        return [self.steps * number // count for number in range(1, count + 1)]

    def asked(self, options: Run, names: Sequence[str]) -> "Hyperparameters":
        """Return the settings, with what options of these names ask for instead.

        An option of None asks for nothing.
        """
        changes = {}
        for name in names:
            value = getattr(options, name)
            if value is not None:
                changes[name] = value
        changed = replace(self, **changes)
        # A run of few steps may end before the usual warm-up does.
        warmup_steps = min(changed.warmup_steps, changed.steps)
        return replace(changed, warmup_steps=warmup_steps)

    def for_share(self, share: float) -> "Hyperparameters":
        """Return the settings for a share of the steps, with one checkpoint."""
        return replace(
            self,
            steps=max(1, round(share * self.steps)),
            warmup_steps=round(share * self.warmup_steps),
            checkpoints=1,
        )


class Recipe:
    """Maximum likelihood by AdamW, parts of which other recipes override."""

    name = "maximum likelihood"

    def adapters(self, lora: LoraConfig) -> LoraConfig:
        """Choose the kind of LoRA layers that are trained."""
        return lora

    def prepare(self, model: torch.nn.Module) -> None:
        """Add parameters to be trained beside the weights."""

    def optimizer(
        self, weights: list[torch.nn.Parameter], settings: Hyperparameters
    ) -> Any:
        """Make the optimizer."""
        return torch.optim.AdamW(weights, lr=settings.learning_rate, weight_decay=0.0)

    def schedule(self, optimizer: Any, settings: Hyperparameters) -> Any:
        """Make the schedule of the learning rate, which falls to 0 after warming up."""
        return transformers.get_linear_schedule_with_warmup(
            optimizer, settings.warmup_steps, settings.steps
        )

    def kept_steps(self, settings: Hyperparameters) -> list[int]:
        """List the steps after which a checkpoint is kept, the last step among them."""
        return settings.checkpoint_steps

    def loss(self, model: torch.nn.Module, batch: Any, labels: Tensor) -> Tensor:
        """Compute the mean loss of a batch; the model gives logits for the labels."""
        return cross_entropy(model(batch), labels)

    def drawing(self, optimizer: Any) -> AbstractContextManager[Any]:
        """Make a context for gradients: at the weights, or at a sample of them."""
        return nullcontext()

    def after_step(
        self, model: torch.nn.Module, step: int, steps_an_epoch: int, pace: float
    ) -> None:
        """Take steps beside the loss; `pace` is the schedule's share of the rate."""

    def deviations(self, model: torch.nn.Module, optimizer: Any) -> Weights:
        """Return what a checkpoint keeps beside the weights."""
        return {}


MAXIMUM_LIKELIHOOD = Recipe()


class Smoothed(Recipe):
    """Labels that leave a share of the probability to all classes alike."""

    def __init__(self, label_smoothing: float) -> None:
        self.name = f"label smoothing {label_smoothing}"
        self.label_smoothing = label_smoothing

    def loss(self, model: torch.nn.Module, batch: Any, labels: Tensor) -> Tensor:
        """Compute the mean loss of a batch at smoothed labels."""
        return cross_entropy(model(batch), labels, label_smoothing=self.label_smoothing)


def train(
    model: torch.nn.Module,
    loader: DataLoader,
    loss_of: Callable[[Any], Tensor],
    settings: Hyperparameters,
    show_progress: bool,
    recipe: Recipe,
) -> Checkpoints:
    """Train what requires gradients; return copies of it by the number of steps."""
    trained = {
        name: weight
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }
    optimizer = recipe.optimizer(list(trained.values()), settings)
    # A recipe may have a rate of its own, which the schedule scales all the same.
    first_rate = optimizer.param_groups[0]["lr"]
    schedule = recipe.schedule(optimizer, settings)
    kept_steps = recipe.kept_steps(settings)
    checkpoints = {}
    # Another pass begins, in another order, when one ends.
    batches = chain.from_iterable(repeat(loader))
    model.train()
    progress = tqdm(
        range(1, settings.steps + 1), desc="Training", disable=not show_progress
    )
    for step in progress:
        batch = next(batches)
        with recipe.drawing(optimizer):
            loss = loss_of(batch)
            loss.backward()
        optimizer.step()
        # Read before the schedule moves on: it is that of the step just taken.
        pace = schedule.get_last_lr()[0] / first_rate
        recipe.after_step(model, step, steps_an_epoch=len(loader), pace=pace)
        schedule.step()
        optimizer.zero_grad()
        if step in kept_steps:
            kept = {name: weight.detach().clone() for name, weight in trained.items()}
            checkpoints[step] = kept | recipe.deviations(model, optimizer)
        progress.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
    if not math.isfinite(loss.item()):
        raise RuntimeError("Training diverged; lower the learning rate.")
    model.eval()
    return checkpoints


def read_or_train(
    model: torch.nn.Module, key: Any, cache: Path, train: Callable[[], Checkpoints]
) -> Checkpoints:
    """Train, or read what an equal earlier training has left."""
    path = cache / f"fine-tuned-{_digest(model, key)}.pt"
    if path.exists():
        device = next(model.parameters()).device
        checkpoints = torch.load(path, map_location=device, weights_only=True)
        last = max(checkpoints)
        # Checkpoints have only what was trained.
        model.load_state_dict(checkpoints[last], strict=False)
        model.eval()
        return checkpoints
    checkpoints = train()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Who is interrupted leaves no half file under the name that others read.
    unfinished = path.with_suffix(".unfinished")
    torch.save(checkpoints, unfinished)
    unfinished.replace(path)
    return checkpoints


def _digest(model: torch.nn.Module, key: Any) -> str:
    """Name a training by its key and the weights that it starts from.

    Adapters beside the one to be trained make no difference.
    """
    digest = hashlib.sha256(json.dumps(key).encode())
    for name, weight in model.named_parameters():
        is_adapter = ".lora_" in name or ".modules_to_save." in name
        if is_adapter and not weight.requires_grad:
            continue
        # NumPy knows no bfloat16: the bytes count, whatever they mean.
        content = weight.detach().cpu().flatten().view(torch.uint8)
        digest.update(name.encode())
        digest.update(content.numpy().tobytes())
    return digest.hexdigest()[:16]
