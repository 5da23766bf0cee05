"""Structures of a curvature: how each starts, takes a batch, and is packed.

A structure's *sums* are what batches add to, and what files hold. Its *curvature* is
made of them once all data are summed, and takes a prior.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from laplace.curvature import CurvatureInterface
from laplace.curvature.curvlinops import CurvlinopsGGN
from laplace.utils.matrix import Kron, KronDecomposed
from torch import Tensor, nn

from laplace_lora_ext.curvature.backend import LowRankKronGGN, LowRankKronInterface
from laplace_lora_ext.curvature.decomposed import LowRankKronDecomposed
from laplace_lora_ext.curvature.kron import LowRankKron
from laplace_lora_ext.models.weights import check_in_place, check_with_biases
from laplace_lora_ext.passes.graph import tapped
from laplace_lora_ext.passes.recorder import Recorder
from laplace_lora_ext.tasks.task import Task


class _Summable(Protocol):
    def __add__(self, other: Any, /) -> Any: ...


SumsT = TypeVar("SumsT", bound=_Summable)
CurvatureT = TypeVar("CurvatureT")


@dataclass(frozen=True)
class Structure(Generic[SumsT, CurvatureT]):
    """A structure over one model's LoRA weights, with the backend that computes it.

    Attributes
    ----------
    recorder : Recorder
        of the model and its blocks
    task : Task
        of the training data
    backend : CurvatureInterface
    """

    default_backend: ClassVar[type[CurvatureInterface]] = LowRankKronGGN

    recorder: Recorder
    task: Task
    backend: CurvatureInterface

    @classmethod
    def check_backend(cls, backend: type[CurvatureInterface]) -> None:
        """Refuse a backend that does not compute the structure."""
        if not issubclass(backend, LowRankKronInterface):
            raise ValueError(
                f"{backend.__name__} is no backend of this structure: use "
                "LowRankKronGGN or LowRankKronEF."
            )

    @property
    def settings(self) -> dict[str, Any]:
        """Collect what the curvature depends on, beside model, data and user."""
        return {}

    def zeros(self) -> SumsT:
        """Make the sums of no data."""
        raise NotImplementedError

    def add(
        self, sums: SumsT, x: Any, y: Tensor, examples: Tensor
    ) -> tuple[Tensor, SumsT]:
        """Return a batch's loss, and new sums with the batch.

        Labels that don't fit and numbers that are not finite are refused. What is drawn
        depends on the numbers `(B,)` that the examples have in the whole data. A batch
        that does not fit into memory is added in parts, as if these were batches.
        """
        _, dtype = self.recorder.places[0]
        total = sums
        losses: list[Tensor] = []

        def add_part(part: Any, place: slice) -> None:
            nonlocal total
            of_part = y[place]
            # Texts without a label.
            if not len(self.task.as_targets(of_part, dtype)):
                return
            owners = self.task.owners(of_part).to(examples.device)
            backend = self.backend
            if not isinstance(backend, LowRankKronInterface):  # which draws nothing
                loss, total = self._add(total, part, of_part)
            else:
                # Nothing is added unless the whole part is.
                backend.examples = examples[place][owners]
                try:
                    loss, total = self._add(total, part, of_part)
                finally:
                    backend.examples = None
            losses.append(loss)

        self.recorder.parts.learn(x, len(y), add_part)
        return torch.stack(losses).sum(), total

    def _add(self, sums: SumsT, x: Any, y: Tensor) -> tuple[Tensor, SumsT]:
        raise NotImplementedError

    def merge(self, first: SumsT, second: SumsT) -> SumsT:
        """Add sums of two data sets; neither is changed."""
        return first + second

    def decompose(self, sums: SumsT, n_data: int) -> CurvatureT:
        """Make the curvature of sums over `n_data` examples."""
        raise NotImplementedError

    def pack(self, sums: SumsT) -> Any:
        """Turn sums into nested lists and dictionaries of tensors and numbers."""
        raise NotImplementedError

    def unpack(self, packed: Any) -> SumsT:
        """Turn what `pack` returned into sums, where the weights are now."""
        raise NotImplementedError


@dataclass(frozen=True)
class LowRankKronStructure(Structure[LowRankKron, LowRankKronDecomposed]):
    """Kronecker factors: dense on the small side, low-rank on the large one."""

    backend: LowRankKronInterface

    @property
    def settings(self) -> dict[str, Any]:
        return self.backend.settings

    def zeros(self) -> LowRankKron:
        return self.backend.zeros()

    def _add(self, sums: LowRankKron, x: Any, y: Tensor) -> tuple[Tensor, LowRankKron]:
        total = sums.copy()
        loss = self.backend.accumulate(total, x, y)
        return loss, total

    def decompose(self, sums: LowRankKron, n_data: int) -> LowRankKronDecomposed:
        device = self.recorder.model.device
        with torch.autocast(device.type, enabled=False):
            return sums.decompose(device)

    def pack(self, sums: LowRankKron) -> list[dict[str, Any]]:
        return sums.state_dict()

    def unpack(self, packed: list[dict[str, Any]]) -> LowRankKron:
        _, *of_blocks = self.recorder.places
        return LowRankKron.from_state_dict(packed, of_blocks)


@dataclass(frozen=True)
class HostStructure(Structure[SumsT, CurvatureT]):
    """A structure of the host's, whose curvature of a batch is a value of its own."""

    def _of_batch(self, x: Any, y: Tensor) -> tuple[Tensor, SumsT]:
        """Ask the backend for the loss and the curvature of a batch."""
        raise NotImplementedError

    def _diagonal(self, sums: SumsT) -> Tensor:
        """Take the diagonal of sums, `(parameters,)`."""
        raise NotImplementedError

    def _add(self, sums: SumsT, x: Any, y: Tensor) -> tuple[Tensor, SumsT]:
        loss, of_batch = self._of_batch(x, y)
        blocks = self.recorder.blocks
        parts = self._diagonal(of_batch).split([block.n_params for block in blocks])
        for block, part in zip(blocks, parts, strict=True):
            if not torch.isfinite(part).all():
                raise ValueError(f"Weight {block.name}: non-finite curvature")
        return loss, self.merge(sums, of_batch)


