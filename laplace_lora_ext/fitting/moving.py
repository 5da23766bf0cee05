"""A posterior goes where its model has gone: to other devices, or into another precision."""

from __future__ import annotations

import torch

from laplace_lora_ext.models.posterior import Posterior


def places_of(la: Posterior) -> list[tuple[torch.device, torch.dtype]]:
    """Device and precision of what is over all blocks, and of each block."""
    return [(la._device, la._dtype), *(block.place for block in la.blocks)]


@torch.inference_mode(False)  # what is kept must not be inference tensors
def follow(posterior: Posterior) -> None:
    """Move a posterior and its prior to where the model's LoRA weights are now."""
    now = places_of(posterior)
    if now == posterior._places:
        return
    if posterior.n_data:
        sums = posterior._packed(posterior._sums())
        posterior._adopt(posterior._unpacked(sums), posterior.n_data)
        posterior.mean = posterior.mean.to(*now[0])
        posterior.loss = posterior.loss.to(posterior._device)
    if posterior.learnt_variance is not None:
        posterior.learnt_variance = posterior.learnt_variance.to(*now[0])
    for name in ("prior_precision", "prior_mean", "sigma_noise"):
        setattr(posterior, name, getattr(posterior, name))  # the host moves what it is given
    posterior._backend = None  # the host's keeps buffers that the model has replaced
    posterior._places = now
