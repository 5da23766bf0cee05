"""A fit: what a posterior knows of its data, as one value that nothing changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from laplace_lora_ext.curvature.accumulation import Structure
from laplace_lora_ext.models.same_model import (
    ModelState,
    Standing,
    check_alike_on_ranks,
    check_runs,
    check_same,
    standing_of,
)
from laplace_lora_ext.models.weights import Place, flatten_weights
from laplace_lora_ext.predictive.amortized import LearntVariance
from laplace_lora_ext.processes.exchange import together
from laplace_lora_ext.sums import sums_over


@dataclass(frozen=True)
class NoFit:
    """What a posterior's attributes are before its first fit."""

    places: list[Place]
    mean: float | Tensor = 0.0
    sums: None = None
    curvature: None = None
    loss: float = 0.0
    n_data: int = 0
    n_outputs: int = 0
    learnt_variance: None = None

    def to(self, structure: Structure) -> NoFit:
        """Note where the structure's weights are now."""
        return replace(self, places=structure.recorder.places)


@dataclass(frozen=True)
class Fit:
    """A fit around one model's weights.

    Attributes
    ----------
    mean : torch.Tensor
        `(parameters,)`, the LoRA weights
    sums
        over the data, to which more data can be added
    curvature
        made of the sums, without a prior
    loss : torch.Tensor
        `()`, negative log-likelihood of all data
    n_data : int
        how many examples
    n_outputs : int
        of the model
    model : ModelState
        that of all other weights
    places : list of Place
        where it is: first what is over all blocks, then each block
    learnt_variance : LearntVariance or None
        what was learnt of predictions by this fit
    standing : Standing or None
        tells that the model is still the one that was fitted, where that is known
    """

    mean: Tensor
    sums: Any
    curvature: Any
    loss: Tensor
    n_data: int
    n_outputs: int
    model: ModelState
    places: list[Place]
    learnt_variance: LearntVariance | None = None
    standing: Standing | None = None

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], structure: Structure) -> Fit:
        """Rebuild what `state_dict` returned, where the structure's weights are now."""
        recorder = structure.recorder
        sums = structure.unpack(state["H"])
        device, dtype = recorder.places[0]
        learnt = state["learnt_variance"]
        return cls(
            mean=state["mean"].to(device, dtype),
            sums=sums,
            curvature=structure.decompose(sums, state["n_data"]),
            loss=state["loss"].to(device),
            n_data=state["n_data"],
            n_outputs=state["n_outputs"],
            # As it is now, and not as saved: it may have been cast, which `check_state`
            # allows.
            model=ModelState.of(recorder.model, recorder.blocks),
            places=recorder.places,
            learnt_variance=learnt and LearntVariance(**learnt).to(device, dtype),
        )

    def state_dict(self, structure: Structure) -> dict[str, Any]:
        """Return tensors, numbers and text alone, in dictionaries and lists."""
        return {
            "mean": self.mean,
            "H": structure.pack(self.sums),
            "loss": self.loss,
            "n_data": self.n_data,
            "n_outputs": self.n_outputs,
            "model": self.model.state_dict(),
            "learnt_variance": self.learnt_variance
            and dict(vars(self.learnt_variance)),
        }

    def to(self, structure: Structure) -> Fit:
        """Move the fit to where the structure's weights are now."""
        places = structure.recorder.places
        device, dtype = places[0]
        # Packed sums know no place, and are unpacked where the weights are. The
        # curvature follows from them, and need not be moved.
        sums = structure.unpack(structure.pack(self.sums))
        return replace(
            self,
            mean=self.mean.to(device, dtype),
            sums=sums,
            curvature=structure.decompose(sums, self.n_data),
            loss=self.loss.to(device),
            places=places,
            standing=None,
            learnt_variance=self.learnt_variance
            and self.learnt_variance.to(device, dtype),
        )


def fit(
    loader: Iterable[Any],
    structure: Structure,
    *,
    settings: Mapping[str, Any],
    before: Fit | None = None,
    progress_bar: bool = False,
) -> Fit:
    """Fit a curvature around the present weights of a model.

    Parameters
    ----------
    loader : iterable
        of batches with labels; all ranks have their own
    structure : Structure
    settings : Mapping
        what all ranks must have alike
    before : Fit, optional
        to add the data to, around the same weights, which are where they were
    progress_bar : bool, default=False
        whether to show one

    Returns
    -------
    Fit

    Raises
    ------
    ValueError
        See `LoRALaplace.fit`.
    RuntimeError
        See `LoRALaplace.fit`.
    """
    recorder = structure.recorder
    model, blocks = recorder.model, recorder.blocks
    with together():
        if before is None:
            check_runs(model, blocks)
        else:
            check_same(model, blocks, before.model, before.mean)
        # Before the data are read, whose loader may run code of the user's that changes
        # the model.
        state, standing = ModelState.of(model, blocks), standing_of(model, blocks)
        mean = flatten_weights(blocks, model.device)
        check_alike_on_ranks(state, mean, repr((mean.dtype, dict(settings))))
        sums = sums_over(
            loader,
            structure,
            before=None if before is None else before.sums,
            n_before=0 if before is None else before.n_data,
            progress_bar=progress_bar,
        )
        # A later part of the data may well leave out a layer that an earlier one has
        # used.
        if before is None:
            recorder.check_called(sums.called)
        loss = sums.loss
        n_data = sums.n_data
        if before is not None:
            loss = loss + before.loss
            n_data += before.n_data
        return Fit(
            mean=mean,
            sums=sums.curvature,
            curvature=structure.decompose(sums.curvature, n_data),
            loss=loss,
            n_data=n_data,
            n_outputs=sums.n_outputs,
            model=state,
            places=recorder.places,
            standing=standing,
        )
