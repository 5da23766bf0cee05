"""Graphs of forward passes, and backward passes that bring gradients to layers."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch._C._functorch as functorch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor, nn
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd.graph import Node

from laplace_lora_ext.messages import warn
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.running import Checkpoints
from laplace_lora_ext.models.weights import Block, LinearRows

# Rows that a backward pass should have: with fewer, products leave the machine half
# idle, and what is done once a pass and layer counts. Measured on two cores by `python
# -m benchmarks cost`.
_ROWS = 512


@dataclass
class Layouts:
    """What passes have learnt of a model, so that later ones need not."""

    # The size of the largest batch that proved a site's rows to be each example's own.
    # A site is the name of a LoRA layer, whose halves see the same rows, and which of
    # how many calls of it.
    proven: dict[tuple[str, int, int], int] = field(default_factory=dict)
    # Rows of some batch were not each example's own, or none are seen.
    examples_apart: bool = False
    # How many seeds a backward pass may take at most: one where a kernel can't run
    # under `torch.func.vmap`, fewer than before where memory did not suffice.
    seeds_at_most: float = math.inf
    # Indices of the blocks that passes have used, since whoever asks emptied it: whose
    # layers were called, or whose whole gradient there is.
    used: set[int] = field(default_factory=set)
    has_warned: bool = False  # of what whole gradients cost


def check_logits(logits: Tensor) -> None:
    """Refuse logits that are not finite."""
    # A finite sum says so many times faster, which tells for logits of a vocabulary;
    # but sums of finite numbers may overflow.
    if torch.isfinite(logits.detach().sum()):
        return
    if not torch.isfinite(logits).all():
        raise ValueError(
            "non-finite logits: check the batch, and the model's precision"
        )


def check_differentiable(requires_grad: bool) -> None:
    """Refuse passes whose logits don't require grad."""
    if not requires_grad:
        raise RuntimeError(
            "No gradient of the logits reaches the LoRA layers: remove .detach() or "
            "torch.no_grad() from the model's forward pass."
        )


class Call:
    """A call of a block's layer, as a pass has noted it."""

    def __init__(
        self,
        index: int,
        layer: str,
        inputs: Tensor,
        output: Tensor,
    ) -> None:
        self.index = index  # of the block
        self.layer = layer  # the name of its weight
        self.rows = output.shape[:-1]  # shape of what it returned, without their size m
        # None once nobody asks for them: the graph has them too, or computes them anew.
        self.inputs: Tensor | None = inputs
        self.version = _version(inputs)
        # Of the graph, where gradients of the output pass.
        self.node: Node | None = None
        self.backward_pass: _Pass | None = None  # that runs now


@dataclass(frozen=True)
class Arrived:
    """What a backward pass brought to a block's layer, an entry for each call."""

    index: int  # of the block
    seeds: slice
    calls: list[Call] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    # `(S, ...)`, of what they returned.
    gradients: list[Tensor] = field(default_factory=list)


class _Tap(torch.autograd.Function):
    """Hands a layer's input and gradient to the backward pass.

    The input is saved as autograd saves all that a backward pass needs: where a
    checkpointed layer is computed anew, it is computed anew as well.
    """

    # Without a `setup_context`, for which torch would read a signature at each call.
    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        anchor: Tensor,
        inputs: Tensor,
        call: Call,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inputs)
        ctx.call = call
        return output.clone()  # the model may change in place what it gets

    @staticmethod
    def backward(
        ctx: Any,
        *gradients: Tensor | None,
    ) -> Any:
        (gradient,) = gradients
        call: Call = ctx.call
        backward_pass = call.backward_pass
        # No pass of ours runs where the user differentiates what one has returned.
        if gradient is not None and backward_pass is not None:
            (inputs,) = ctx.saved_tensors
            if _version(inputs) != call.version:
                raise _overwritten(call.layer)
            arrive = partial(backward_pass.arrive, call, inputs)
            if backward_pass.is_batched:
                _outside_vmap(gradient, arrive)
            else:
                arrive(gradient[None])
        # On to the layers before this one; nothing else that `forward` got has a
        # gradient.
        return gradient, None, None, None


