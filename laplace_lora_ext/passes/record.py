"""Records passes: of a whole batch, or of each example alone where examples share rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from laplace_lora_ext.likelihoods import Seeds
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import Block
from laplace_lora_ext.passes.calls import Listener
from laplace_lora_ext.passes.recording import Directions, Recording, Rows, every_output, recorded


class Alone:
    """Examples that were recorded alone, with the interface of a `Recording` of their batch.

    Each brings its own rows; see `Rows`.

    Attributes
    ----------
    logits : torch.Tensor
        `(B, C)`, part of the examples' graphs
    """

    def __init__(self, examples: Sequence[Recording]) -> None:
        self.logits = torch.cat([example.logits for example in examples])
        self._examples = examples

    def visit_inputs(self, visit: Callable[[list[int], Rows], None]) -> None:
        for example in self._examples:
            example.visit_inputs(visit)

    def backward(self, seeds: Seeds, visit: Callable[[Rows], None]) -> None:
        parts = zip(seeds.vectors.split(1, dim=1), seeds.weights.split(1, dim=1), strict=True)
        for example, part in zip(self._examples, parts, strict=True):
            example.backward(Seeds(*part), visit)

    def backward_every_output(
        self,
        visit: Callable[[Rows], None],
        create_graph: bool,
        directions: Directions = every_output,
    ) -> None:
        for example in self._examples:
            example.backward_every_output(visit, create_graph, directions)


@contextmanager
def record(
    model: LogitsModel, blocks: Sequence[Block], x: Any, create_graph: bool = False
) -> Iterator[Recording | Alone]:
    """Run the model on a batch and record the calls of the blocks' layers.

    Where examples share rows, as those of DeBERTa do, the batch would need B backward passes.
    Examples are then recorded alone, if their logits are the same alone as in the batch.

    Within the `with` block the model is in evaluation mode, and no parameter requires grad. Layers
    with gradient checkpointing on are computed again in each backward pass, unless what it gives
    is to have a graph of its own (`create_graph`).

    Raises
    ------
    RuntimeError
        If the logits carry no gradient to the layers that were called.
    ValueError
        If an activation, a logit or a gradient is not finite.
    """
    listener = Listener(blocks)

    def run(inputs: Any) -> Recording:
        recording = recorded(model, blocks, listener, inputs)
        at_end.callback(recording.forget)
        return recording

    model.settle(x)
    with (
        model.prepared(),
        torch.inference_mode(False),
        torch.enable_grad(),
        listener.attached(model, recomputes=not create_graph),
        ExitStack() as at_end,
    ):
        batch = run(x)
        if batch.shares_rows and len(batch.logits) > 1:
            batch.forget()  # its graph is as large as those of all its examples
            yield _alone(model, x, batch.logits, run) or run(x)
        else:
            yield batch


def _alone(
    model: LogitsModel, x: Any, logits: torch.Tensor, run: Callable[[Any], Recording]
) -> Alone | None:
    """The examples of a batch, if their logits are the same alone as in the batch."""
    try:
        examples = [run(example) for example in model.examples(x, len(logits))]
    except Exception:  # what was taken for an example is none to the model
        return None
    alone = Alone(examples) if examples else None
    return alone if alone and model.agree(logits, alone.logits) else None
