"""Structures of a curvature: their options, sums and batches, and how they are packed.

A structure's *sums* are what batches add to, and what files hold. Its *curvature* is
made of them once all data are summed, and takes a prior.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from math import isfinite
from typing import Any

import torch
from laplace.curvature.curvlinops import CurvlinopsGGN
from laplace.utils.matrix import Kron, KronDecomposed
from torch import Tensor

from laplace_lora_ext.curvature.decomposed import LowRankKronDecomposed, diagonal_of
from laplace_lora_ext.curvature.kron import KroneckerBlock, StreamingUpdates
from laplace_lora_ext.messages import check_count, check_name, listed, naming
from laplace_lora_ext.models.choices import Choices
from laplace_lora_ext.models.lora_layers import check_known_to_host
from laplace_lora_ext.models.weights import check_in_place, read
from laplace_lora_ext.passes.graph import Rows
from laplace_lora_ext.passes.recorder import Recorder, Rounds
from laplace_lora_ext.tasks.task import Draws, Seeds, Task

# Bytes of rows that may wait for an update, or those of all large factors, if these are
# more. All rows of 16 texts in MiniLM then take one update, in place of 12: an
# accelerator decomposes small matrices one after the other, whatever their size.
_WAITING = 2**24

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
        For unknown `kfac_approx` or `draws`, or numbers that are too small or not
        whole.
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
        check_count("rank", self.rank, least=0)
        check_count("seed", self.seed, least=0)
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


# --- structures -----------------------------------------------------------------------


@dataclass(frozen=True)
class Structure:
    """A structure over one model's LoRA weights, with what computes it.

    Sums and curvature are of a type for each structure.

    Attributes
    ----------
    recorder : Recorder
        of the model and its blocks
    task : Task
        of the training data
    options : dict
        the user's, of the backend
    """

    recorder: Recorder
    task: Task
    options: dict[str, Any]

    @cached_property
    def backend(self) -> Any:
        """Make what computes the curvature; wrong options are refused."""
        return LowRankKronGGN(**self.options)

    @property
    def settings(self) -> dict[str, Any]:
        """Collect what the curvature depends on, beside model and data."""
        return self.options

    def zeros(self) -> Any:
        """Make the sums of no data."""
        raise NotImplementedError

    def add(self, sums: Any, x: Any, y: Tensor, examples: Tensor) -> tuple[Tensor, Any]:
        """Return a batch's loss, and new sums with the batch.

        Labels that don't fit and numbers that are not finite are refused. What is drawn
        depends on `examples`, `(N,)`: the number in the whole data of the example that
        each row of logits is of.
        """
        raise NotImplementedError

    def merge(self, first: Any, second: Any) -> Any:
        """Add sums of two data sets; neither is changed."""
        return first + second

    def decompose(self, sums: Any, n_data: int) -> Any:
        """Make the curvature of sums over `n_data` examples."""
        return sums

    def pack(self, sums: Any) -> Any:
        """Turn sums into nested lists and dictionaries of tensors and numbers."""
        return sums

    def unpack(self, packed: Any) -> Any:
        """Turn what `pack` returned into sums, where the weights are now."""
        raise NotImplementedError


@dataclass(frozen=True)
class LowRankKronStructure(Structure):
    """Kronecker factors: dense on the small side, low-rank on the large one.

    A `NotImplementedError` for "expand", where weights have no rows, tokens have
    labels, or a decoder reads answers of several tokens.
    """

    def __post_init__(self) -> None:
        if self.backend.kfac_approx == "gradient":
            return
        unseen = [block.name for block in self.recorder.taps.without_rows]
        if unseen:
            raise NotImplementedError(
                'kfac_approx="expand" sums over the rows of linear layers, and these '
                f'have none: {listed(unseen)}. Use kfac_approx="gradient", or leave '
                "them out with target_modules."
            )
        answers = self.recorder.model.answers
        if isinstance(answers, Choices) and answers.decodes:
            raise NotImplementedError(
                'kfac_approx="expand" finds no padding in answers that a decoder '
                'reads: use kfac_approx="gradient".'
            )
        if self.task.has_tokens:
            raise NotImplementedError(
                f'{self.task.name} works with kfac_approx="gradient" only.'
            )

    @property
    def settings(self) -> dict[str, Any]:
        names = ["rank", "kfac_approx", "tail", "stochastic"]
        if self.backend.stochastic is not False:
            names += ["draws", "num_samples", "seed"]
        return {name: getattr(self.backend, name) for name in names}

    def zeros(self) -> list[KroneckerBlock]:
        _, *homes = self.recorder.homes
        return [
            KroneckerBlock.zeros(
                block.shape,
                block.small_output,
                self.backend.rank,
                self.backend.tail,
                *home,
            )
            for block, home in zip(self.recorder.blocks, homes, strict=True)
        ]

    def add(
        self, sums: list[KroneckerBlock], x: Any, y: Tensor, examples: Tensor
    ) -> tuple[Tensor, list[KroneckerBlock]]:
        """Add a batch, unless `Recorder.record` refuses it.

        Refused are also numbers that are not finite (`ValueError`), and a mask that
        "expand" can't apply to a layer's rows (`NotImplementedError`).
        """
        backend, blocks = self.backend, self.recorder.blocks
        total = [copy(each) for each in sums]  # whose tensors updates replace
        updates = StreamingUpdates(max(sum(each.nbytes for each in sums), _WAITING))
        add = KFAC_APPROX[backend.kfac_approx]

        def take(rows: Rows) -> None:
            with naming(f"weight {blocks[rows.index].name}"):
                add(total[rows.index], updates, rows)

        choose_seeds = partial(backend.seeds, self.task, examples=examples)
        numbers = partial(backend.numbers, examples)
        outputs = self.task.outputs(self.recorder.model, y, numbers)
        with self.recorder.record(x, outputs) as recording:
            logits = recording.logits.detach()
            seeds, loss = self.task.seeds_and_loss(logits, y, choose_seeds)
            rounds = Rounds.of(recording.positions)
            if rounds is not None:  # of tokens, each has a curvature of its own
                seeds = rounds.seeds(seeds)
            recording.backward(seeds.vectors, take, seeds.weights)
        with torch.autocast(loss.device.type, enabled=False):
            updates.finish()
        # Once a batch: a look at a number on an accelerator waits for all work there.
        traces = read([each.matrix.trace() + each.trace for each in total])
        # Gradients run backward: of several such layers, the last one is where they
        # began.
        for block, trace in zip(blocks[::-1], traces[::-1], strict=True):
            if not isfinite(trace):
                raise ValueError(f"Weight {block.name}: non-finite numbers")
        return loss, total

    def merge(
        self, first: list[KroneckerBlock], second: list[KroneckerBlock]
    ) -> list[KroneckerBlock]:
        return [mine + its for mine, its in zip(first, second, strict=True)]

    def decompose(
        self, sums: list[KroneckerBlock], n_data: int
    ) -> LowRankKronDecomposed:
        blocks = [block.decompose() for block in sums]
        return LowRankKronDecomposed.of_blocks(blocks, self.recorder.model.device)

    def pack(self, sums: list[KroneckerBlock]) -> list[dict[str, Any]]:
        return [block.state_dict() for block in sums]

    def unpack(self, packed: list[dict[str, Any]]) -> list[KroneckerBlock]:
        _, *homes = self.recorder.homes
        return [
            KroneckerBlock.from_state_dict(of_block, *home)
            for of_block, home in zip(packed, homes, strict=True)
        ]


@dataclass(frozen=True)
class HostStructure(Structure):
    """A structure of the host's, whose curvature of a batch is a value of its own."""

    def _of_batch(self, x: Any, y: Tensor, examples: Tensor) -> tuple[Tensor, Any]:
        """Compute the loss and the curvature of a batch."""
        raise NotImplementedError

    def add(self, sums: Any, x: Any, y: Tensor, examples: Tensor) -> tuple[Tensor, Any]:
        loss, of_batch = self._of_batch(x, y, examples)
        blocks = self.recorder.blocks
        parts = diagonal_of(of_batch).split([block.n_params for block in blocks])
        for block, part in zip(blocks, parts, strict=True):
            if not torch.isfinite(part).all():
                raise ValueError(f"Weight {block.name}: non-finite curvature")
        return loss, self.merge(sums, of_batch)