class Graph:
    """Logits `(B, C)`, with the calls of layers behind them."""

    def __init__(
        self,
        logits: Tensor,
        calls: Sequence[Sequence[Call]],
        anchor: Tensor,
        layouts: Layouts,
    ) -> None:
        self.logits = logits
        self.calls = list(calls)
        self._anchor = anchor
        self._layouts = layouts

    @property
    def seeds_at_once(self) -> int:
        """Say how many seeds one backward pass should take."""
        # A layer with more rows than others, as of all tokens, makes up most of the
        # time.
        most_rows = 1
        for of_layer in self.calls:
            n_rows = sum(call.rows.numel() for call in of_layer)
            most_rows = max(most_rows, n_rows)
        return max(1, _ROWS // most_rows)

    def back_propagate(
        self,
        vectors: Tensor,
        at_once: int,
        deliver: Callable[[Arrived], None],
        *,
        retain_graph: bool,
        create_graph: bool = False,
    ) -> None:
        """Make backward passes with `(S, B, C)` vectors, `at_once` of them in each.

        What arrives at each layer is delivered as soon as it is known, so that few
        gradients are in memory at a time. Some kernels can't run under
        `torch.func.vmap`, such as those that write into their arguments. Then seeds go
        one by one, from then on; half as many at once where memory does not suffice.
        """
        if not any(self.calls):  # none has a gradient
            return
        way = _Way(deliver, retain_graph, create_graph)
        n_seeds = len(vectors)
        for start in range(0, n_seeds, at_once):
            stop = min(start + at_once, n_seeds)
            self._propagate(vectors, slice(start, stop), way, delivered=set())

    def _propagate(
        self,
        vectors: Tensor,
        seeds: slice,
        way: _Way,
        delivered: set[int],
    ) -> None:
        """Bring some seeds to layers not yet `delivered` theirs, in few passes."""
        n_seeds = seeds.stop - seeds.start
        if n_seeds == 1:
            is_last = seeds.stop == len(vectors)
            with _Pass(self.calls, seeds, way.deliver, delivered, way.create_graph):
                retain_graph = way.retain_graph or not is_last
                self._grad(vectors[seeds.start], retain_graph, way.create_graph)
            return
        refused = ""
        if n_seeds <= self._layouts.seeds_at_most:
            together = _Pass(
                self.calls,
                seeds,
                way.deliver,
                delivered,
                way.create_graph,
                is_batched=True,
            )
            try:
                self._batched(vectors[seeds], way, together)
                return
            except RuntimeError as error:
                if together.is_delivering:  # the fault is not the pass's
                    raise
                if should_reduce_batch_size(error):
                    self._layouts.seeds_at_most = n_seeds // 2
                else:
                    refused = str(error) or type(error).__name__
            if not refused:  # the error has gone, and with it what did not fit
                clear_device_cache(garbage_collection=True)
            # It has brought some layers theirs before it failed.
            delivered = together.delivered
        step = 1 if refused else int(self._layouts.seeds_at_most)
        for start in range(seeds.start, seeds.stop, step):
            fewer = slice(start, min(start + step, seeds.stop))
            self._propagate(vectors, fewer, way, set(delivered))
        if refused:  # and one by one is not: the fault was batching's
            self._layouts.seeds_at_most = 1
            reason, *_ = refused.splitlines()
            warn(
                "The model has an operation that can't run under torch.func.vmap "
                f"({reason}): backward passes, of which several could be made at once, "
                "are made one by one."
            )

    def _batched(self, vectors: Tensor, way: _Way, together: _Pass) -> None:
        """Back-propagate several seeds in one pass."""

        def grad(vector: Tensor) -> Tensor:
            # If the pass fails, the graph is needed again.
            self._grad(vector, True, way.create_graph)
            return vector.new_zeros(())

        with together, warnings.catch_warnings():
            # Where an operation has no batching rule, vmap runs it once a seed: as
            # good.
            warnings.filterwarnings("ignore", "There is a performance drop")
            torch.func.vmap(grad)(vectors)

    def _grad(self, vector: Tensor, retain_graph: bool, create_graph: bool) -> None:
        # Every call leads to the anchor, which needs no gradient itself: of layers, no
        # gradient of anything has to be kept to the end of the pass.
        torch.autograd.grad(
            self.logits,
            self._anchor,
            vector,
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=True,
        )


@dataclass(frozen=True)
class _Way:
    """How a graph is passed back through, and what takes what arrives."""

    deliver: Callable[[Arrived], None]
    retain_graph: bool
    create_graph: bool


class _Pass:
    """A backward pass: gathers what arrives at each layer's calls, and delivers it.

    Layers that have been `delivered` theirs, maybe by an earlier pass, are passed over.
    """

    def __init__(
        self,
        calls: Sequence[Sequence[Call]],
        seeds: slice,
        deliver: Callable[[Arrived], None],
        delivered: set[int],
        create_graph: bool,
        is_batched: bool = False,
    ) -> None:
        self.is_batched = is_batched
        self._create_graph = create_graph
        self.seeds = seeds
        self.delivered = delivered
        self.is_delivering = False
        self._calls = calls
        self._deliver = deliver
        self._waiting: dict[int, Arrived] = {}

    def __enter__(self) -> None:
        for of_layer in self._calls:
            for call in of_layer:
                call.backward_pass = self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        *_: object,
    ) -> None:
        for of_layer in self._calls:
            for call in of_layer:
                call.backward_pass = None
        if kind is None:
            # Not all of the layer's calls had a gradient. Within the pass autograd has
            # switched gradients off by itself.
            with torch.set_grad_enabled(self._create_graph):
                for index in sorted(self._waiting):
                    self._finish(index)

    def arrive(
        self,
        call: Call,
        inputs: Tensor,
        gradients: Tensor,
    ) -> None:
        """Take what came to a call; deliver what its layer got, once that is all."""
        index = call.index
        if index in self.delivered:
            return
        if index not in self._waiting:
            self._waiting[index] = Arrived(index, self.seeds)
        arrived = self._waiting[index]
        arrived.calls.append(call)
        arrived.inputs.append(inputs)
        arrived.gradients.append(gradients)
        if len(arrived.calls) == len(self._calls[index]):
            self._finish(index)

    def _finish(self, index: int) -> None:
        # Stays true if the visitor fails, so that its error is not taken for one of
        # vmap's.
        self.is_delivering = True
        self._deliver(self._waiting.pop(index))
        self.is_delivering = False
        self.delivered.add(index)


