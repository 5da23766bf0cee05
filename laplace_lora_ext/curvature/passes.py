"""One forward pass through a model, and backward passes that bring (a, g) of each block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from laplace_lora_ext.curvature.hooks import Tape, Visit
from laplace_lora_ext.curvature.statistics import Valid
from laplace_lora_ext.errors import naming
from laplace_lora_ext.logits_model import LogitsModel
from laplace_lora_ext.lora_layers import Block
from laplace_lora_ext.positions import Positions

# Rows that a backward pass should have: with fewer, products leave the machine half idle, and what
# is done once a pass and layer counts. Measured on two cores; see "What it costs" in the README.
_ROWS = 512


class ForwardPass:
    """A recorded forward pass; made by `forward_pass`.

    Attributes
    ----------
    logits : torch.Tensor
        `(B, C)`, part of the graph
    """

    def __init__(
        self, blocks: Sequence[Block], tape: Tape, logits: torch.Tensor, positions: Positions
    ) -> None:
        self._blocks = blocks
        self._tape = tape
        self.logits = logits
        self._positions = positions

    def visit_inputs(self, visit: Callable[[list[int], torch.Tensor, Valid], None]) -> None:
        """Call `visit(indices, a, valid)` for each call of the layers of blocks `indices`.

        Blocks whose layers were given the same tensors, as `lora_A` of query, key and value
        projections are, come together. `a` is `(B, T, n)`, in the dtype of statistics, and
        `valid()` its `(B, T)` mask or None.
        """
        sharing: dict[tuple[Any, ...], list[int]] = {}
        for index, block in enumerate(self._blocks):
            calls = tuple(id(a) for a in self._tape.inputs(index))
            sharing.setdefault((block.statistics_dtype, *calls), []).append(index)
        for indices in sharing.values():
            first = indices[0]
            with self._mathematics(first, self.logits.device):
                for a in self._tape.inputs(first):
                    a = self._arrange(first, a.detach())
                    visit(indices, a, partial(self._positions.valid, a.shape[1]))

    def backward(
        self,
        vectors: torch.Tensor,
        weights: torch.Tensor,
        visit: Callable[[int, torch.Tensor, torch.Tensor, Valid], None],
    ) -> None:
        """Back-propagate `(S, B, C)` seeds and call `visit(index, a, g, valid)` for each block.

        `a` is `(B, T, n)` and `g`, scaled by the `(S, B)` weights, `(s, B, T, m)`, where T counts
        the positions of all calls of the layer, and `valid()` `(B, T)` or None. Each pass takes
        `s` of the seeds: one, unless so few rows go through the layers that more make it faster.
        """
        rows = max(
            sum(a.shape[:-1].numel() for a in self._tape.inputs(index))
            for index in range(len(self._blocks))
        )
        at_once = max(1, _ROWS // max(1, rows))
        groups = list(zip(vectors.split(at_once), weights.split(at_once), strict=True))
        for number, (seeds, scales) in enumerate(groups):
            scaled = partial(self._visit_scaled, visit, scales)
            retain_graph = number < len(groups) - 1
            self._tape.backward(self.logits, seeds, self._joined(scaled), retain_graph)

    def _visit_scaled(
        self,
        visit: Callable[[int, torch.Tensor, torch.Tensor, Valid], None],
        scales: torch.Tensor,
        index: int,
        a: torch.Tensor,
        g: torch.Tensor,
        n_calls: int,
    ) -> None:
        def valid() -> torch.Tensor | None:
            mask = self._positions.valid(a.shape[1] // n_calls)
            return None if mask is None else mask.repeat(1, n_calls)

        visit(index, a, g * scales.to(g)[..., None, None], valid)

    def jacobians(
        self, visit: Callable[[int, torch.Tensor, torch.Tensor], None], create_graph: bool
    ) -> None:
        """Back-propagate the identity, `(C, B, C)`, at once and call `visit(index, a, g)`.

        `a` is `(B, T, n)` and `g` `(C, B, T, m)`.
        """
        n_samples, n_outputs = self.logits.shape
        seeds = torch.eye(n_outputs).to(self.logits)[:, None]
        seeds = seeds.expand(n_outputs, n_samples, n_outputs)
        joined = self._joined(lambda index, a, g, n_calls: visit(index, a, g))
        self._tape.backward(self.logits, seeds, joined, create_graph=create_graph)

    def _joined(self, visit: Callable[[int, torch.Tensor, torch.Tensor, int], None]) -> Visit:
        """A visit that joins the calls of a layer along their positions."""

        def joined(index: int, inputs: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
            with self._mathematics(index, gradients[0].device):
                a = [self._arrange(index, call) for call in inputs]
                g = [
                    torch.stack([self._arrange(index, seed) for seed in call]) for call in gradients
                ]
                visit(index, torch.cat(a, dim=1), torch.cat(g, dim=2), len(inputs))

        return joined

    def _arrange(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        return self._positions.arrange(rows).to(self._blocks[index].statistics_dtype)

    @contextmanager
    def _mathematics(self, index: int, device: torch.device) -> Iterator[None]:
        """Full precision within; what goes wrong names the layer."""
        name = f"LoRA layer {self._blocks[index].name}"
        with naming(name), torch.autocast(device.type, enabled=False):
            yield


@contextmanager
def forward_pass(model: LogitsModel, blocks: Sequence[Block], x: Any) -> Iterator[ForwardPass]:
    """Run the model on a batch and record the calls of the blocks' layers.

    Parameters
    ----------
    model : LogitsModel
        is in evaluation mode within the `with` block, with no parameter requiring grad
    blocks : sequence of Block
    x : Mapping or torch.Tensor
        inputs of B examples

    Raises
    ------
    RuntimeError
        If a layer was not called, or the logits carry no gradient.
    ValueError
        If an activation or a logit is not finite.
    """
    with (
        model.prepared(),
        torch.inference_mode(False),
        torch.enable_grad(),
        Tape([block.layer for block in blocks]) as tape,
    ):
        logits = model(x)
        _check_called(blocks, tape)
        _check_finite(blocks, tape, logits)
        if not logits.requires_grad:
            raise RuntimeError(
                "The logits carry no gradient to the LoRA layers: the model detaches them, or runs "
                "under torch.no_grad."
            )
        yield ForwardPass(blocks, tape, logits, model.positions(x, len(logits)))


def visit_jacobians(
    model: LogitsModel,
    blocks: Sequence[Block],
    x: Any,
    visit: Callable[[int, torch.Tensor], None],
    enable_backprop: bool = False,
) -> torch.Tensor:
    """One forward and one batched backward pass that give Jacobians block by block.

    Parameters
    ----------
    model : LogitsModel
    blocks : sequence of Block
    x : Mapping or torch.Tensor
        inputs of B examples
    visit : callable
        receives a block's index and its Jacobian `(B, C, m, n)`, 0 where the logits don't
        depend on the block. Only one block's is held at a time
    enable_backprop : bool, default=False
        whether Jacobians and logits are differentiable in the inputs

    Returns
    -------
    torch.Tensor
        logits, `(B, C)`

    Raises
    ------
    ValueError, RuntimeError
        As `forward_pass`, and where a gradient is not finite.
    """
    unreached = set(range(len(blocks)))

    def take(index: int, a: torch.Tensor, g: torch.Tensor) -> None:
        unreached.discard(index)
        jacobian = per_sample_gradients(a, g).transpose(0, 1)
        if not torch.isfinite(jacobian.sum()):
            raise ValueError("non-finite numbers")
        visit(index, jacobian)

    with forward_pass(model, blocks, x) as recorded:
        recorded.jacobians(take, create_graph=enable_backprop)
        n_samples, n_outputs = recorded.logits.shape
        for index in unreached:
            weight, dtype = blocks[index].weight, blocks[index].statistics_dtype
            visit(index, weight.new_zeros(n_samples, n_outputs, *weight.shape, dtype=dtype))
        return recorded.logits if enable_backprop else recorded.logits.detach()


def jacobians(
    model: LogitsModel, blocks: Sequence[Block], x: Any, enable_backprop: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Jacobians of the logits in all blocks' weights at once.

    Returns
    -------
    Js : torch.Tensor
        `(B, C, parameters)`, in the order of the blocks
    f : torch.Tensor
        `(B, C)`
    """
    parts: dict[int, torch.Tensor] = {}
    device = blocks[0].weight.device

    def keep(index: int, jacobian: torch.Tensor) -> None:
        parts[index] = jacobian.flatten(-2).to(device)

    f = visit_jacobians(model, blocks, x, keep, enable_backprop)
    return torch.cat([parts[index] for index in range(len(blocks))], dim=-1), f


