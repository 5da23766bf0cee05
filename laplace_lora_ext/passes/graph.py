"""Forward passes whose layers are tapped, and backward passes through them.

A backward pass brings each block its rows. Here it is proven which are whose.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._C._functorch as functorch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

from laplace_lora_ext.messages import warn
from laplace_lora_ext.models.batches import Positions
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.running import checkpointing
from laplace_lora_ext.models.weights import Block, read
from laplace_lora_ext.tasks.task import Outputs

# Rows that a backward pass should have: with fewer, products leave the machine half
# idle, and what is done once a pass and layer counts. Measured on two cores by `python
# -m benchmarks cost`.
_ROWS = 512


@dataclass(frozen=True, eq=False)
class Rows:
    """What backward passes bring to a block: its gradient is `Σ_t g_t a_tᵀ`.

    Inputs and gradients of outputs are by example, in the statistics' dtype. T counts
    the positions of all calls of a layer, since calls of one weight add up.
    """

    graph: Graph
    index: int  # of the block
    seeds: slice  # which of the vectors
    a: Tensor  # `(B, T, n)`
    g: Tensor  # `(S, B, T, m)`
    lengths: list[int]  # positions of each call

    def gradient(self) -> Tensor:
        """Compute gradients of the matrix, `(S, B, m, n)`."""
        return self.g.mT @ self.a

    def valid(self, x: Tensor) -> Tensor:
        """Select the rows `(N, d)` of `(S, B, T, d)` that are no padding.

        A `NotImplementedError` if the mask can't be applied to the layer's rows.
        """
        positions = self.graph.positions
        if positions is None:
            raise NotImplementedError(
                "logits of an example depend on rows of others: use "
                'kfac_approx="gradient", or leave this layer out with target_modules'
            )
        masks = [positions.valid(length) for length in self.lengths]
        if all(mask is None for mask in masks):
            # Selecting by booleans would wait for an accelerator.
            return x.flatten(0, 2)
        is_valid = [
            x.new_ones(x.shape[1], length, dtype=torch.bool)
            if mask is None
            else mask.to(x.device)
            for mask, length in zip(masks, self.lengths, strict=True)
        ]
        return x[:, torch.cat(is_valid, dim=1)].flatten(0, 1)


Take = Callable[[Rows], None]
Arrived = list[tuple[Tensor, Tensor]]
"""Inputs and gradients `(S, ...)` of a layer's calls."""


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
        if gradient is not None:
            ctx.taps.receive(ctx.index, *ctx.saved_tensors, gradient)
        # On to the layers before this one; nothing else that `forward` got has a
        # gradient.
        return gradient, None, None, None, None


