"""Calls of LoRA layers in a forward pass: what each was given, and where its gradient arrives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from laplace_lora_ext.models.checkpointed import checkpointed
from laplace_lora_ext.models.lora_layers import Block
from laplace_lora_ext.passes.unbatched import Unbatched
from laplace_lora_ext.undoing import removing_hooks


class Call:
    """A call of a layer, which keeps its input, or has it computed again with its region.

    Attributes
    ----------
    rows : torch.Size
        shape of what the layer returned as rows, without their size m
    input_key : tuple of int
        the same where another call of the pass was given the same tensor
    edge : torch.autograd.graph.GradientEdge
        where gradients of what it returned arrive
    """

    def __init__(
        self, block: Block, inputs: torch.Tensor, output: torch.Tensor, region: Region | None
    ) -> None:
        self.rows = block.rows.row_shape(output)
        self.input_key = id(region), id(inputs)
        self.edge = get_gradient_edge(output)
        self._region = region
        self._input: torch.Tensor | None = inputs
        self._version = _version(inputs)
        self._was_overwritten = False

    @property
    def input(self) -> torch.Tensor:
        """What the layer was given."""
        if self._input is None and self._region is not None:
            self._region.recompute()
        assert self._input is not None
        return self._input

    @property
    def is_overwritten(self) -> bool:
        """Whether the model has changed the input since, as `x += block(x)` does."""
        kept = self._input
        return self._was_overwritten or (kept is not None and _version(kept) != self._version)

    @property
    def is_recomputed(self) -> bool:
        """Whether the input can be computed again."""
        return self._region is not None

    def computed_again(self, inputs: torch.Tensor) -> None:
        """Take the input of another computation."""
        self._input, self._version = inputs, _version(inputs)

    def release(self) -> None:
        """Let go of an input that can be computed again."""
        if self.is_recomputed:
            self._was_overwritten = self.is_overwritten
            self._input = None


class Region:
    """A part of the model that forgets its activations: backward passes compute them again.

    Parameters
    ----------
    function : callable
        the part
    """

    def __init__(self, function: Callable) -> None:
        self.function = function
        self.calls: list[Call] = []
        self.passed = 0  # calls that the running computation has passed
        self._end: Any = None

    @property
    def is_new(self) -> bool:
        """Whether its first computation is running."""
        return self._end is None

    def finish(self) -> None:
        """Note that a computation is at its end, and let go of the inputs of the first one.

        A number is saved for the backward pass. Whoever asks for it gets the region computed again
        up to here, with all of its calls.
        """
        end = torch.ones((), requires_grad=True).exp().grad_fn
        if self.is_new:
            self._end = end
            for call in self.calls:
                call.release()

    def recompute(self) -> None:
        """Compute it again, at most once in a backward pass."""
        _ = self._end._saved_result

    def forget(self) -> None:
        """Let go of the graph, whose saved tensors in turn hold the region."""
        self.calls.clear()
        self._end = None


@dataclass(frozen=True)
class Heard:
    """What was heard in a pass.

    Attributes
    ----------
    calls : list of lists of Call
        of each block's layer, but for those that the model makes without gradients
    regions : list of Region
    called : set of int
        indices of the blocks whose layers were called, without gradients too
    """

    calls: list[list[Call]]
    regions: list[Region] = field(default_factory=list)
    called: set[int] = field(default_factory=set)

    def forget(self) -> None:
        """Let go of the graph."""
        self.calls.clear()
        for region in self.regions:
            region.forget()


class Listener:
    """Hears the calls of some blocks' layers: those of recorded passes, and computations again.

    Parameters
    ----------
    blocks : sequence of Block
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        self._heard: Heard | None = None
        self._copied: Collection[str] = ()
        self._region: Region | None = None

    @contextmanager
    def attached(self, model: nn.Module, recomputes: bool) -> Iterator[None]:
        """Listen within; on leaving, no hook is left.

        Hooks of the user's, which may change what a layer returns, come later. With `recomputes`,
        layers with gradient checkpointing on are regions.
        """
        with removing_hooks() as handles:
            for index, block in enumerate(self._blocks):
                hear = partial(self._hear, index)
                handles.append(block.layer.register_forward_hook(hear, prepend=True))
            with checkpointed(model, self._as_region) if recomputes else nullcontext():
                yield

    @contextmanager
    def recording(self, copied: Collection[str]) -> Iterator[Heard]:
        """Hear the calls within; inputs of blocks `copied` are copies."""
        heard = Heard([[] for _ in self._blocks])
        self._heard, self._copied = heard, copied
        try:
            yield heard
        except BaseException:
            heard.forget()
            raise
        finally:
            self._heard = None

    def _hear(
        self, index: int, _: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> torch.Tensor:
        """A forward hook that lets the output require grad, and keeps what the layer was given."""
        if self._heard is not None:
            self._heard.called.add(index)
        if not torch.is_grad_enabled():  # as where an indexer of sparse attention picks keys
            return output
        if not output.requires_grad:  # nothing trainable comes before the layer
            output = output + output.new_zeros((), requires_grad=True)
        block, region = self._blocks[index], self._region
        inputs = args[0].clone() if block.name in self._copied else args[0]
        if region is not None and not region.is_new:
            region.calls[region.passed].computed_again(inputs)
            region.passed += 1
        elif self._heard is not None:
            call = Call(block, inputs, output, region)
            self._heard.calls[index].append(call)
            if region is not None:
                region.calls.append(call)
        return output

    def _as_region(self, function: Callable) -> Callable:
        region = Region(function)
        if self._heard is not None:
            self._heard.regions.append(region)
        return partial(self._computed, region)

    def _computed(self, region: Region, *args: Any) -> Any:
        """Compute a region, for the first time or again."""
        if region.is_new:
            return self._compute(region, *args)
        Unbatched.apply(torch.zeros(()), lambda _: self._compute(region, *args))

    @torch.enable_grad()
    def _compute(self, region: Region, *args: Any) -> Any:
        outer, self._region = self._region, region
        region.passed = 0
        try:
            outputs = region.function(*args)
            region.finish()
            return outputs
        finally:
            self._region = outer


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
