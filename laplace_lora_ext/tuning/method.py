"""What methods to choose a prior share: options, a start, a history, a descent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import tqdm
from laplace.utils import fix_prior_prec_structure
from torch import Tensor, nn

from laplace_lora_ext.likelihoods import Likelihood
from laplace_lora_ext.messages import check_counts, warn
from laplace_lora_ext.models.running import as_tensor, exclusive
from laplace_lora_ext.predictive.distributions import Linearised
from laplace_lora_ext.predictive.statistics import PredictiveStatistics
from laplace_lora_ext.processes.exchange import count, of_first, rank, together
from laplace_lora_ext.tuning.kinds import Kinds

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


@dataclass(frozen=True)
class Hyperparameters:
    """What a search may change of a posterior, named as its attributes."""

    prior_precision: Tensor
    sigma_noise: Tensor
    temperature: float | Tensor
    logit_scale: float


class Fitted(Linearised, Protocol):
    """A posterior around one adapter, as a search sees it."""

    trained_likelihood: Likelihood

    @property
    def sigma_noise(self) -> Tensor: ...

    @sigma_noise.setter
    def sigma_noise(self, value: float | Tensor) -> None: ...


class Predictor(Protocol):
    """What predicts by a prior precision: a posterior, or a mixture."""

    @property
    def members(self) -> Sequence[Fitted]: ...

    @property
    def prior_precision(self) -> Tensor: ...

    @prior_precision.setter
    def prior_precision(self, value: float | Tensor) -> None: ...

    @property
    def logit_scale(self) -> float: ...

    @logit_scale.setter
    def logit_scale(self, value: float | Tensor) -> None: ...

    def check_model(self) -> None: ...

    def statistics_of(
        self,
        loader: Any,
        progress_bar: bool,
        link_approx: str = ...,
    ) -> Any: ...

    def statistics_by_batch(
        self,
        link_approx: str = ...,
    ) -> Callable[[Any], Any] | None: ...

    def __call__(
        self,
        x: Any,
        **options: Any,
    ) -> Any: ...


class Tunable(Linearised, Predictor, Protocol):
    """A posterior as all methods to choose its prior precision need it."""

    trained_likelihood: Likelihood
    n_data: int
    loss: Tensor

    @property
    def backend(self) -> object: ...

    @property
    def hyperparameters(self) -> Hyperparameters: ...

    @hyperparameters.setter
    def hyperparameters(self, values: Hyperparameters) -> None: ...

    @property
    def sigma_noise(self) -> Tensor: ...

    @sigma_noise.setter
    def sigma_noise(self, value: float | Tensor) -> None: ...

    @property
    def logit_scale(self) -> float: ...

    @logit_scale.setter
    def logit_scale(self, value: float | Tensor) -> None: ...

    @property
    def posterior_precision(self) -> object: ...

    @property
    def log_det_posterior_precision(self) -> Tensor: ...

    def log_marginal_likelihood(
        self,
        prior_precision: Tensor | None = None,
        sigma_noise: Tensor | None = None,
    ) -> Tensor: ...

    def statistics_of(
        self,
        loader: Any,
        progress_bar: bool,
        link_approx: str = ...,
        max_examples: int | None = ...,
    ) -> PredictiveStatistics | None: ...

    def bytes_of_statistics(self, link_approx: str = ...) -> int | None: ...

    def for_model(self, model: nn.Module) -> Any: ...


@dataclass(frozen=True, repr=False)
class TuningHistory:
    """What a search for a prior precision tried, ready to plot.

    Attributes
    ----------
    step : torch.Tensor
        `(T,)` number of the step, or of the point of a grid
    objective : torch.Tensor
        `(T,)`, float64: the loss, with the penalty of the scale, or the log marginal
        likelihood
    prior_precision : torch.Tensor
        `(T, 1)`, `(T, blocks)` or `(T, parameters)`, where the objective was evaluated
    logit_scale : torch.Tensor, optional
        `(T,)`, float64: the best scale of the logits at each prior precision; None
        where the method chooses none
    sigma_noise : torch.Tensor, optional
        `(T,)`, float64: the noise of a regression at each prior precision, as
        `logit_scale`
    posteriors : tuple of LoRALaplace
        those that the method has fitted to other trainings
    """

    step: Tensor
    objective: Tensor
    prior_precision: Tensor
    logit_scale: Tensor | None = None
    sigma_noise: Tensor | None = None
    posteriors: tuple[Any, ...] = ()

    def __repr__(self) -> str:
        low, high = (value.item() for value in self.prior_precision.aminmax())
        return (
            f"TuningHistory({len(self.step)} prior precisions from {low:.3g} "
            f"to {high:.3g})"
        )


class HistoryBuilder:
    """Gathers a history, step by step."""

    def __init__(self) -> None:
        self.objectives: list[float] = []
        self._steps: list[int] = []
        self._rows: list[Tensor] = []

    def add(
        self,
        step: int,
        objective: float,
        prior_precision: Tensor,
    ) -> None:
        """Record a step; an objective that is not a number is refused."""
        # On the CPU, so that a history to plot holds no memory of an accelerator.
        row = prior_precision.detach().flatten().cpu()
        if math.isnan(objective):
            span = f"from {row.min().item():.3g} to {row.max().item():.3g}"
            raise ValueError(
                f"The objective is not a number at prior precisions {span}."
            )
        self.objectives.append(objective)
        self._steps.append(step)
        self._rows.append(row)

    def history(self) -> TuningHistory:
        """Put what was recorded into tensors."""
        return TuningHistory(
            step=torch.tensor(self._steps),
            objective=torch.tensor(self.objectives, dtype=torch.float64),
            prior_precision=torch.stack(self._rows),
        )


def check_grid(history: TuningHistory) -> None:
    """Refuse losses that are never finite on a grid; warn of equal ones."""
    losses = history.objective
    if not losses.isfinite().any():
        raise ValueError("The validation loss is finite nowhere on the grid: check it.")
    if len(losses) > 1 and (losses == losses[0]).all():
        warn(
            "The validation loss is the same at every point of the grid. Pass a loss "
            "that depends on the predictive variance; the mean squared error of the "
            "mean, for one, does not."
        )


@dataclass(frozen=True, eq=False)
class Searched:
    """A prior precision that a descent changes, by logarithms or factors.

    Attributes
    ----------
    logarithms : torch.Tensor
        the leaves of the descent; one for each kind of weight, or as many as the start
        has numbers
    start : torch.Tensor
        what the factors multiply
    kinds : Kinds or None
    """

    logarithms: Tensor
    start: Tensor
    kinds: Kinds | None

    def value(self) -> Tensor:
        """Compute the prior precision, differentiable in the logarithms."""
        factors = self.logarithms.exp()
        if self.kinds is not None:
            factors = self.kinds.spread(factors)
        prior_precision = factors * self.start
        return prior_precision.clamp(math.exp(_LOWEST), math.exp(_HIGHEST))


@dataclass(frozen=True, kw_only=True, eq=False)
class TuningMethod:
    """A method to choose the prior: its fields are options; call it to choose.

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

    @exclusive  # no thread predicts by a prior precision that is only tried
    @torch.inference_mode(False)  # what is kept must not be inference tensors
    @torch.enable_grad()
    def __call__(self, la: Tunable) -> TuningHistory:
        """Choose the prior precision of a posterior; errors restore the old one."""
        before = la.hyperparameters
        try:
            with together():
                history = self.choose(la)
                if rank() == 0:
                    self.remark(la, history)
                return history
        # An interrupted search has a prior that is only tried, too.
        except BaseException:
            la.hyperparameters = before
            raise

    def choose(self, la: Tunable) -> TuningHistory:
        """Choose without remarks and without undoing errors, for another method."""
        method = self
        if rank() > 0:  # one bar on the screen is enough
            method = replace(self, progress_bar=False)
        history = method._search(la)
        if count() > 1:
            # Ranks may differ in the last digit, and must not drift apart.
            device = la.members[0].model.device
            la.prior_precision = of_first(la.prior_precision).to(device)
            la.logit_scale = of_first(la.logit_scale)
            if len(la.members) == 1:  # a mixture has no noise of its own
                la.sigma_noise = of_first(la.sigma_noise).to(device)
            history = replace(
                history,
                step=of_first(history.step),
                objective=of_first(history.objective),
                prior_precision=of_first(history.prior_precision),
                logit_scale=of_first(history.logit_scale),
                sigma_noise=of_first(history.sigma_noise),
            )
        return history

    def remark(self, la: Tunable, history: TuningHistory) -> None:
        """Warn of a choice that shows that something is amiss."""

    def _search(self, la: Tunable) -> TuningHistory:
        raise NotImplementedError

    @property
    def _is_base(self) -> bool:
        """Tell whether the user gave several numbers to start from."""
        return as_tensor(self.init_prior_prec).numel() > 1

    def _kinds(self, la: Tunable) -> Kinds | None:
        """List the kinds of weights, if each gets a prior precision of its own."""
        members = la.members
        if len(members) > 1:  # a mixture has a common factor alone
            return None
        kinds = Kinds.of(members[0].blocks)
        by_default = (
            self.prior_structure is None and not self._is_base and len(kinds) > 1
        )
        return kinds if by_default or self.prior_structure == "kind" else None

    def _searched(self, la: Tunable) -> Searched:
        """Set the prior to the search's start, and return what a descent changes."""
        start = self._start(la)
        kinds = self._kinds(la)
        if kinds is None:
            return Searched(start.log().requires_grad_(), torch.ones_like(start), None)
        return Searched(start.new_zeros(len(kinds)).requires_grad_(), start, kinds)

    def _start(self, la: Tunable) -> Tensor:
        """Set the prior to the search's start.

        Its shape is `(1,)`, `(blocks,)` or `(parameters,)`.

        It is returned in float64.
        """
        first = la.members[0]
        start = as_tensor(self.init_prior_prec).detach()
        # Several numbers are of the structure that they have.
        if start.numel() == 1 and self.prior_structure in ("layerwise", "diag"):
            start = fix_prior_prec_structure(
                start,
                self.prior_structure,
                n_layers=len(first.blocks),
                n_params=sum(block.n_params for block in first.blocks),
                device=first.model.device,
                dtype=first.blocks[0].statistics_dtype,
            )
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
    """Draw a seed for another generator."""
    if generator is None:  # torch's own
        seed = torch.randint(2**31, ())
    else:
        seed = torch.randint(2**31, (), generator=generator, device=generator.device)
    return int(seed.item())