class Taps:
    """Hooks on the blocks' layers, and what passes through them have shown so far.

    Attributes
    ----------
    model : LogitsModel
    blocks : list of Block
    without_rows : list of Block
        those of whose rows no hook sees anything; if there is one, whole gradients are
        taken of all
    anchor : torch.Tensor
        what all backward passes are asked for; it is there within `on_layers` alone.
        Weights of layers that are called require no gradient, and a pass goes no
        further than it must
    are_checkpointed : bool
        whether any layers are computed anew in backward passes
    receive : callable or None
        takes what a tap hands on, in the backward pass that runs now
    proven : dict
        by a layer's site and how many times it was called: the bit length of the size
        of the batch that last proved its rows to be each example's own
    examples_apart : bool
        whether rows of some batch were not each example's own, or none are seen
    is_batchable : bool or None
        whether several seeds can share a pass: no kernel refuses `torch.func.vmap`.
        None before the first of such passes
    is_divisible : bool or None
        whether examples have the same logits in parts of a batch. None before the first
        batch in parts
    used : set of int
        indices of the blocks that passes have used since a fit began, which empties it:
        whose layers were called with a graph, or whose whole gradient there is
    has_warned : bool
        of what whole gradients cost
    """

    anchor: Tensor
    are_checkpointed: bool
    receive: Callable[[int, Tensor, Tensor], None] | None = None
    is_batchable: bool | None = None
    is_divisible: bool | None = None
    has_warned = False
    # Shapes of what each layer's calls returned, without its size, in the forward pass
    # that runs now.
    _calls: list[list[torch.Size]] | None = None
    _is_called = False

    def __init__(self, model: LogitsModel, blocks: list[Block]) -> None:
        self.model = model
        self.blocks = blocks
        self.without_rows = [block for block in blocks if not block.has_rows]
        self.proven: dict[tuple[str, int], int] = {}
        # A whole weight's gradient is of all examples that a pass has.
        self.examples_apart = bool(self.without_rows)
        self.used: set[int] = set()

    @contextmanager
    def on_layers(self) -> Iterator[None]:
        """Tap the blocks' layers within, also where they are recomputed.

        Layers that the user's training checkpoints are checkpointed here too.
        """
        with ExitStack() as undoing:
            self.anchor = torch.zeros((), requires_grad=True)
            undoing.callback(delattr, self, "anchor")
            for index, block in enumerate([] if self.without_rows else self.blocks):
                # Before the user's hooks, which may change outputs.
                tap = partial(self.tap, index)
                handle = block.module.register_forward_hook(tap, prepend=True)
                undoing.callback(handle.remove)
            layers = undoing.enter_context(checkpointing(self.model.tree))
            self.are_checkpointed = bool(layers)
            yield

    def run(self, outputs: Outputs, batch: Any, own: Tensor | None = None) -> Graph:
        """Compute logits by the model; errors are those of `Recorder.record`."""
        calls: list[list[torch.Size]] = [[] for _ in self.blocks]
        self._calls, self._is_called = calls, False
        try:
            logits = outputs(batch, own)
        finally:
            self._calls = None
        check_logits(logits)
        if self._is_called and not logits.requires_grad:
            raise RuntimeError(
                "No gradient of the logits reaches the LoRA layers: remove .detach() "
                "or torch.no_grad() from the model's forward pass, and pass "
                "use_reentrant=False where it calls torch.utils.checkpoint."
            )
        self.used.update(i for i, of_block in enumerate(calls) if of_block)
        positions = self.model.positions(batch, len(logits))
        return Graph(self, logits, calls, positions, slice(None))

    def tap(
        self, index: int, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor
    ) -> Tensor:
        """Note a call of a block's layer, and tap what it returned."""
        self._is_called = True
        # As where an indexer of sparse attention picks keys.
        if not torch.is_grad_enabled():
            return output
        # None where a checkpointed layer is computed anew for a backward pass.
        if self._calls is not None:
            self._calls[index].append(output.shape[:-1])
        inputs = args[0]
        if self.blocks[index].parameter == "bias":  # a matrix that multiplies ones
            inputs = inputs.new_ones(*inputs.shape[:-1], 1)
        if inputs.is_inference():  # autograd can't save it
            inputs = inputs.clone()
        return _Tap.apply(output, self.anchor, inputs, self, index)