def _outside_vmap(tensor: Tensor, receive: Callable[[Tensor], None]) -> None:
    """Hand a tensor to a function that then runs outside of `torch.func.vmap`.

    The tensor gets a leading dimension: that of `vmap`, or one of size 1 where it is
    the same for all seeds. An `autograd.Function` with a `vmap` of its own does the
    same by public means, and takes longer than a layer's backward pass.
    """
    dim = functorch.maybe_get_bdim(tensor)
    if dim < 0:
        physical = tensor[None]
    else:
        physical = functorch.get_unwrapped(tensor).movedim(dim, 0)
    with retrieve_current_functorch_interpreter().lower():
        receive(physical)


class Taps:
    """Hooks on the blocks' layers that note calls; `tapped` sets them."""

    def __init__(
        self,
        blocks: Sequence[Block],
        layouts: Layouts,
        *,
        keeps_inputs: bool,
    ) -> None:
        self._blocks = blocks
        self._layouts = layouts
        self._keeps_inputs = keeps_inputs
        # What all backward passes are asked for. Weights of layers that are called
        # require no gradient, and a pass goes no further than it must.
        self._anchor = torch.zeros((), requires_grad=True)
        self._calls: list[list[Call]] | None = None  # of the pass that runs now
        self._called: set[int] = set()
        self.checkpoints = Checkpoints()

    def run(self, compute: Callable[[], Tensor]) -> Graph:
        """Compute logits by the model; errors are those of `Recorder.record`."""
        calls: list[list[Call]] = [[] for _ in self._blocks]
        self._calls, self._called = calls, set()
        try:
            logits = compute()
        finally:
            self._calls = None
        check_logits(logits)
        if self._called:
            check_differentiable(logits.requires_grad)
        for of_layer in calls:
            for call in of_layer:
                if call.inputs is not None and _version(call.inputs) != call.version:
                    raise _overwritten(call.layer)
                if not self._keeps_inputs:  # the graph has what backward passes need
                    call.inputs = None
        self._layouts.used.update(self._called)
        if self._keeps_inputs:
            calls = _counting(calls, logits)
        return Graph(logits, calls, self._anchor, self._layouts)

    def hear(
        self,
        index: int,
        layer: nn.Module,
        args: tuple[Tensor, ...],
        output: Tensor,
    ) -> Tensor:
        """Note a call of a block's layer, and tap what it returned."""
        self._called.add(index)
        # As where an indexer of sparse attention picks keys.
        if not torch.is_grad_enabled():
            refuse_reentrant()
            return output
        (inputs, *_) = args
        if inputs.is_inference():  # autograd can't save it
            inputs = inputs.clone()
        block = self._blocks[index]
        assert isinstance(block.rows, LinearRows)  # `tapped` hears no others
        inputs = block.rows.multiply_prior(inputs)
        call = Call(index, block.name, inputs, output)
        tapped = _Tap.apply(output, self._anchor, inputs, call)
        # A checkpointed layer is computed anew for a backward pass.
        if self._calls is None:
            return tapped
        if self._keeps_inputs:
            call.node = tapped.grad_fn
        elif self.checkpoints.n_open:
            call.inputs = None  # before the layer's other activations go
        self._calls[index].append(call)
        return tapped


