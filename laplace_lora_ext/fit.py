"""A fit: what a posterior knows of its data, as one value that nothing changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from math import log
from typing import Any

import torch
from torch import Tensor

from laplace_lora_ext.curvature.accumulation import Structure
from laplace_lora_ext.messages import naming, warn
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.running import Standing
from laplace_lora_ext.models.same_model import (
    ModelState,
    check_alike_on_ranks,
    check_runs,
    check_same,
    standing_of,
)
from laplace_lora_ext.models.weights import Home, flatten_weights
from laplace_lora_ext.predictive.learnt_variance import LearntVariance
from laplace_lora_ext.processes import count, gathered, rank
from laplace_lora_ext.processes.shards import Share
from laplace_lora_ext.tasks.task import ClassCounts

_LITTLE = 0.1  # probability of all answers together
_GUESS = 0.99  # a loss from this share of the labels' entropy on is chance


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
    homes : list of Home
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
    homes: list[Home]
    learnt_variance: LearntVariance | None = None
    standing: Standing | None = None

    @classmethod
    def from_state_dict(
        cls, state: Mapping[str, Any], structure: Structure, model: ModelState
    ) -> Fit:
        """Rebuild what `state_dict` returned, where the structure's weights are now.

        The model's state is given, since it may have been cast.
        """
        homes = structure.recorder.homes
        device, dtype = homes[0]
        sums = structure.unpack(state["H"])
        learnt = state["learnt_variance"]
        return cls(
            mean=state["mean"].to(device, dtype),
            sums=sums,
            curvature=structure.decompose(sums, state["n_data"]),
            loss=state["loss"].to(device),
            n_data=state["n_data"],
            n_outputs=state["n_outputs"],
            model=model,
            homes=homes,
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
        # Packed sums know no place, and the curvature follows from them.
        packed = self.state_dict(structure)
        return self.from_state_dict(packed, structure, self.model)


def fit(
    loader: Iterable[Any],
    structure: Structure,
    *,
    before: Fit | None,
    progress_bar: bool,
) -> Fit:
    """Fit a curvature around the present weights of a model.

    Call it within `processes.together`, since ranks wait for each other.

    Parameters
    ----------
    loader : iterable
        of batches with labels; all ranks have their own
    structure : Structure
        whose settings all ranks must have alike
    before : Fit or None
        to add the data to, around the same weights, which are where they were
    progress_bar : bool
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
    if before is None:
        check_runs(model, blocks)
    else:
        check_same(model, blocks, before.model, before.mean)
    # Before the data are read, whose loader may run code of the user's that changes
    # the model.
    state, standing = ModelState.of(model, blocks), standing_of(model, blocks)
    mean = flatten_weights(blocks, model.device)
    check_alike_on_ranks(state, mean, repr((mean.dtype, structure.settings)))
    sums = sums_over(loader, structure, before, progress_bar)
    # A later part of the data may well leave out a layer that an earlier one has used.
    if before is None:
        recorder.check_called(sums.called)
    else:
        loss, n_data = sums.loss + before.loss, sums.n_data + before.n_data
        sums = replace(sums, loss=loss, n_data=n_data)
    return Fit(
        mean=mean,
        sums=sums.curvature,
        curvature=structure.decompose(sums.curvature, sums.n_data),
        loss=sums.loss,
        n_data=sums.n_data,
        n_outputs=sums.n_outputs,
        model=state,
        homes=recorder.homes,
        standing=standing,
    )


# --- the pass over training data, by one process or by many ---------------------------


@dataclass(frozen=True)
class Sums:
    """Sums over data: of one process, or of all."""

    curvature: Any  # as the structure sums it
    loss: Tensor  # (), float64
    n_data: int = 0
    n_outputs: int = 0
    # Indices of the blocks whose layers any batch called.
    called: frozenset[int] = frozenset()
    class_counts: ClassCounts = field(default_factory=ClassCounts)

    def followed_by(self, later: Sums) -> Sums:
        """Add the counts of a later batch, or of another rank, and take its curvature.

        A later batch's has this one's in it, and those of ranks are joined elsewhere.
        """
        return Sums(
            curvature=later.curvature,
            loss=self.loss + later.loss.to(self.loss),
            n_data=self.n_data + later.n_data,
            # Who has no data has made no pass that would tell.
            n_outputs=max(self.n_outputs, later.n_outputs),
            called=self.called | later.called,
            class_counts=self.class_counts + later.class_counts,
        )

    def warn(self) -> None:
        """Warn of a loss that is no better than chance."""
        loss, chance = self.loss.item(), loss_of_chance(self.class_counts)
        if 0 < _GUESS * chance <= loss:
            warn(
                "The trained model is no better than guessing on these texts: its loss "
                f"is {loss / self.n_data:.4f}, and would be "
                f"{chance / self.n_data:.4f} without reading them. Was the adapter "
                'saved without its head? With a task_type such as "SEQ_CLS", or the '
                "head in modules_to_save, PEFT saves both. Else check that texts and "
                "labels are those of training. (A training with weights of classes can "
                "have this effect, too.)"
            )


