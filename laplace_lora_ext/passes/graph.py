"""Graphs of forward passes, and backward passes that bring each block its rows."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch._C._functorch as functorch
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor, nn
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

from laplace_lora_ext.messages import warn
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.tree import checkpointing
from laplace_lora_ext.models.weights import Block, LinearRows, read, without_rows

# Rows that a backward pass should have: with fewer, products leave the machine half
# idle, and what is done once a pass and layer counts. Measured on two cores by `python
# -m benchmarks cost`.
_ROWS = 512


@dataclass
class Layouts:
    """What passes have learnt of a model, so that later ones need not."""

    # The size of the largest batch that proved a layer's rows to be each example's own,
    # by the layer's site and by how many times it was called.
    proven: dict[tuple[str, int], int] = field(default_factory=dict)
    # Rows of some batch were not each example's own, or none are seen.
    examples_apart: bool = False
    # Whether several seeds can share a pass: no kernel refuses `torch.func.vmap`. None
    # before the first of such passes.
    is_batchable: bool | None = None
    # How many seeds a backward pass may take: one where more did not fit into memory.
    seeds_at_most: float = math.inf
    # Indices of the blocks that passes have used, since whoever asks emptied it: whose
    # layers were called with a graph, or whose whole gradient there is.
    used: set[int] = field(default_factory=set)
    has_warned: bool = False  # of what whole gradients cost


@dataclass(frozen=True, eq=False)
class Rows:
    """What backward passes bring to a block: its gradient is `Σ_t g_t a_tᵀ`.

    Inputs and gradients of outputs are by example, in the statistics' dtype. T counts
    the positions of all calls of a layer, since calls of one weight add up.
    """

    index: int  # of the block
    seeds: slice  # which of the vectors
    a: Tensor  # `(B, T, n)`
    g: Tensor  # `(S, B, T, m)`
    lengths: list[int]  # positions of each call

    def gradient(self) -> Tensor:
        """Compute gradients of the matrix, `(S, B, m, n)`."""
        return self.g.mT @ self.a


Take = Callable[[Rows], None]


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


class _Tap(torch.autograd.Function):
    """Hands a layer's input and gradient to the backward pass that runs.

    The input is saved as autograd saves all that a backward pass needs: where a
    checkpointed layer is computed anew, it is computed anew as well.
    """

    # Without a `setup_context`, for which torch would read a signature at each call.
    @staticmethod
    def forward(
        ctx: Any, output: Tensor, anchor: Tensor, inputs: Tensor, taps: Taps, index: int
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inputs)
        ctx.taps, ctx.index = taps, index
        return output.clone()  # the model may change in place what it gets

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        (gradient,) = gradients
        # No pass of ours runs where the user differentiates what one has returned.
        backward_pass = ctx.taps.backward_pass
        if gradient is not None and backward_pass is not None:
            backward_pass.arrive(ctx.index, *ctx.saved_tensors, gradient)
        # On to the layers before this one; nothing else that `forward` got has a
        # gradient.
        return gradient, None, None, None, None


class Taps:
    """Hooks on the blocks' layers, which note calls and tap their outputs."""

    def __init__(self, blocks: Sequence[Block], layouts: Layouts) -> None:
        self.blocks = blocks
        self.layouts = layouts
        # What all backward passes are asked for. Weights of layers that are called
        # require no gradient, and a pass goes no further than it must.
        self.anchor = torch.zeros((), requires_grad=True)
        self.backward_pass: _Pass | None = None  # that runs now
        # Shapes of what each layer's calls returned, without its size, in the forward
        # pass that runs now.
        self._shapes: list[list[torch.Size]] | None = None
        self._is_called = False

    def run(self, compute: Callable[[], Tensor]) -> Graph:
        """Compute logits by the model; errors are those of `Recorder.record`."""
        shapes: list[list[torch.Size]] = [[] for _ in self.blocks]
        self._shapes, self._is_called = shapes, False
        try:
            logits = compute()
        finally:
            self._shapes = None
        check_logits(logits)
        if self._is_called and not logits.requires_grad:
            raise RuntimeError(
                "No gradient of the logits reaches the LoRA layers: remove .detach() "
                "or torch.no_grad() from the model's forward pass, and pass "
                "use_reentrant=False where it calls torch.utils.checkpoint."
            )
        self.layouts.used.update(i for i, calls in enumerate(shapes) if calls)
        kind = WholeGraph if without_rows(self.blocks) else Graph
        return kind(logits, shapes, self)

    def tap(
        self, index: int, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor
    ) -> Tensor:
        """Note a call of a block's layer, and tap what it returned."""
        self._is_called = True
        # As where an indexer of sparse attention picks keys.
        if not torch.is_grad_enabled():
            return output
        # None where a checkpointed layer is computed anew for a backward pass.
        if self._shapes is not None:
            self._shapes[index].append(output.shape[:-1])
        rows = self.blocks[index].rows
        assert isinstance(rows, LinearRows)  # no others have taps
        inputs = rows.of_inputs(args[0])
        if inputs.is_inference():  # autograd can't save it
            inputs = inputs.clone()
        return _Tap.apply(output, self.anchor, inputs, self, index)


