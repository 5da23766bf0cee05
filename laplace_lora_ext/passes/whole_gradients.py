"""Gradients of whole weights: plain autograd, one example and one vector at a time.

Hooks see the rows of linear layers. Fused experts, embeddings, convolutions and rows of
tokens have none that can be seen. An adapter with such a weight is passed over example
by example, where the gradient of each of its weights is that example's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace_lora_ext.messages import naming, warn
from laplace_lora_ext.models.weights import Block, read, without_rows
from laplace_lora_ext.passes.graph import Layouts
from laplace_lora_ext.passes.recording import Gradients, Part, Visitor


@dataclass(frozen=True)
class GradientsOfMatrix(Gradients):
    """Gradients of a matrix, of one example."""

    of_matrix: Tensor  # `(S, 1, m, n)`

    def of_weight(self) -> Tensor:
        return self.of_matrix


class WholeRecording:
    """A batch whose examples are passed over one by one; `Recorder.record` makes it.

    Nothing is added to any `.grad`. It has what a `Recording` has.
    """

    def __init__(
        self,
        logits: Tensor,
        blocks: Sequence[Block],
        parts: Callable[[], Iterable[Part]],
        create_graph: bool,
        layouts: Layouts,
    ) -> None:
        self.logits = logits  # (B, C)
        self._blocks = blocks
        self._parameters = list({id(b.weight): b.weight for b in blocks}.values())
        self._parts = parts
        self._create_graph = create_graph
        self._layouts = layouts

    def backward(
        self,
        vectors: Tensor,
        visitor: Visitor,
        *,
        weights: Tensor | None = None,
        at_once: int | None = None,
    ) -> None:
        """Back-propagate `(S, B, C)` vectors, and bring a visitor weights' gradients.

        They are scaled by `(S, B)` weights. However many vectors may come `at_once`,
        each takes a pass of its own.
        """
        self._warn(len(vectors))
        for part in self._parts():
            of_example = None if weights is None else part.weights(weights)
            with torch.autocast(vectors.device.type, enabled=False):
                for seed, vector in enumerate(part.vectors(vectors)):
                    # The graph of a batch may be needed for the next of its examples.
                    is_last = part.positions is not None and seed == len(vectors) - 1
                    scale = None if of_example is None else of_example[seed]
                    self._visit(part, seed, vector, scale, visitor, is_last)
            del part  # before the next one is recorded

    def _visit(
        self,
        part: Part,
        seed: int,
        vector: Tensor,
        scale: Tensor | None,
        visitor: Visitor,
        is_last: bool,
    ) -> None:
        """Bring a visitor gradients that are not 0: an example reaches few experts."""
        logits = part.graph.logits
        if not logits.requires_grad:
            return
        gradients = torch.autograd.grad(
            logits,
            self._parameters,
            vector,
            retain_graph=self._create_graph or not is_last,
            create_graph=self._create_graph,
            allow_unused=True,
        )
        of_parameters = dict(zip(map(id, self._parameters), gradients, strict=True))
        matrices: dict[int, Tensor] = {}
        for index, block in enumerate(self._blocks):
            gradient = of_parameters[id(block.weight)]
            if gradient is not None:
                matrices[index] = block.matrix(gradient)
        self._layouts.used.update(matrices)
        are_reached = read([matrix.any() for matrix in matrices.values()])
        for index, is_reached in zip(matrices, are_reached, strict=True):
            if not is_reached:
                continue
            block = self._blocks[index]
            with naming(f"weight {block.name}"):
                scaled = matrices[index].to(block.statistics_dtype)
                if scale is not None:
                    scaled = scaled * scale.to(scaled)
                visitor.gradients(
                    GradientsOfMatrix(
                        index=index,
                        example=part.example,
                        seeds=slice(seed, seed + 1),
                        of_matrix=scaled[None, None],
                    )
                )

    def _warn(self, n_vectors: int) -> None:
        """Say once which matrices make passes slow, and how many each example takes."""
        if self._layouts.has_warned:
            return
        self._layouts.has_warned = True
        slow = without_rows(self._blocks)
        warn(
            f"{len(slow)} of {len(self._blocks)} matrices, such as {slow[0].name}, are "
            "of no linear layer that is called: for their gradients each example takes "
            f"a forward pass and {n_vectors} backward passes of its own. Leave them "
            "out with target_modules to have whole batches at once."
        )
