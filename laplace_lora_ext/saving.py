"""Posteriors in files, and draws of them as adapters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from laplace_lora_ext.messages import check_counts
from laplace_lora_ext.models.adapters import find_peft_model, new_folders, write_adapter
from laplace_lora_ext.models.locks import exclusive
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.same_model import ModelState, first_changed
from laplace_lora_ext.models.weights import Block
from laplace_lora_ext.predictive.distributions import drawn_weights

FILE = "laplace_posterior.safetensors"
_VERSION = "3"


@exclusive
def save_pretrained(la: Any, folder: str | Path) -> None:
    """Write the posterior into a folder, such as that of the adapter.

    `laplace_lora_ext.from_pretrained(model, folder)` reads it. It is one file,
    "laplace_posterior.safetensors", whose metadata holds all that is no tensor.

    Parameters
    ----------
    folder : str or Path
        made if it does not exist
    """
    tensors: dict[int, tuple[str, torch.Tensor]] = {}

    def named(tensor: torch.Tensor) -> dict[str, str]:
        return {"tensor": tensors.setdefault(id(tensor), (str(len(tensors)), tensor))[0]}

    state = la.state_dict()
    metadata = {"laplace_lora_ext": _VERSION, "state": json.dumps(state, default=named)}
    Path(folder).mkdir(parents=True, exist_ok=True)
    copies = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.values()
    }
    safetensors.torch.save_file(copies, Path(folder, FILE), metadata)


def read_state(folder: str | Path) -> dict[str, Any]:
    """The state of a posterior that `save_pretrained` wrote; damaged or other files are refused."""
    path = Path(folder, FILE)
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}.") from error
    version = metadata.get("laplace_lora_ext")
    if version != _VERSION:
        raise ValueError(
            f"{path} holds no posterior that this release reads (version {_VERSION} of the format, "
            f"not {version}): fit and save it again, or install the release that wrote it."
        )

    def with_tensor(node: dict[str, Any]) -> Any:
        return tensors[node["tensor"]] if node.keys() == {"tensor"} else node

    return json.loads(metadata["state"], object_hook=with_tensor)


def check_state(
    state: Mapping[str, Any],
    settings: Mapping[str, Any],
    model: LogitsModel,
    blocks: Sequence[Block],
) -> None:
    """Refuse the state of another posterior, and name what differs.

    `settings` are class, likelihood and settings of the posterior that the state is for, `model`
    and `blocks` its model as it is now.
    """
    saved = {"cls_name": state["cls_name"], "likelihood": state["likelihood"], **state["settings"]}
    for name, value in settings.items():
        if saved.get(name) != value:
            raise ValueError(
                f"The posterior was fitted with {name}={saved.get(name)!r}, not {value!r}: pass "
                "the same setting."
            )
    fitted = ModelState.from_state_dict(state["model"])
    difference = fitted.difference(ModelState.of(model, blocks))
    if difference is not None:
        raise ValueError(f"The posterior was fitted to another model. {difference}.")
    if first_changed(blocks, state["mean"]) is not None:
        raise ValueError(
            "The posterior was fitted around other LoRA weights than the model has now: load "
            "the adapter of the fit."
        )


@exclusive
def sample_adapters(
    la: Any,
    n_samples: int,
    directory: str | Path,
    generator: torch.Generator | None = None,
    **kwargs: Any,
) -> list[Path]:
    """Write draws from the posterior as LoRA adapters, for instance for a multi-adapter server.

    The mean of their softmax probabilities is the prediction of `pred_type="nn"` with as many
    samples and a generator in the same state. LoRA weights outside the posterior, and trained
    modules such as a head, are saved with their MAP values. A mixture divides the draws among its
    members, the first ones getting the rest.

    A prior precision that suits the linearised model is often far too small for drawn weights:
    choose one for them by `method="gridsearch", pred_type="nn", link_approx="mc"`.

    Parameters
    ----------
    n_samples : int
    directory : str or Path
        gets one folder for each draw, "sample_0" and so on, with a configuration and safetensors
        that `PeftModel.from_pretrained` loads
    generator : torch.Generator, optional
    **kwargs
        of `PeftModel.save_pretrained`, such as `save_embedding_layers`

    Returns
    -------
    list of Path
        the folders

    Raises
    ------
    FileExistsError
        If one of the folders exists; nothing is written then.
    ValueError
        If the model holds no `PeftModel`.
    RuntimeError
        If the model is not the fitted one any more.
    """
    check_counts(n_samples=n_samples)
    members = getattr(la, "members", [la])
    folders = new_folders(directory, n_samples)
    drawn_from = sorted(index % len(members) for index in range(n_samples))
    written = []
    for member, folder in zip([members[index] for index in drawn_from], folders, strict=True):
        member.check_model()
        drawn = zip(member.blocks, drawn_weights(member, generator), strict=True)
        weights = {id(block.weight): values for block, values in drawn}
        model, adapter = find_peft_model(member.model), member.blocks[0].adapter
        written.append(write_adapter(model, adapter, weights, folder, **kwargs))
    return written