@dataclass(frozen=True)
class KronStructure(HostStructure):
    """The host's Kronecker factors by curvlinops, all dense.

    Curvlinops leaves its hooks on the layers where a pass fails. What it draws depends
    on torch's random state, and not on the examples.
    """

    def __post_init__(self) -> None:
        check_known_to_host(self.recorder.blocks)

    @property  # anew each time: it holds weights, and a model may move
    def backend(self) -> Any:
        likelihood = "regression" if self.task.has_noise else "classification"
        # It collects the parameters that require grad.
        with self.recorder.prepared():
            return CurvlinopsGGN(self.recorder.model, likelihood, **self.options)

    def zeros(self) -> Kron:
        blocks = self.recorder.blocks
        check_in_place(blocks, 'hessian_structure="kron"')
        weights: list[Any] = [block.weight for block in blocks]
        return Kron.init_from_model(weights, *self.recorder.homes[0])

    def _of_batch(self, x: Any, y: Tensor, examples: Tensor) -> tuple[Tensor, Kron]:
        model, taps = self.recorder.model, self.recorder.taps
        with self.recorder.prepared(), torch.enable_grad():
            # Checks logits and gradients, and learns which layers are called.
            with taps.on_layers():
                logits = taps.run(model, x).logits.detach()
            # A copy, since autograd can't save labels of inference mode.
            targets = self.task.check_targets(y.clone(), logits)
            # Factors of "one" datum are sums: then curvlinops asks for no number of
            # examples, which the host would read off `input_ids`.
            return self.backend.kron(x, targets, N=len(targets), num_data=1)

    def decompose(self, sums: Kron, n_data: int) -> KronDecomposed:
        # The host sums output factors, and averages input factors.
        kfacs: list[Any] = [
            [output, *(factor / n_data for factor in input_)]
            for output, *input_ in sums.kfacs
        ]
        return Kron(kfacs).decompose()

    def pack(self, sums: Kron) -> Any:
        return sums.kfacs

    def unpack(self, packed: Any) -> Kron:
        device, _ = self.recorder.homes[0]
        kfacs: list[Any] = [
            [factor.to(device, block.statistics_dtype) for factor in factors]
            for factors, block in zip(packed, self.recorder.blocks, strict=True)
        ]
        return Kron(kfacs)