@dataclass(frozen=True, eq=False)
class Graph:
    """Logits `(N, C)` of examples that are back-propagated together: all, or one."""

    taps: Taps
    logits: Tensor
    calls: list[list[torch.Size]]  # of each block: shapes of their rows
    # None if the graph is of other examples too, and all rows count.
    positions: Positions | None
    examples: slice  # of the batch
    # `(N,)` booleans: the example's own among the batch's logits.
    own: Tensor | None = None

    def back_propagate(
        self,
        vectors: Tensor,
        take: Take,
        *,
        weights: Tensor | None = None,
        at_once: int | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Make backward passes with a batch's `(S, N, C)` vectors.

        A pass takes `at_once` of them: by default one, unless so few rows go through
        the layers that more are faster. What a block gets is taken as soon as it is
        there, so that few gradients are in memory at a time. Gradients are scaled by
        `(S, B)` weights, or `(S, 1)` for all examples.
        """
        if self.own is not None and self.positions is not None:
            vectors = vectors[:, self.own]
        elif self.own is not None:
            # Zeros in place of the other examples' vectors: their logits get no
            # gradient.
            vectors = vectors * self.own[:, None]
        # The graph of a batch may be needed for the next of its examples.
        retain_graph = retain_graph or self.positions is None
        n_seeds, run = len(vectors), self._pass
        if self.taps.without_rows:
            _warn_of_passes(self.taps, n_seeds)
            at_once, run = 1, self._pass_of_whole_gradients
        elif not any(self.calls):  # none has a gradient
            return
        elif not at_once:
            # A layer with more rows than others, as of all tokens, makes up most of the
            # time.
            most = max(sum(shape.numel() for shape in calls) for calls in self.calls)
            at_once = max(1, _ROWS // max(1, most))
        if at_once > 1 and n_seeds > 1 and not self._is_batchable(vectors):
            at_once = 1
        for start in range(0, n_seeds, at_once):
            seeds = slice(start, min(start + at_once, n_seeds))
            deliver = partial(self._deliver, seeds, weights, take)
            keep = retain_graph or seeds.stop < n_seeds
            run(vectors[seeds], deliver, keep)

    def _is_batchable(self, vectors: Tensor) -> bool:
        """Find out once whether several seeds can share a pass, and warn if not.

        Some kernels can't run under `torch.func.vmap`, such as those that write into
        their arguments. Nor can checkpoints, which come and go.
        """
        taps = self.taps
        if taps.are_checkpointed:
            return False
        if taps.is_batchable is None:

            def ignore(*_: Any) -> None:
                pass

            try:
                self._pass(vectors[:2], ignore, retain_graph=True)
                taps.is_batchable = True
            except RuntimeError as error:
                # An error of the model's own is met again, one by one.
                self._pass(vectors[:1], ignore, retain_graph=True)
                taps.is_batchable = False
                reason, *_ = str(error).splitlines() or [type(error).__name__]
                warn(
                    "The model has an operation that can't run under torch.func.vmap "
                    f"({reason}): backward passes, of which several could be made at "
                    "once, are made one by one."
                )
        return taps.is_batchable

    def _pass(
        self,
        vectors: Tensor,
        deliver: Callable[[int, Arrived], None],
        retain_graph: bool,
    ) -> None:
        """Back-propagate vectors together; deliver what each block got."""
        is_batched = len(vectors) > 1
        waiting: dict[int, Arrived] = {}

        def receive(index: int, inputs: Tensor, gradient: Tensor) -> None:
            # A gradient under `torch.func.vmap` is unwrapped: its leading dimension is
            # that of `vmap`, or of size 1 where it is the same for all seeds. An
            # `autograd.Function` with a `vmap` of its own does the same by public
            # means, and takes longer than a layer's backward pass.
            outside = nullcontext()
            dim = functorch.maybe_get_bdim(gradient) if is_batched else -1
            if dim < 0:
                gradient = gradient[None]
            else:
                gradient = functorch.get_unwrapped(gradient).movedim(dim, 0)
            if is_batched:
                outside = retrieve_current_functorch_interpreter().lower()
            with outside:
                waiting.setdefault(index, []).append((inputs, gradient))
                if len(waiting[index]) == len(self.calls[index]):
                    deliver(index, waiting.pop(index))

        def grad(vector: Tensor) -> Tensor:
            # Every call leads to the anchor, which needs no gradient itself: of layers,
            # no gradient of anything has to be kept to the end of the pass.
            torch.autograd.grad(
                self.logits,
                self.taps.anchor,
                vector,
                retain_graph=retain_graph,
                allow_unused=True,
            )
            return vector.new_zeros(())

        self.taps.receive = receive
        try:
            if is_batched:
                with warnings.catch_warnings():
                    # Where an operation has no batching rule, vmap runs it once a seed:
                    # as good.
                    warnings.filterwarnings("ignore", "There is a performance drop")
                    torch.func.vmap(grad)(vectors)
            else:
                grad(vectors[0])
        finally:
            self.taps.receive = None
        # Within the pass autograd has switched gradients off by itself.
        with torch.no_grad():
            # Of whose calls some had no gradient.
            for index in sorted(waiting):
                deliver(index, waiting[index])

    def _pass_of_whole_gradients(
        self,
        vectors: Tensor,
        deliver: Callable[[int, Arrived], None],
        retain_graph: bool,
    ) -> None:
        """Back-propagate a vector to whole weights, of one example, by plain autograd.

        Hooks see the rows of linear layers. Fused experts, embeddings, convolutions and
        rows of tokens have none that can be seen. An adapter with such a weight is
        passed over example by example, where the gradient of each of its weights is
        that example's.
        """
        if not self.logits.requires_grad:
            return
        blocks = self.taps.blocks
        parameters = {id(block.weight): block.weight for block in blocks}
        gradients = torch.autograd.grad(
            self.logits,
            list(parameters.values()),
            vectors[0],
            retain_graph=retain_graph,
            allow_unused=True,
        )
        by_id = dict(zip(parameters, gradients, strict=True))
        matrices: dict[int, Tensor] = {}
        for index, block in enumerate(blocks):
            gradient = by_id[id(block.weight)]
            if gradient is not None:
                matrices[index] = block.matrix(gradient)
        self.taps.used.update(matrices)
        # An example reaches few experts.
        reached = read([matrix.any() for matrix in matrices.values()])
        for (index, matrix), is_reached in zip(matrices.items(), reached, strict=True):
            if is_reached:
                # As rows of the identity on the smaller side.
                m, n = matrix.shape
                identity = torch.eye(min(m, n)).to(matrix)
                a, g = (matrix, identity) if m <= n else (identity, matrix.mT)
                deliver(index, [(a, g[None])])

    def _deliver(
        self,
        seeds: slice,
        weights: Tensor | None,
        take: Take,
        index: int,
        arrived: Arrived,
    ) -> None:
        """Join what a block's calls got, by example, and scale it by weights."""
        block = self.taps.blocks[index]
        m, n = block.shape
        dtype = block.statistics_dtype
        n_examples = 1 if self.positions is None else self.positions.n_examples
        inputs = [a.reshape(n_examples, -1, n).to(dtype) for a, _ in arrived]
        gradients = [g.reshape(len(g), n_examples, -1, m).to(dtype) for _, g in arrived]
        a, g = inputs[0], gradients[0]
        if len(arrived) > 1:  # most layers are called once: nothing needs to be copied
            a, g = torch.cat(inputs, dim=1), torch.cat(gradients, dim=2)
        if weights is not None:
            # After the pass: in half precision, the weights of confident examples would
            # underflow.
            of_seeds = weights[seeds]
            if of_seeds.shape[1] > 1:
                of_seeds = of_seeds[:, self.examples]
            g = g * of_seeds[..., None, None].to(g)
        take(Rows(self, index, seeds, a, g, [each.shape[1] for each in inputs]))


def _warn_of_passes(taps: Taps, n_vectors: int) -> None:
    """Say once which matrices make passes slow, and how many each example takes."""
    if taps.has_warned:
        return
    taps.has_warned = True
    slow = taps.without_rows
    warn(
        f"{len(slow)} of {len(taps.blocks)} matrices, such as {slow[0].name}, are of "
        "no linear layer that is called: for their gradients each example takes a "
        f"forward pass and {n_vectors} backward passes of its own. Leave them out with "
        "target_modules to have whole batches at once."
    )


# --- proof that rows are each example's own -------------------------------------------
#  A layer's rows `(n, ..., d)` are taken for `(B, n / B, ..., d)`. Sizes don't show
# whether they are, but gradients do: those of some examples' logits must leave exactly
# nothing in the rows of all others.


def is_proven(graph: Graph) -> bool:
    """Prove that the rows of a pass are each example's own, or find that they are not.

    Texts are proven in the first batch, in the first one of two, four, eight and so on
    or more examples, and in each until every layer has had a gradient. Sizes don't tell
    what rows other batches have, such as those of images: each of them is proven.

    The taps note what has proved a site. A gradient that is not finite is a
    `ValueError`.
    """
    positions = graph.positions
    assert positions is not None
    n_examples = positions.n_examples
    if n_examples == 1:
        return True
    if graph.taps.without_rows:
        return False
    blocks, proven = graph.taps.blocks, graph.taps.proven
    size = n_examples.bit_length()  # 2 for 2 and 3 examples, 3 for 4 to 7, and so on
    is_known = True
    lasting: set[int] = set()  # blocks
    # Rows of no examples: as of a router, which picks any number of them, or of the
    # identity that DoRA sends through its layers, and which gets no gradient.
    has_odd = False
    for index, calls in enumerate(graph.calls):
        if any(not shape or shape[0] % n_examples for shape in calls):
            has_odd, is_known = True, False
            continue
        site = blocks[index].site
        if all(_lasts(site, shape, positions) for shape in calls):
            lasting.add(index)
            is_known &= not calls or proven.get((site, len(calls)), 0) >= size
        else:
            is_known = False
    if is_known:
        return True
    words = codewords(n_examples)
    strays: list[Tensor] = []  # whether seeds of some examples arrive at others
    non_finite: dict[int, Tensor] = {}
    reached: dict[int, Tensor] = {}  # rows `(B, T)` of a block's calls
    lengths: dict[int, list[int]] = {}

    def look(rows: Rows) -> None:
        non_finite[rows.index] = ~torch.isfinite(rows.g).all()
        # Exactly nothing, not little: no sum of other examples' numbers has gone in.
        arrives = rows.g.detach().any(-1)
        is_other = ~words.to(rows.g.device)[rows.seeds, :, None]
        strays.append((arrives & is_other).any())
        reached[rows.index] = reached.get(rows.index, False) | arrives.any(0)
        lengths[rows.index] = rows.lengths

    # Random numbers, so that gradients do not cancel to 0 but by chance.
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(graph.logits.shape[1], generator=generator)
    chosen = positions.logits_of(words).to(graph.logits)  # (S, N)
    vectors = chosen[..., None] * vector.to(graph.logits)
    try:
        graph.back_propagate(vectors, look, retain_graph=True)
    except RuntimeError:
        if has_odd:  # which got a gradient, and can't be divided
            return False
        raise
    for index, is_wrong in zip(
        non_finite, read(list(non_finite.values())), strict=True
    ):
        if is_wrong:
            raise non_finite_gradients(blocks[index])
    if any(read(strays)):
        return False
    for index in lasting & reached.keys():
        calls = reached[index].split(lengths[index], dim=1)
        # Others of its calls may have had no gradient, and prove nothing.
        if all(map(_tells_layouts_apart, calls)):
            proven[blocks[index].site, len(calls)] = size
    return True


def codewords(n_examples: int) -> Tensor:
    """Choose seeds `(S, B)` of examples: of any two, some seed has the first alone."""
    n_bits = max(1, (n_examples - 1).bit_length())
    bits = torch.arange(n_examples) >> torch.arange(n_bits)[:, None] & 1
    return torch.cat([bits, 1 - bits]).bool()


def _lasts(site: str, shape: torch.Size, positions: Positions) -> bool:
    """Tell whether later batches of this size have rows in the same order.

    Which row a token has does not depend on what the text says.
    """
    # A router picks their rows.
    if not positions.is_text or "experts" in site.split("."):
        return False
    # Rows of examples, or of all tokens in one dimension. Any others, such as windows,
    # may be in another order next time.
    by_example = shape[0] in (positions.n_examples, positions.n_rows)
    return by_example or shape.numel() == positions.n_tokens


def _tells_layouts_apart(reached: Tensor) -> bool:
    """Tell whether gradients came, at rows `(B, T)` that tell layouts apart."""
    if reached.shape[0] == reached.shape[1]:
        # `(T, B)` and `(B, T)` have the same row on the diagonal.
        reached = reached.clone().fill_diagonal_(False)
    return bool(reached.any())


def non_finite_gradients(block: Block) -> ValueError:
    """Make the error that names a weight whose gradients are not finite."""
    return ValueError(f"Weight {block.name}: non-finite gradients")
