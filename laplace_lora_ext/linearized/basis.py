"""The directions along which Jacobians of different examples are compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from laplace_lora_ext.curvature.backend import LowRankKronGGN
from laplace_lora_ext.curvature.matrix import LowRankKron, LowRankKronDecomposed
from laplace_lora_ext.fitting.sums import added
from laplace_lora_ext.likelihoods import Likelihood
from laplace_lora_ext.messages import naming
from laplace_lora_ext.models.batches import named_batches
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import Block
from laplace_lora_ext.predictive.statistics import upper_triangle


class Basis:
    """Orthonormal directions of each block's large side, and inner products of what they leave out.

    A Jacobian `(r, d)` of a block has the features `J U`, with U the directions. Features of two
    examples have the inner product of their Jacobians but for what both have outside of U; of one
    example, the inner products outside of U are kept as they are.

    Parameters
    ----------
    H : LowRankKronDecomposed
        a curvature, whose eigenvectors come first
    n_features : int, optional
        about how many features of an output there are in all blocks: fewer eigenvectors, or random
        directions beside them. Those that the curvature keeps if omitted
    generator : torch.Generator, optional
        of the random directions

    Attributes
    ----------
    feature_block : torch.Tensor
        `(features,)`, index of the block that each feature belongs to
    """

    def __init__(
        self,
        H: LowRankKronDecomposed,
        n_features: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        rows = [len(block.small.values) for block in H.blocks]
        columns = None if n_features is None else max(1, n_features // sum(rows))
        self._directions = [
            _directions(block.large.vectors, columns, generator) for block in H.blocks
        ]
        sizes = [r * U.shape[1] for r, U in zip(rows, self._directions, strict=True)]
        self.feature_block = torch.arange(len(rows)).repeat_interleave(torch.tensor(sizes))

    def __call__(self, index: int, jacobian: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a block's Jacobians `(B, C, r, d)`, features `(B, C, r k)` and the rest's products.

        These are the upper triangles, `(B, C (C + 1) / 2)`.
        """
        U = self._directions[index]
        features = jacobian @ U
        rest = jacobian - features @ U.mT if U.shape[1] < len(U) else jacobian[..., :0]
        rest = rest.flatten(2)
        return features.flatten(2), upper_triangle(rest @ rest.mT)


def eigenbasis(
    model: LogitsModel, blocks: Sequence[Block], likelihood: Likelihood, loader: Iterable[Any]
) -> LowRankKronDecomposed:
    """Pass over the data for a curvature with eigenvectors, where a posterior has none."""
    backend = LowRankKronGGN(model, likelihood.name, blocks=blocks)
    H = backend.zeros()
    for name, batch in named_batches(loader):
        with naming(name):
            backend.accumulate(H, *model.split(batch))
    places = [block.place for block in blocks]
    H = added(H, LowRankKron.state_dict, partial(LowRankKron.from_state_dict, places=places))
    return H.cut().decompose()


def _directions(
    vectors: torch.Tensor, columns: int | None, generator: torch.Generator | None
) -> torch.Tensor:
    """`(d, columns)` orthonormal directions that begin with the given ones."""
    size, kept = vectors.shape
    if columns is None or columns == kept:
        return vectors
    if columns >= size:
        return torch.eye(size).to(vectors)
    if columns < kept:
        return vectors[:, :columns]
    source = vectors.device if generator is None else generator.device
    random = torch.randn(size, columns - kept, generator=generator, device=source).to(vectors)
    return torch.linalg.qr(torch.cat([vectors, random], dim=1)).Q