def loss_of_chance(class_counts: ClassCounts) -> float:
    """Compute the summed loss of guesses by the classes' frequencies alone."""
    of_columns: Counter[int] = Counter()
    for (column, _), n_labels in class_counts.items():
        of_columns[column] += n_labels
    return sum(
        n_labels * log(of_columns[column] / n_labels)
        for (column, _), n_labels in class_counts.items()
    )


def sums_over(
    loader: Iterable[Any], structure: Structure, before: Fit | None, progress_bar: bool
) -> Sums:
    """Sum batches of all ranks' loaders, counting each example once.

    The curvature goes on from that of `before`, which stays as it is: a fit in parts
    sums as one fit does. Loss and `n_data` are of the loader alone. A `ValueError` if
    there are no data, or two ranks have the same.
    """
    share = Share(loader)
    # Other ranks' sums are added to the first one's.
    start = before.sums if before is not None and rank() == 0 else structure.zeros()
    n_before = 0 if before is None else before.n_data
    own = _own_sums(share, structure, start, n_before, progress_bar)
    if share.size not in (None, own.n_data):
        warn(
            f"The loader gave {own.n_data} examples, but its data set has "
            f"{share.size}: is drop_last set, or does a sampler repeat some or leave "
            "some out?"
        )
    # All but the curvature, which is large, and joined once nothing speaks against it.
    told = replace(own, curvature=None, loss=own.loss.cpu())
    of_all = reduce(Sums.followed_by, gathered(told))
    if not of_all.n_data:
        raise ValueError(
            "The training loader has no data. (A generator can be read once.)"
        )
    share.refuse_copies()
    curvature = own.curvature
    if count() > 1:
        packed = gathered(structure.pack(curvature))
        curvature = reduce(structure.merge, map(structure.unpack, packed))
    of_all.warn()
    return replace(of_all, curvature=curvature, loss=of_all.loss.to(own.loss.device))


def _own_sums(
    share: Share, structure: Structure, start: Any, n_before: int, progress_bar: bool
) -> Sums:
    """Sum the batches of this rank's share, from `start` on."""
    model, used = structure.recorder.model, structure.recorder.taps.used
    used.clear()
    loss = torch.zeros((), device=model.device, dtype=torch.float64)
    sums = Sums(start, loss)
    for name, batch in share.batches("[Computing Hessian]", progress_bar):
        with naming(name):
            X, y = model.split(batch)
            if not sums.n_data and model.class_token_ids is not None:
                warn_of_rare_answers(model, X)
            examples = n_before + share.take_indices(len(y))
            n_new = len(examples)
            # Ranks wait for each other's passes: some count nowhere.
            numbers = examples if n_new else torch.zeros(len(y), dtype=torch.long)
            owners = model.owners(batch)
            of_rows = numbers if owners is None else numbers[owners.cpu()]
            loss, curvature = structure.add(sums.curvature, X, y, of_rows)
            if n_new:
                of_batch = Sums(
                    curvature,
                    loss,
                    n_new,
                    model.output_size,
                    class_counts=structure.task.class_counts(y),
                )
                sums = sums.followed_by(of_batch)
    return replace(sums, called=frozenset(used))


def warn_of_rare_answers(model: LogitsModel, inputs: Any) -> None:
    """Warn where a language model hardly ever answers with its classes' tokens."""
    with model.forward_passes():
        log_p = model.log_probs(inputs)
    *of_answers, _ = log_p.exp().mean(0).tolist()
    answered = sum(of_answers)
    if answered < _LITTLE:
        warn(
            f"The tokens class_token_ids have only {100 * answered:.2g} % of the "
            "model's probability together: does it write the answers with other "
            "tokens, such as those with a space in front? (If it was trained on these "
            "tokens' logits alone, all is well.)"
        )