def per_sample_gradients(a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Gradients of a linear layer's weight for each seed and sample, `Σ_t g_t a_tᵀ`.

    Parameters
    ----------
    a : torch.Tensor
        inputs, `(B, T, n)`
    g : torch.Tensor
        output gradients, `(S, B, T, m)`

    Returns
    -------
    torch.Tensor
        `(S, B, m, n)`
    """
    return torch.einsum("bti,sbto->sboi", a, g)


def _check_called(blocks: Sequence[Block], tape: Tape) -> None:
    silent = [block.name for index, block in enumerate(blocks) if not tape.inputs(index)]
    if silent:
        raise RuntimeError(
            f"{len(silent)} of {len(blocks)} LoRA layers were bypassed in the forward pass, such "
            f"as {silent[0]}: a compiled model or a fused kernel does not run them as modules. "
            "Pass the model as it was before torch.compile or fusion."
        )


def _check_finite(blocks: Sequence[Block], tape: Tape, logits: torch.Tensor) -> None:
    if torch.isfinite(logits).all():
        return
    for index, block in enumerate(blocks):
        for tensor in (*tape.inputs(index), *tape.outputs(index)):
            if not torch.isfinite(tensor).all():
                raise ValueError(f"LoRA layer {block.name}: non-finite activations")
    raise ValueError("non-finite logits, though every LoRA layer's activations are finite")
