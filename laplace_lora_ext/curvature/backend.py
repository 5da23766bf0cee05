"""How the curvature of LoRA weights is summed, and from which seeds."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from laplace_lora_ext.curvature.kron import KroneckerBlock, StreamingUpdates
from laplace_lora_ext.messages import check_count, check_name
from laplace_lora_ext.passes.graph import Rows
from laplace_lora_ext.tasks.task import Draws, Seeds, Task

PAPER_SETTINGS: dict[str, Any] = {
    "kfac_approx": "expand",
    "rank": 10,
    "tail": False,
    "draws": "labels",
}
"""`backend_kwargs` of Yang et al. (ICLR 2024): KFAC-expand, rank 10, no tail.

Labels are drawn where classes are many.
"""

# What can be drawn, and in how many backward passes.
_DRAWS = {"signs": 2, "labels": 8}


# --- the two ways to sum Kronecker factors from inputs and output gradients -----------
#  Shapes: B samples, T positions, S seeds, a weight `(m, n)`; inputs a `(B, T, n)` and
# output gradients g `(S, B, T, m)`. Only what needs the mask of valid positions asks
# for it, since the positions that a layer sees need not be the mask's.


def add_rows(block: KroneckerBlock, updates: StreamingUpdates, rows: Rows) -> None:
    """Add `F_out = Σ_nt g gᵀ` and `F_in = Σ_nt a aᵀ / Σ_n T_n`, over valid positions.

    The setting of the paper (section 3), and KFAC-expand of Eschenhagen et al. (2023).
    """
    if rows.seeds.start == 0:  # the inputs are the same for all
        a = rows.valid(rows.a[None])
        updates.add(block, a, of_outputs=False)
        block.normalizer = block.normalizer + len(a)
    g = rows.valid(rows.g)
    # After the last attention, only the positions that the model pools have a gradient.
    updates.add(block, g[g.any(dim=1)], of_outputs=True)


def add_gradients(block: KroneckerBlock, updates: StreamingUpdates, rows: Rows) -> None:
    """Add `F_out = Σ G Gᵀ` and `F_in = Σ Gᵀ G / Σ ‖G‖²` of `G = Σ_t g_t a_tᵀ`.

    G is the whole gradient of a sample and seed. So this is one step of power iteration
    from the identity towards the Kronecker product nearest to the exact block (Van Loan
    & Pitsianis, 1993); its trace is exact. Padding needs no mask.
    """
    if rows.a.shape[1] == 1:
        of_outputs, of_inputs = _rows_of_one_position(rows.a, rows.g)
    else:
        G = rows.gradient().flatten(0, 1)
        of_outputs, of_inputs = G.mT.flatten(0, 1), G.flatten(0, 1)
    updates.add(block, of_outputs, of_outputs=True)
    energy = updates.add(block, of_inputs, of_outputs=False)
    # Both factors have the trace Σ ‖G‖², and their product is to have it once.
    block.normalizer = block.normalizer + energy


def _rows_of_one_position(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Make rows whose products are those of `G = g aᵀ`: `(S B, m)` and `(B, n)`.

    `G Gᵀ = ‖a‖² g gᵀ` and `Gᵀ G = ‖g‖² a aᵀ` need one row where G has m or n of them,
    as many as a head's layer has outputs or inputs.
    """
    of_outputs = g * a.norm(dim=-1, keepdim=True)
    # Over seeds, too, since an input is the same for all of them.
    (norms,) = torch.linalg.vector_norm(g, dim=(0, -1), keepdim=True)
    return of_outputs.flatten(0, 2), (a * norms).flatten(0, 1)


KFAC_APPROX = {"expand": add_rows, "gradient": add_gradients}


# --- options, and seeds by them -------------------------------------------------------


@dataclass
class LowRankKronGGN:
    """Chooses what is back-propagated for the Fisher, and how its blocks are summed.

    For these likelihoods the Fisher is the generalised Gauss-Newton matrix. It has a
    Kronecker-factored block for each LoRA weight, with a low-rank large factor.

    A batch takes one forward pass, and two backward passes whatever the number of
    classes. The exact Fisher takes C - 1 for C classes, a column of its square root in
    each. Two passes share these columns, with random signs, which is exact up to three
    classes and right on average beyond. `benchmarks/results/signs.md` shows what this
    saves and costs. A regression takes a pass for each output.

    Parameters
    ----------
    rank : int, default=10
        how many eigenvectors to keep of a large factor (the paper's `n_kfac`)
    kfac_approx : {"gradient", "expand"}
        which statistics to sum; see `add_gradients` and `add_rows`
    tail : bool, default=True
        whether the directions beyond the rank keep the mean of their eigenvalues, so
        that the full factor's trace is kept too; the paper drops them
    stochastic : bool, optional
        False for the exact Fisher; by default draws take its place wherever that takes
        fewer passes, but not for a regression. The structures "diag" and "full" have
        every derivative anyway: for them the default is exact
    draws : {"signs", "labels"}
        what is drawn: random signs of the columns, or labels from the model, which
        hardly ever show what the exact Fisher weighs where the model is sure
    num_samples : int, optional
        how many backward passes: by default 2 with signs, and 8 with labels
    seed : int, default=0
        of what is drawn. That depends on it and on the example's place in the data, so
        that other batches, a fit in parts or on several ranks draw the same. Torch's
        random state has no part in it

    Raises
    ------
    ValueError
        For an unknown `kfac_approx` or a negative rank.
    """

    rank: int = 10
    kfac_approx: str = "gradient"
    tail: bool = True
    stochastic: bool | None = None
    draws: str = "signs"
    num_samples: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_name("kfac_approx", self.kfac_approx, KFAC_APPROX)
        check_name("draws", self.draws, _DRAWS)
        rank = self.rank
        if not isinstance(rank, Integral) or rank < 0:
            raise ValueError(f"The rank must be whole, and not negative: {rank!r}.")
        if self.seed < 0:
            raise ValueError(f"The seed must not be negative, but is {self.seed}.")
        if self.num_samples is None:
            self.num_samples = _DRAWS[self.draws]
        check_count("num_samples", self.num_samples)

    def seeds(self, task: Task, logits: Tensor, examples: Tensor) -> Seeds:
        """Choose seeds of a task's exact Fisher, or draw some where they are fewer.

        What is drawn depends on `examples`, `(N,)`: the number in the whole data of the
        example that each row of logits is of.
        """
        assert self.num_samples is not None
        is_drawn = self.stochastic
        if is_drawn is None:
            # The exact Fisher takes a pass for each column, of each token of a text.
            # Those of a regression weigh alike: none is small.
            is_drawn = not task.has_noise and (
                task.has_tokens
                or task.columns_by_size(logits).shape[1] > self.num_samples
            )
        if not is_drawn:
            return task.exact_seeds(logits)
        draw = task.label_seeds if self.draws == "labels" else task.sign_seeds
        return draw(logits, self.num_samples, Draws(self.seed, examples))

    def numbers(self, examples: Tensor) -> Tensor:
        """Draw numbers `(S, N)` that choose tokens' labels; the exact is refused.

        `examples` are as for `seeds`.
        """
        if self.stochastic is False or self.draws != "labels":
            raise NotImplementedError(
                "The exact Fisher would take a backward pass for each word of the "
                "vocabulary at each token, and signs as many numbers: leave out "
                "stochastic and draws, and raise num_samples for less noise."
            )
        assert self.num_samples is not None
        return Draws(self.seed, examples).uniform(self.num_samples)
