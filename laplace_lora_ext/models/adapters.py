"""Writes LoRA weights as adapters that PEFT loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn


def find_peft_model(model: nn.Module) -> PeftModel:
    """The `PeftModel` that a model is or holds; an error if there is none."""
    for module in model.modules():
        if isinstance(module, PeftModel):
            return module
    raise ValueError(
        "Adapters are saved from a PeftModel, which this model neither is nor holds: make it with "
        "peft.get_peft_model."
    )


def new_folders(directory: str | Path, n_samples: int) -> list[Path]:
    """Paths of new folders, one for each sample; `FileExistsError` if there is one already."""
    digits = len(str(n_samples - 1))
    folders = [Path(directory) / f"sample_{index:0{digits}}" for index in range(n_samples)]
    for folder in folders:
        if folder.exists():
            raise FileExistsError(f"{folder} exists: remove it or name another directory.")
    return folders


def write_adapter(
    model: PeftModel,
    adapter: str,
    weights: Mapping[int, torch.Tensor],
    directory: Path,
    **kwargs: Any,
) -> Path:
    """Save an adapter with other values for some of its weights, and return its folder.

    `weights` maps the `id` of a parameter to the values to save in its place. The model itself
    does not change.
    """
    # PEFT gives any adapter but "default" a folder of its own.
    state = model.state_dict()
    for name, parameter in model.named_parameters():
        if id(parameter) in weights:
            state[name] = weights[id(parameter)]
    model.save_pretrained(str(directory), selected_adapters=[adapter], state_dict=state, **kwargs)
    return directory if adapter == "default" else directory / adapter
