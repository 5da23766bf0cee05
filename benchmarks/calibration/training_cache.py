"""Fine-tuned weights that an earlier run has left, so that another method costs no training."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.calibration.hyperparameters import Hyperparameters
from benchmarks.training import Weights


def cached(path: Path, train: Callable[[], dict[int, Weights]], device: str) -> dict[int, Weights]:
    """Read the checkpoints of a training, or train and write them.

    Parameters
    ----------
    path : Path
        File of the checkpoints.
    train : callable
        Trains where the file is missing.
    device : str
        Device to read to.

    Returns
    -------
    checkpoints : dict
        Trained weights by the number of steps.
    """
    if path.exists():
        return torch.load(path, map_location=device, weights_only=True)
    checkpoints = train()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")  # of a run that is cut off, nothing is read
    torch.save(checkpoints, unfinished)
    unfinished.replace(path)
    return checkpoints


def training_digest(
    model: torch.nn.Module, settings: Hyperparameters, records: list[dict[str, Any]], seed: int
) -> str:
    """Hash everything that a training's result depends on, but for versions of packages.

    Parameters
    ----------
    model : torch.nn.Module
        As it is before the training.
    settings : Hyperparameters
        How it is trained.
    records : list of dict
        Tokenized training set.
    seed : int
        Seed of dropout and the order of the batches.

    Returns
    -------
    digest : str
        Fit for a file name.
    """
    digest = hashlib.sha256(json.dumps([asdict(settings), records, seed]).encode())
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
