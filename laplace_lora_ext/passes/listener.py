"""Runs a model and notes the calls of its LoRA layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from laplace_lora_ext.models.checkpointed import checkpointed
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import Block
from laplace_lora_ext.passes.checks import (
    check_differentiable,
    check_logits,
    is_finite,
    name_first_bad_layer,
)
from laplace_lora_ext.passes.graph import Call, Graph, outside_vmap


class Listener:
    """Runs a model while it listens to some blocks' layers.

    Parameters
    ----------
    model : LogitsModel
    blocks : sequence of Block
    """

    def __init__(self, model: LogitsModel, blocks: Sequence[Block]) -> None:
        self._model = model
        self._blocks = blocks
        self._calls: list[list[Call]] | None = None  # of the pass that is running
        self._called: set[int] = set()  # indices of blocks, without gradients too
        self._copied: set[str] = model.layouts.setdefault("copied inputs", set())

    @contextmanager
    def attached(self, recomputes: bool) -> Iterator[None]:
        """Listen within; on leaving, no hook is left.

        Hooks of the user's, which may change what a layer returns, come later. With `recomputes`,
        layers with gradient checkpointing on are computed again in each backward pass.
        """
        again = checkpointed(self._model, outside_vmap) if recomputes else nullcontext()
        with ExitStack() as hooks, again:
            for index, block in enumerate(self._blocks):
                hear = partial(self._hear, index)
                hooks.callback(block.layer.register_forward_hook(hear, prepend=True).remove)
            yield

    def run(self, x: Any) -> Graph:
        """Call the model on a batch; once more if it overwrites what a layer was given.

        Raises
        ------
        ValueError
            If an activation or a logit is not finite.
        RuntimeError
            If the logits carry no gradient to the layers that were called.
        """
        while True:
            logits, calls = self._run(x)
            overwritten = {
                block.name
                for block, of_layer in zip(self._blocks, calls, strict=True)
                if any(call.is_overwritten for call in of_layer)
            }
            if overwritten <= self._copied:
                break
            self._copied |= overwritten
            del logits, calls  # two graphs take twice the memory
        if not is_finite(logits):
            name_first_bad_layer(self._model, self._blocks, x)
            check_logits(logits)
        if self._called:
            check_differentiable(logits.requires_grad)
        return Graph(logits, calls)

    def _run(self, x: Any) -> tuple[torch.Tensor, list[list[Call]]]:
        self._calls = calls = [[] for _ in self._blocks]
        self._called.clear()
        try:
            return self._model(x), calls
        finally:
            self._calls = None

    def _hear(
        self, index: int, _: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> torch.Tensor:
        """A forward hook that lets the output require grad, and notes the call."""
        self._called.add(index)
        if not torch.is_grad_enabled():  # as where an indexer of sparse attention picks keys
            return output
        if not output.requires_grad:  # nothing trainable comes before the layer
            output = output + output.new_zeros((), requires_grad=True)
        if self._calls is not None:  # else a checkpointed part is computed again
            block = self._blocks[index]
            inputs = args[0].clone() if block.name in self._copied else args[0]
            self._calls[index].append(Call(inputs, output))
        return output