@contextmanager
def tapped(
    model: LogitsModel,
    blocks: Sequence[Block],
    layouts: Layouts,
    *,
    checkpointed: bool = True,
    keeps_inputs: bool = False,
) -> Iterator[Taps]:
    """Note calls of the blocks' layers within, also where they are recomputed.

    With `checkpointed`, layers that the user's training checkpoints are so here too,
    and unless `keeps_inputs` is asked for, the inputs of LoRA layers are computed anew
    with them.
    """
    taps = Taps(blocks, layouts, keeps_inputs=keeps_inputs)
    with ExitStack() as hooks:
        for index, block in enumerate(blocks):
            if not isinstance(block.rows, LinearRows):
                continue
            # Before the user's hooks, which may change outputs.
            hear = partial(taps.hear, index)
            handle = block.rows.layer.register_forward_hook(hear, prepend=True)
            hooks.callback(handle.remove)
        if checkpointed:
            hooks.enter_context(taps.checkpoints.of(model.tree))
        yield taps


def refuse_reentrant() -> None:
    """Refuse a call of a layer within reentrant checkpointing, which gives it no graph.

    An `autograd.Function` of the model's own code is then among the callers.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_code is not LogitsModel.forward.__code__:
        code = frame.f_code
        if code.co_name == "forward" and code.co_varnames[:1] == ("ctx",):
            raise _reentrant()
        frame = frame.f_back


def _reentrant() -> NotImplementedError:
    return NotImplementedError(
        "The model's own code uses reentrant checkpointing, which hides gradients from "
        "fits and predictions: pass use_reentrant=False where it calls "
        "torch.utils.checkpoint."
    )


def _overwritten(layer: str) -> NotImplementedError:
    return NotImplementedError(
        f"The model overwrites what the layer of {layer} was given: write x = x + y in "
        "place of x += y, or leave the layer out with target_modules."
    )


def _counting(calls: Sequence[Sequence[Call]], logits: Tensor) -> list[list[Call]]:
    """Select the calls that logits depend on: DoRA makes others, for a norm."""
    # Without recursion: the graph of a deep model is deeper than Python's stack.
    nodes: set[Node] = set()
    waiting: list[Node | None] = [logits.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            waiting += [before for before, _ in node.next_functions]
    counting = [[call for call in of_layer if call.node in nodes] for of_layer in calls]
    # A node holds its call: together they would keep the graph, and all that it has
    # saved, until Python's garbage collector comes by.
    for of_layer in calls:
        for call in of_layer:
            call.node = None
    return counting


def _version(tensor: Tensor) -> int:
    """Count changes in place; inference tensors, which can't tell, have none."""
    return 0 if tensor.is_inference() else tensor._version
