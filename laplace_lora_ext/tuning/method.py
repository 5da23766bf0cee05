"""What all methods to choose a prior precision share: where they start, and what they need."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from laplace.utils import fix_prior_prec_structure

from laplace_lora_ext.messages import check_counts
from laplace_lora_ext.models.locks import as_tensor
from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.processes.exchange import count, of_first, rank, together
from laplace_lora_ext.tuning.history import TuningHistory

# Options of some methods.
_COUNTS = ("n_samples", "n_steps", "grid_size", "batch_size", "max_examples", "trainings")
_STRUCTURES = ["scalar", "layerwise", "diag"]


@dataclass(frozen=True, kw_only=True, eq=False)
class TuningMethod:
    """A method to choose the prior precision: its fields are options; call it with a posterior.

    Parameters
    ----------
    init_prior_prec : float or torch.Tensor, default=1.0
        where the search starts. Several numbers also determine the structure
    prior_structure : {"scalar", "layerwise", "diag"}
        one prior precision, one for each block, or, with "diag" curvature, one for each weight
    progress_bar : bool, default=False
    """

    init_prior_prec: float | torch.Tensor = 1.0
    prior_structure: str = "scalar"
    progress_bar: bool = False

    def __post_init__(self) -> None:
        check_counts(**{name: getattr(self, name) for name in _COUNTS if hasattr(self, name)})
        if self.prior_structure not in _STRUCTURES:
            raise ValueError(f"prior_structure {self.prior_structure!r} is none of {_STRUCTURES}.")

    def __call__(self, la: Posterior) -> TuningHistory:
        """Choose the prior precision of a fitted `LoRALaplace`; an error restores the old one."""
        method = self if rank() == 0 else replace(self, progress_bar=False)
        with la.trying(), together():
            history = method._search(la)
            if count() > 1:  # ranks may differ in the last digit
                la.prior_precision = of_first(la.prior_precision).to(la.model.device)
                tried = history.step, history.objective, history.prior_precision
                history = TuningHistory(*of_first(tried), history.n_examples, history.posteriors)
            return history

    def _search(self, la: Posterior) -> TuningHistory:
        raise NotImplementedError

    @property
    def _is_base(self) -> bool:
        """Whether the user gave several numbers to start from."""
        return as_tensor(self.init_prior_prec).numel() > 1

    def _start(self, la: Posterior) -> torch.Tensor:
        """Where the search starts: `(1,)`, `(blocks,)` or `(parameters,)`, in float64."""
        start: Any = as_tensor(self.init_prior_prec).detach()
        if start.numel() == 1 and self.prior_structure != "scalar":
            weights = [block.weight.numel() for block in la.blocks]
            where = la.model.device, la.blocks[0].statistics_dtype
            shape = self.prior_structure, len(weights), sum(weights)
            start = fix_prior_prec_structure(start, *shape, *where)
        if not (start > 0).all():
            raise ValueError("init_prior_prec must be above 0.")
        la.prior_precision = start  # raises if the curvature lacks this structure
        return la.prior_precision.detach().double()
