"""Writes a posterior: into a folder, to the Hugging Face hub, or as adapters with drawn weights."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import huggingface_hub
import torch

from laplace_lora_ext.files import write_posterior
from laplace_lora_ext.messages import check_counts
from laplace_lora_ext.models.adapters import find_peft_model, new_folders, write_adapter
from laplace_lora_ext.models.locks import exclusive
from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.predictive.networks import drawn_weights


@exclusive
def save_pretrained(la: Posterior, folder: str | Path) -> None:
    """Write the posterior into a folder, such as that of the adapter.

    `laplace_lora_ext.from_pretrained(model, folder)` reads it. There are two files,
    "laplace_posterior.safetensors" and "laplace_posterior.json".

    Parameters
    ----------
    folder : str or Path
        made if it does not exist
    """
    summary = {
        "evidence": la.log_marginal_likelihood().item(),
        "mean_prior_precision": la.prior_precision.mean().item(),
        "n_data": la.n_data,
    }
    write_posterior(folder, la.state_dict(), summary)


@exclusive
def push_to_hub(la: Posterior, repo_id: str, **kwargs: Any) -> Any:
    """Upload the adapter and the posterior to the Hugging Face hub.

    Parameters
    ----------
    repo_id : str
        made if it does not exist
    **kwargs
        of `huggingface_hub.upload_folder`, such as `token` and `commit_message`

    Returns
    -------
    huggingface_hub.CommitInfo
    """
    la._check_model()
    with TemporaryDirectory() as folder:
        save_pretrained(la, folder)
        find_peft_model(la.model).save_pretrained(folder)
        huggingface_hub.create_repo(repo_id, exist_ok=True, token=kwargs.get("token"))
        return huggingface_hub.upload_folder(repo_id=repo_id, folder_path=folder, **kwargs)


@exclusive
def sample_adapters(
    la: Posterior,
    n_samples: int,
    directory: str | Path,
    generator: torch.Generator | None = None,
    **kwargs: Any,
) -> list[Path]:
    """Write draws from the posterior as LoRA adapters, for instance for a multi-adapter server.

    The mean of their softmax probabilities is the prediction of `pred_type="nn"` with as many
    samples and a generator in the same state. LoRA weights outside the posterior, and trained
    modules such as a head, are saved with their MAP values.

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
    return [
        write_draw(la, folder, generator, **kwargs) for folder in new_folders(directory, n_samples)
    ]


@exclusive
def write_draw(
    la: Posterior, folder: Path, generator: torch.Generator | None, **kwargs: Any
) -> Path:
    """Write one draw as an adapter into a folder, and return where it is."""
    la._check_model()
    drawn = zip(la.blocks, drawn_weights(la, generator), strict=True)
    weights = {id(block.weight): values for block, values in drawn}
    model, adapter = find_peft_model(la.model), la.blocks[0].adapter
    return write_adapter(model, adapter, weights, folder, **kwargs)
