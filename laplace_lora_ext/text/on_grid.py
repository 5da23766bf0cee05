"""Shared by methods that evaluate the same draws at each point of a grid of priors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch

from laplace_lora_ext.messages import naming
from laplace_lora_ext.models.batches import named_batches
from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.processes.exchange import gathered, one_generator
from laplace_lora_ext.text.draws import Noise
from laplace_lora_ext.text.grid import interpolation
from laplace_lora_ext.text.joined import TextPasses
from laplace_lora_ext.text.perturbations import Perturbation
from laplace_lora_ext.tuning.history import Recorder, TuningHistory
from laplace_lora_ext.tuning.method import TuningMethod


class TextPosterior(Posterior, Protocol):
    """A fitted posterior of a language model."""

    H: Any
    model: Any  # a TokensModel

    def way(self, batch: Any) -> Perturbation: ...

    def tokens(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]: ...


class Drawn(NamedTuple):
    """Logits `(N, V)` of a draw at one point of the grid."""

    place: int
    logits: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class OnGrid(TuningMethod):
    """Draws from the linearised model, with the same noise at every point of a grid of priors.

    Products with the Jacobian at a few prior precisions give those at all others, see
    `laplace_lora_ext.text.grid`.

    Parameters
    ----------
    init_prior_prec : float or torch.Tensor
        several numbers are a base, which the grid multiplies; a single number is not used
    prior_structure, progress_bar
        as for `TuningMethod`
    n_samples : int, default=10
        how many draws
    generator : torch.Generator, optional
        for the draws
    log_prior_prec_min, log_prior_prec_max, grid_size, log_prior_prec_base
        the grid
    """

    n_samples: int = 10
    generator: torch.Generator | None = None
    log_prior_prec_min: float = -1
    log_prior_prec_max: float = 5
    grid_size: int = 25
    log_prior_prec_base: float = 10.0

    def _of_batch(
        self, f: torch.Tensor, tokens: torch.Tensor, drawn: Iterable[Drawn]
    ) -> torch.Tensor:
        """`(grid_size, N)` numbers to average, from the model's logits, labels and draws."""
        raise NotImplementedError

    def _means(self, la: TextPosterior, loader: Iterable[Any], stride: int = 1) -> TuningHistory:
        """The mean of `_of_batch` along the grid, over the tokens of every `stride`-th batch."""
        base = self._start(la) if self._is_base else torch.ones(1, dtype=torch.float64)
        grid = self._grid()
        points = (grid[:, None] * base.cpu()).to(la._device)
        found = interpolation(grid, relative_eigenvalues(la, base.to(la._device)))
        at_nodes = (found.nodes[:, None] * base.cpu()).to(la.H.deltas)
        precisions = [la.H * la._H_factor.detach() + deltas for deltas in at_nodes]
        noise = Noise.seeded(self.n_samples, one_generator(self.generator))
        sums, n_tokens, n_texts = torch.zeros(len(grid), dtype=torch.float64), 0, 0
        batches = loader if stride == 1 else islice(loader, 0, None, stride)
        for name, batch in named_batches(batches, "[Grid of priors]", self.progress_bar):
            with naming(name), la.model.prepared(), torch.no_grad():
                f, tokens = la.tokens(batch)
                drawn = _drawn(la, batch, f, noise, precisions, found.coefficients)
                sums += self._of_batch(f, tokens, drawn).double().sum(1).cpu()
                n_tokens += len(tokens)
                n_texts += len(batch[la.dict_key_y])
        of_ranks = gathered((sums, n_tokens, n_texts))
        n_tokens = sum(n for _, n, _ in of_ranks)
        if not n_tokens:
            raise ValueError("The loader has no data.")
        means = torch.stack([part for part, _, _ in of_ranks]).sum(0) / n_tokens
        recorder = Recorder()
        for index, (mean, point) in enumerate(zip(means, points, strict=True)):
            recorder.add(index, mean.item(), point)
        return recorder.history(sum(n for _, _, n in of_ranks))

    def _grid(self) -> torch.Tensor:
        low, high = self.log_prior_prec_min, self.log_prior_prec_max
        base, size = self.log_prior_prec_base, self.grid_size
        return torch.logspace(low, high, size, base=base, dtype=torch.float64)


def _drawn(
    la: TextPosterior,
    batch: Any,
    f: torch.Tensor,
    noise: Noise,
    precisions: list[Any],
    coefficients: torch.Tensor,
) -> Iterator[Drawn]:
    """Each draw at each point of the grid, from products at the nodes."""
    way, passes = la.way(batch), TextPasses(la.model, la.blocks, batch)
    for index in range(noise.n_samples):
        directions = (noise.direction(index, precision, la.blocks) for precision in precisions)
        products = list(passes.drawn(way, directions, len(precisions), torch.zeros_like(f)))
        for place, row in enumerate(coefficients.tolist()):
            logits = f.clone()
            for coefficient, product in zip(row, products, strict=True):
                logits.add_(product, alpha=coefficient)
            yield Drawn(place, logits)


def relative_eigenvalues(la: TextPosterior, base: torch.Tensor) -> torch.Tensor:
    """Eigenvalues of the curvature, each divided by the base of its block."""
    spectrum, by_block = la.H.spectrum, base.expand(len(la.H))
    leading = spectrum.leading / by_block[spectrum.leading_block]
    remaining = spectrum.remaining / by_block[spectrum.remaining_block]
    return la._H_factor.detach() * torch.cat([leading, remaining])
