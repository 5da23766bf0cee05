"""What methods to choose a prior share: options, a start, a descent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
import tqdm
from torch import Tensor

from laplace_lora_ext.messages import check_counts
from laplace_lora_ext.models.running import as_tensor, cpu_as_default
from laplace_lora_ext.processes.exchange import of_first, rank, together
from laplace_lora_ext.tuning.history import TuningHistory
from laplace_lora_ext.tuning.kinds import kinds_of, number_of

# Limits of a prior precision's logarithm: what float32 holds.
_LOWEST = math.log(torch.finfo(torch.float32).tiny)
_HIGHEST = math.log(torch.finfo(torch.float32).max)
# Options of which some methods have one or more.
_COUNTS = (
    "n_samples",
    "n_steps",
    "grid_size",
    "batch_size",
    "max_examples",
    "max_bytes",
    "trainings",
)
_STRUCTURES = ["scalar", "kind", "layerwise", "diag"]

Prior = Callable[[], Tensor]
"""Makes a prior precision of the leaves of a descent, differentiable in them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TuningMethod:
    """A method to choose the prior: its fields are options; call it to choose.

    A call takes a posterior, or a mixture where the method suits one, and sets all
    hyperparameters at once in the end. So what it chooses does not depend on what
    earlier searches have chosen: `logit_scale` is 1 unless the method chooses it, and
    `sigma_noise` alone stays as it is where no noise is chosen.

    Parameters
    ----------
    init_prior_prec : float or torch.Tensor, default=1.0
        where the search starts. Several numbers also determine the structure
    prior_structure : {"scalar", "kind", "layerwise", "diag"}, optional
        one prior precision, one for each kind of weight (LoRA, heads, others), one for
        each block, or, with "diag" curvature, one for each weight. By default "kind"
        where there are several kinds, as heads want a much smaller one than LoRA
        weights, and otherwise "scalar"
    progress_bar : bool, default=False
    """

    init_prior_prec: float | Tensor = 1.0
    prior_structure: str | None = None
    progress_bar: bool = False

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in _COUNTS if hasattr(self, name)}
        check_counts(**counts)
        if self.prior_structure not in (None, *_STRUCTURES):
            raise ValueError(
                f"prior_structure {self.prior_structure!r} is none of {_STRUCTURES}."
            )

    def __call__(self, la: Any) -> TuningHistory:
        """Choose the hyperparameters of a posterior, and set them."""
        history = self.choose(la)
        la.hyperparameters = history.chosen
        if rank() == 0:
            self.remark(la, history)
        return history

    @torch.inference_mode(False)  # what is kept must not be inference tensors
    @torch.enable_grad()
    @cpu_as_default()
    def choose(self, la: Any) -> TuningHistory:
        """Choose without setting anything: `la` stays as it is."""
        method = self
        if rank() > 0:  # one bar on the screen is enough
            method = replace(self, progress_bar=False)
        with together():
            # What a search tries, it sets on a copy.
            tried = copy(la)
            tried.prior_precision = 1.0
            tried.logit_scale = 1.0
            history = method._search(tried)
            # Ranks may differ in the last digit, and must not drift apart.
            told = of_first(replace(history, posteriors=()))
            return replace(told, posteriors=history.posteriors)

    def remark(self, la: Any, history: TuningHistory) -> None:
        """Warn of a choice that shows that something is amiss."""

    def _search(self, la: Any) -> TuningHistory:
        """Choose for a copy of a posterior, whose attributes may change."""
        raise NotImplementedError

    @property
    def _is_base(self) -> bool:
        """Tell whether the user gave several numbers to start from."""
        return as_tensor(self.init_prior_prec).numel() > 1

    def _kinds(self, la: Any) -> Tensor | None:
        """Number each block's kind, `(blocks,)`, if each kind gets its own prior."""
        if len(la.members) > 1:  # a mixture has a common factor alone
            return None
        kinds = kinds_of(la.blocks)
        by_default = self.prior_structure is None and not self._is_base
        is_of_kinds = by_default and number_of(kinds) > 1
        return kinds if is_of_kinds or self.prior_structure == "kind" else None

    def _leaves(self, la: Any, unit: float = 1.0) -> tuple[Tensor, Prior]:
        """Set the prior to the search's start; return what a descent changes.

        These are logarithms, one for each kind of weight or as many as the start has
        numbers, and a function that makes a prior precision of them. The unit
        multiplies it.
        """
        start = self._start(la)
        kinds = self._kinds(la)
        logarithms = start.log() if kinds is None else start.new_zeros(number_of(kinds))

        def prior_precision() -> Tensor:
            factors = logarithms.exp()
            if kinds is not None:
                factors = factors[kinds.to(factors.device)] * start
            return (unit * factors).clamp(math.exp(_LOWEST), math.exp(_HIGHEST))

        return logarithms.requires_grad_(), prior_precision

    def _start(self, la: Any) -> Tensor:
        """Set the prior to the search's start; return it in float64.

        Its shape is `(1,)`, `(blocks,)` or `(parameters,)`.
        """
        start = as_tensor(self.init_prior_prec).detach()
        # Several numbers are of the structure that they have.
        if start.numel() == 1 and self.prior_structure == "layerwise":
            start = start.expand(len(la.blocks))
        elif start.numel() == 1 and self.prior_structure == "diag":
            start = start.expand(sum(block.n_params for block in la.blocks))
        if not (start > 0).all():
            raise ValueError("init_prior_prec must be above 0.")
        la.prior_precision = start  # raises if the curvature lacks this structure
        return la.prior_precision.detach().double()


def descent(
    loss: Callable[[], Tensor],
    logarithms: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
    n_steps: int,
    description: str,
    progress_bar: bool,
) -> Iterator[tuple[int, Tensor]]:
    """Follow the gradient of a loss, whose leaves `logarithms` change in place.

    Yields each step's number, and the loss before it; the next iteration takes the
    step.
    """
    for step in tqdm.trange(n_steps, desc=description, disable=not progress_bar):
        optimizer.zero_grad()
        value = loss()
        # The caller comes first: it may measure where the loss is, or stop without this
        # step.
        yield step, value
        value.backward()
        optimizer.step()
        for logarithm in logarithms:
            logarithm.detach().clamp_(_LOWEST, _HIGHEST)


def draw_seed(generator: torch.Generator | None) -> int:
    """Draw a seed for another generator; None draws from torch's own state."""
    device = None if generator is None else generator.device
    return int(torch.randint(2**31, (), generator=generator, device=device).item())


def seed_of_search(generator: torch.Generator | None) -> int:
    """Draw the seed of a search, the same on all ranks; without a generator it is 0.

    So a search without one chooses the same in every call.
    """
    return 0 if generator is None else of_first(draw_seed(generator))