@dataclass(frozen=True)
class DiagStructure(HostStructure):
    """A diagonal, `(parameters,)`, which is its own curvature."""

    def zeros(self) -> Tensor:
        device, dtype = self.recorder.homes[0]
        n_params = sum(block.n_params for block in self.recorder.blocks)
        return torch.zeros(n_params, device=device, dtype=dtype)

    def _of_batch(self, x: Any, y: Tensor, examples: Tensor) -> tuple[Tensor, Tensor]:
        jacobians, logits = self.recorder.jacobians(x)
        targets = self.task.check_targets(y, logits)
        if self.backend.stochastic:
            seeds = self.backend.seeds(self.task, logits, examples)
        else:  # also by default: they cost no passes here
            seeds = self.task.exact_seeds(logits)
        columns = seeds.dense().transpose(0, 1)
        with torch.autocast(logits.device.type, enabled=False):
            gradients = (columns @ jacobians).flatten(0, 1)
            return self.task.loss(logits, targets), self._products(gradients)

    def _products(self, gradients: Tensor) -> Tensor:
        """Sum the outer products of gradients `(n, parameters)`."""
        return gradients.square().sum(0)

    def unpack(self, packed: Tensor) -> Tensor:
        return packed.to(*self.recorder.homes[0])


@dataclass(frozen=True)
class FullStructure(DiagStructure):
    """One dense matrix, `(parameters, parameters)`, which is its own curvature."""

    def zeros(self) -> Tensor:
        return super().zeros().diag_embed()

    def _products(self, gradients: Tensor) -> Tensor:
        return gradients.mT @ gradients