@dataclass(frozen=True)
class KronStructure(HostStructure[Kron, KronDecomposed]):
    """The host's Kronecker factors by curvlinops, all dense."""

    default_backend: ClassVar[type[CurvatureInterface]] = CurvlinopsGGN

    @classmethod
    def check_backend(cls, backend: type[CurvatureInterface]) -> None:
        if not issubclass(backend, CurvlinopsGGN):
            raise ValueError(
                f'{backend.__name__} is no backend of hessian_structure="kron": leave '
                "backend out, which is then CurvlinopsGGN."
            )

    def zeros(self) -> Kron:
        blocks = self.recorder.blocks
        check_in_place(blocks, 'hessian_structure="kron"')
        check_with_biases(blocks)
        device, dtype = self.recorder.places[0]
        weights: list[Any] = [block.weight for block in blocks]
        return Kron.init_from_model(weights, device, dtype)

    def _of_batch(self, x: Any, y: Tensor) -> tuple[Tensor, Kron]:
        blocks = self.recorder.blocks
        layers = [block.module for block in blocks]
        with (
            self.recorder.model.prepared([block.weight for block in blocks]),
            torch.enable_grad(),
            _without_new_hooks(layers),
        ):
            logits = self._checked_logits(x)
            # A copy, since autograd can't save labels of inference mode.
            targets = self.task.check_targets(y.clone(), logits)
            # Factors of "one" datum are sums: then curvlinops asks for no number of
            # examples, which the host would read off `input_ids`.
            options: Any = {"num_data": 1}
            return self.backend.kron(x, targets, N=len(targets), **options)

    def _checked_logits(self, x: Any) -> Tensor:
        """Compute logits `(B, C)` as `Recorder.record` does, with its errors.

        A `RuntimeError` also if they use some layer not, since curvlinops wants a
        gradient of all.
        """
        model, blocks = self.recorder.model, self.recorder.blocks
        with tapped(model, blocks, self.recorder.layouts) as taps:
            graph = taps.run(partial(model, x))
        silent = [
            block.name
            for block, calls in zip(blocks, graph.shapes, strict=True)
            if not calls
        ]
        if silent:
            raise RuntimeError(
                f"The batch does not use {len(silent)} of {len(blocks)} weights, such "
                f'as {silent[0]}, but hessian_structure="kron" needs all of them in '
                "every batch. Leave such layers out with target_modules, or use "
                '"lowrank_kron". If torch.utils.checkpoint calls them, pass '
                "use_reentrant=False there."
            )
        return graph.logits.detach()

    def _diagonal(self, sums: Kron) -> Tensor:
        return sums.diag()

    def decompose(self, sums: Kron, n_data: int) -> KronDecomposed:
        kfacs: list[Any] = []
        for factors in sums.kfacs:
            # The host sums output factors, and averages input factors.
            if len(factors) == 2:
                kfacs.append([factors[0], factors[1] / n_data])
            else:
                kfacs.append(factors)
        with torch.autocast(self.recorder.model.device.type, enabled=False):
            return Kron(kfacs).decompose()

    def pack(self, sums: Kron) -> Any:
        return sums.kfacs

    def unpack(self, packed: Any) -> Kron:
        device, _ = self.recorder.places[0]
        kfacs: list[Any] = []
        for factors, block in zip(packed, self.recorder.blocks, strict=True):
            kfacs.append(
                [factor.to(device, block.statistics_dtype) for factor in factors]
            )
        return Kron(kfacs)


@dataclass(frozen=True)
class DenseStructure(HostStructure[Tensor, Tensor]):
    """A structure whose sums are one tensor, which is the curvature, too."""

    @property
    def n_params(self) -> int:
        return sum(block.n_params for block in self.recorder.blocks)

    def decompose(self, sums: Tensor, n_data: int) -> Tensor:
        return sums

    def pack(self, sums: Tensor) -> Tensor:
        return sums

    def unpack(self, packed: Tensor) -> Tensor:
        device, dtype = self.recorder.places[0]
        return packed.to(device, dtype)


@dataclass(frozen=True)
class DiagStructure(DenseStructure):
    """A diagonal, `(parameters,)`."""

    def zeros(self) -> Tensor:
        device, dtype = self.recorder.places[0]
        return torch.zeros(self.n_params, device=device, dtype=dtype)

    def _of_batch(self, x: Any, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.backend.diag(x, y)

    def _diagonal(self, sums: Tensor) -> Tensor:
        return sums


@dataclass(frozen=True)
class FullStructure(DenseStructure):
    """One dense matrix, `(parameters, parameters)`."""

    def zeros(self) -> Tensor:
        device, dtype = self.recorder.places[0]
        return torch.zeros(self.n_params, self.n_params, device=device, dtype=dtype)

    def _of_batch(self, x: Any, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.backend.full(x, y)

    def _diagonal(self, sums: Tensor) -> Tensor:
        return sums.diagonal()


@contextmanager
def _without_new_hooks(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Remove hooks that were added within, as curvlinops leaves them where it fails."""
    before = [
        (hooks, set(hooks))
        for layer in layers
        for hooks in (layer._forward_hooks, layer._forward_pre_hooks)
    ]
    try:
        yield
    finally:
        for hooks, known in before:
            for key in set(hooks) - known:
                del hooks[key]