@contextmanager
def tapped(
    model: LogitsModel,
    blocks: Sequence[Block],
    layouts: Layouts,
    *,
    checkpointed: bool = True,
) -> Iterator[Taps]:
    """Tap the blocks' layers within, also where they are recomputed.

    With `checkpointed`, layers that the user's training checkpoints are so here too.
    """
    taps = Taps(blocks, layouts)
    with ExitStack() as undoing:
        # Where one has no rows, whole gradients are taken of all.
        for index, block in enumerate([] if without_rows(blocks) else blocks):
            assert isinstance(block.rows, LinearRows)
            # Before the user's hooks, which may change outputs.
            tap = partial(taps.tap, index)
            handle = block.rows.layer.register_forward_hook(tap, prepend=True)
            undoing.callback(handle.remove)
        if checkpointed:
            undoing.enter_context(checkpointing(model.tree))
        yield taps


class Graph:
    """Logits `(N, C)`, and the layers behind them."""

    def __init__(
        self, logits: Tensor, shapes: list[list[torch.Size]], taps: Taps
    ) -> None:
        self.logits = logits
        # Of the rows of each block's calls.
        self.shapes = shapes
        self._taps = taps

    def back_propagate(
        self,
        vectors: Tensor,
        n_examples: int,
        take: Take,
        *,
        at_once: int | None = None,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        """Make backward passes with `(S, N, C)` vectors, `at_once` of them in each.

        By default one, unless so few rows go through the layers that more are faster.
        What a block gets is taken as soon as it is there, so that few gradients are in
        memory at a time.
        """
        n_seeds = len(vectors)
        if not n_seeds or not any(self.shapes):  # none has a gradient
            return
        layouts = self._taps.layouts
        at_once = int(min(at_once or self._seeds_at_once, layouts.seeds_at_most))
        if at_once > 1 and n_seeds > 1 and not self._is_batchable(vectors):
            at_once = 1
        for start in range(0, n_seeds, at_once):
            seeds = slice(start, min(start + at_once, n_seeds))
            arrange = partial(self._arrange, seeds, n_examples, take)
            keep = retain_graph or seeds.stop < n_seeds
            self._pass(vectors[seeds], arrange, keep, create_graph)

    @property
    def _seeds_at_once(self) -> int:
        # A layer with more rows than others, as of all tokens, makes up most of the
        # time.
        most = max(sum(shape.numel() for shape in calls) for calls in self.shapes)
        return max(1, _ROWS // max(1, most))

    def _is_batchable(self, vectors: Tensor) -> bool:
        """Find out once whether several seeds can share a pass, and warn if not.

        Some kernels can't run under `torch.func.vmap`, such as those that write into
        their arguments.
        """
        layouts = self._taps.layouts
        if layouts.is_batchable is None:

            def ignore(*_: Any) -> None:
                pass

            try:
                self._pass(vectors[:2], ignore, retain_graph=True)
                layouts.is_batchable = True
            except RuntimeError as error:
                if should_reduce_batch_size(error):
                    raise
                # An error of the model's own is met again, one by one.
                self._pass(vectors[:1], ignore, retain_graph=True)
                layouts.is_batchable = False
                reason, *_ = str(error).splitlines() or [type(error).__name__]
                warn(
                    "The model has an operation that can't run under torch.func.vmap "
                    f"({reason}): backward passes, of which several could be made at "
                    "once, are made one by one."
                )
        return layouts.is_batchable

    def _pass(
        self,
        vectors: Tensor,
        deliver: Callable[[int, list[tuple[Tensor, Tensor]]], None],
        retain_graph: bool,
        create_graph: bool = False,
    ) -> None:
        """Back-propagate vectors together, and deliver each block what its calls got.

        Pairs of inputs and gradients `(S, ...)`.
        """
        n_calls = [len(calls) for calls in self.shapes]
        of_pass = _Pass(n_calls, deliver, is_batched=len(vectors) > 1)

        def grad(vector: Tensor) -> Tensor:
            # Every call leads to the anchor, which needs no gradient itself: of layers,
            # no gradient of anything has to be kept to the end of the pass.
            torch.autograd.grad(
                self.logits,
                self._taps.anchor,
                vector,
                retain_graph=retain_graph,
                create_graph=create_graph,
                allow_unused=True,
            )
            return vector.new_zeros(())

        self._taps.backward_pass = of_pass
        try:
            if of_pass.is_batched:
                with warnings.catch_warnings():
                    # Where an operation has no batching rule, vmap runs it once a seed:
                    # as good.
                    warnings.filterwarnings("ignore", "There is a performance drop")
                    torch.func.vmap(grad)(vectors)
            else:
                grad(vectors[0])
        finally:
            self._taps.backward_pass = None
        # Within the pass autograd has switched gradients off by itself.
        with torch.set_grad_enabled(create_graph):
            of_pass.finish()

    def _arrange(
        self,
        seeds: slice,
        n_examples: int,
        take: Take,
        index: int,
        arrived: list[tuple[Tensor, Tensor]],
    ) -> None:
        """Join what a block's calls got, by example."""
        block = self._taps.blocks[index]
        m, n = block.shape
        dtype = block.statistics_dtype
        rows: list[tuple[Tensor, Tensor]] = []
        for inputs, gradients in arrived:
            a = inputs.reshape(n_examples, -1, n).to(dtype)
            g = gradients.reshape(len(gradients), n_examples, -1, m).to(dtype)
            rows.append((a, g))
        lengths = [a.shape[1] for a, _ in rows]
        (a, g), *others = rows
        if others:  # most layers are called once, and nothing needs to be copied
            a, g = (torch.cat(each, dim=-2) for each in zip(*rows, strict=True))
        take(Rows(index, seeds, a, g, lengths))


class _Pass:
    """A backward pass: gathers what arrives at each layer's calls, and delivers it."""

    def __init__(
        self,
        n_calls: list[int],
        deliver: Callable[[int, list[tuple[Tensor, Tensor]]], None],
        is_batched: bool,
    ) -> None:
        self.is_batched = is_batched
        self._n_calls = n_calls
        self._deliver = deliver
        self._waiting: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def arrive(self, index: int, inputs: Tensor, gradient: Tensor) -> None:
        """Take what came to a call; deliver what its layer got, once that is all.

        A gradient under `torch.func.vmap` is unwrapped: its leading dimension is that
        of `vmap`, or of size 1 where it is the same for all seeds. An
        `autograd.Function` with a `vmap` of its own does the same by public means, and
        takes longer than a layer's backward pass.
        """
        if not self.is_batched:
            self._gather(index, inputs, gradient[None])
            return
        dim = functorch.maybe_get_bdim(gradient)
        if dim < 0:
            gradient = gradient[None]
        else:
            gradient = functorch.get_unwrapped(gradient).movedim(dim, 0)
        with retrieve_current_functorch_interpreter().lower():
            self._gather(index, inputs, gradient)

    def _gather(self, index: int, inputs: Tensor, gradients: Tensor) -> None:
        arrived = self._waiting.setdefault(index, [])
        arrived.append((inputs, gradients))
        if len(arrived) == self._n_calls[index]:
            self._deliver(index, self._waiting.pop(index))

    def finish(self) -> None:
        """Deliver what layers got of whose calls some had no gradient."""
        for index in sorted(self._waiting):
            self._deliver(index, self._waiting.pop(index))


class WholeGraph(Graph):
    """Logits of one example, with gradients of whole weights: by plain autograd.

    Hooks see the rows of linear layers. Fused experts, embeddings, convolutions and
    rows of tokens have none that can be seen. An adapter with such a weight is passed
    over example by example, where the gradient of each of its weights is that
    example's.
    """

    def back_propagate(
        self,
        vectors: Tensor,
        n_examples: int,
        take: Take,
        *,
        at_once: int | None = None,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        """Make a backward pass with each of `(S, N, C)` vectors."""
        if not self.logits.requires_grad:
            return
        blocks, layouts = self._taps.blocks, self._taps.layouts
        _warn_of_passes(blocks, layouts, len(vectors))
        parameters = {id(block.weight): block.weight for block in blocks}
        for seed, vector in enumerate(vectors):
            gradients = torch.autograd.grad(
                self.logits,
                list(parameters.values()),
                vector,
                retain_graph=retain_graph or seed < len(vectors) - 1,
                create_graph=create_graph,
                allow_unused=True,
            )
            by_id = dict(zip(parameters, gradients, strict=True))
            matrices: dict[int, Tensor] = {}
            for index, block in enumerate(blocks):
                gradient = by_id[id(block.weight)]
                if gradient is not None:
                    matrices[index] = block.matrix(gradient).to(block.statistics_dtype)
            layouts.used.update(matrices)
            # An example reaches few experts.
            reached = read([matrix.any() for matrix in matrices.values()])
            for index, is_reached in zip(matrices, reached, strict=True):
                if is_reached:
                    take(_as_rows(index, slice(seed, seed + 1), matrices[index]))


def _as_rows(index: int, seeds: slice, matrix: Tensor) -> Rows:
    """Write a gradient `(m, n)` as rows: of the identity on its smaller side."""
    m, n = matrix.shape
    identity = torch.eye(min(m, n)).to(matrix)
    a, g = (matrix, identity) if m <= n else (identity, matrix.mT)
    return Rows(index, seeds, a[None], g[None, None], [min(m, n)])


def _warn_of_passes(blocks: Sequence[Block], layouts: Layouts, n_vectors: int) -> None:
    """Say once which matrices make passes slow, and how many each example takes."""
    if layouts.has_warned:
        return
    layouts.has_warned = True
    slow = without_rows(blocks)
    warn(
        f"{len(slow)} of {len(blocks)} matrices, such as {slow[0].name}, are of no "
        "linear layer that is called: for their gradients each example takes a forward "
        f"pass and {n_vectors} backward passes of its own. Leave them out with "
        "target_modules to have whole batches at once."
    )
