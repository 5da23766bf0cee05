"""The prior precision that held-out examples choose for another training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, SubsetRandomSampler

from laplace_lora_ext.messages import warn
from laplace_lora_ext.models.default_device import as_tensor, restored
from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.models.weights import flattened
from laplace_lora_ext.processes.exchange import count, of_first
from laplace_lora_ext.processes.shards import Shard
from laplace_lora_ext.tuning.gridsearch import GridSearch
from laplace_lora_ext.tuning.history import TuningHistory
from laplace_lora_ext.tuning.method import TuningMethod

_BATCH_SIZE = 8  # where the loader has batches of many sizes


@dataclass(frozen=True, kw_only=True, eq=False)
class SecondTraining(TuningMethod):
    """Train again without some of the examples, and let these choose the prior precision.

    The posterior of that other training is fitted to the rest of the data. The prior precision that
    predicts the held-out examples best then serves the model of all examples, which stays as it is.
    Held-out labels show what no method can read off the trained weights, such as noise that a model
    has memorised.

    With few held-out examples the choice is largely chance. Several trainings each hold out other
    examples and choose together: five, with a fifth held out, are a full cross-validation.

    Parameters
    ----------
    train : callable
        takes a data set, trains another adapter on it as the fitted one was trained, from the same
        start, and returns the model, which must not share LoRA weights with the fitted one. The
        data set is a `torch.utils.data.Subset`, or what the `select` of a `datasets.Dataset`
        returns
    train_loader : DataLoader
        the data of the fit; examples that its sampler leaves out are not used
    held_out : float, default=0.2
        the share of the examples to hold out, between 0 and 1
    trainings : int, default=1
        how many times to train, each time with other examples held out
    search : callable, optional
        takes `val_loader` and the options of `TuningMethod`, and returns the method that chooses:
        by default `GridSearch` with the link "mean_field". For several trainings it must try the
        same prior precisions, as a grid search does
    generator : torch.Generator, optional
        for the examples to hold out; if omitted, every call holds out the same
    init_prior_prec, prior_structure, progress_bar
        as for `search`

    Raises
    ------
    ValueError
        If `held_out` is not between 0 and 1, `trainings` below 1 or more than there are shares of
        that size, `train_loader` has no data set with a length or too few examples, the models
        share LoRA weights or differ in their number of outputs, or the searches of several
        trainings tried other prior precisions.
    TypeError
        If `train` returns no model.

    Warns
    -----
    UserWarning
        If its LoRA weights equal those of the fitted model.
    """

    train: Callable[[Dataset], nn.Module]
    train_loader: DataLoader
    held_out: float = 0.2
    trainings: int = 1
    search: Callable[..., TuningMethod] = partial(GridSearch, link_approx="mean_field")  # noqa: RUF009
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out must be between 0 and 1, not {self.held_out}.")
        if not 1 <= self.trainings <= 1 / self.held_out:
            raise ValueError(
                f"trainings must be at least 1, and at most {int(1 / self.held_out)} if each holds "
                f"out {self.held_out:g} of the examples, not {self.trainings}."
            )

    def _search(self, la: Posterior) -> TuningHistory:
        la._check_H_init()
        histories, sizes = [], []
        for part, rest in self._splits():
            other = self._other(la, part)
            search = self.search(
                val_loader=self._loader(rest),
                init_prior_prec=self.init_prior_prec,
                prior_structure=self.prior_structure,
                progress_bar=self.progress_bar,
            )
            histories.append(search(other))
            sizes.append(len(rest))
            chosen = other.prior_precision
        if self.trainings == 1:
            la.prior_precision = chosen
            return histories[0]
        history = _mean(histories, sizes)
        la.prior_precision = history.prior_precision[history.objective.argmin()]
        return history

    def _other(self, la: Posterior, part: Dataset) -> Any:
        """A posterior of the same kind, of another training, fitted to what that was given."""
        with restored():
            model = self.train(part)
        if not isinstance(model, nn.Module):
            raise TypeError(f"train must return the model it has trained, not {model!r}.")
        if _places(block.weight for block in la.blocks) & _places(model.parameters()):
            raise ValueError(
                "train has trained the fitted model again, or shares LoRA weights with it: make "
                "another model in each call, base model included."
            )
        la._check_model()
        other = la.around(model)
        _warn_of_copy(la, other)
        other.fit(self._loader(part), progress_bar=self.progress_bar)
        if other.n_outputs != la.n_outputs:
            raise ValueError(
                f"train has returned a model of {other.n_outputs} outputs, and the fitted one has "
                f"{la.n_outputs}."
            )
        return other

    def _splits(self) -> Iterator[tuple[Any, Any]]:
        """The examples to train on and those to hold out, each in the data's order."""
        data: Any = getattr(self.train_loader, "dataset", None)
        if not isinstance(data, Sized):
            raise ValueError(
                "A second training splits the examples: pass a DataLoader whose data set has a "
                "length."
            )
        if count() > 1 and not Shard(self.train_loader).is_known:
            raise ValueError(
                "A second training splits the examples of all ranks: pass a loader with a "
                "DistributedSampler, or accelerator.prepare(loader)."
            )
        places = self._given(len(data))
        ends = [round(n * self.held_out * len(places)) for n in range(self.trainings + 1)]
        sizes = [end - start for start, end in pairwise(ends)]
        if not 0 < min(sizes) <= max(sizes) < len(places):
            raise ValueError(
                f"{len(places)} examples are too few to hold out a share of {self.held_out:g}."
            )
        generator = self.generator or torch.Generator().manual_seed(0)
        order = of_first(places[torch.randperm(len(places), generator=generator)]).tolist()
        for start, end in pairwise(ends):
            yield _chosen(data, order[:start] + order[end:]), _chosen(data, order[start:end])

    def _given(self, n_examples: int) -> torch.Tensor:
        """Places of the examples that the loader gives: others may be validation or test data."""
        sampler, batches = self.train_loader.sampler, self.train_loader.batch_sampler
        if isinstance(sampler, SubsetRandomSampler):
            return as_tensor(sampler.indices)
        if count() == 1 and not _is_torchs(batches):
            return _in_order(chain.from_iterable(copy(batches)))  # pyright: ignore[reportArgumentType]
        if count() == 1 and not _is_torchs(sampler):
            return _in_order(copy(sampler))
        return torch.arange(n_examples)

    def _loader(self, examples: Any) -> DataLoader:
        """Batches of examples, once and in order; each process gets its share."""
        makes_batches = self.train_loader.batch_sampler is not None  # else the data set does
        return DataLoader(
            examples,
            batch_size=self.train_loader.batch_size or (_BATCH_SIZE if makes_batches else None),
            sampler=DistributedSampler(examples, shuffle=False) if count() > 1 else None,
            collate_fn=self.train_loader.collate_fn,
        )


def _is_torchs(sampler: Any) -> bool:
    """Whether a sampler is PyTorch's own: those give all examples, or draw from all."""
    return sampler is None or type(sampler).__module__.startswith("torch.utils.data")


def _in_order(places: Iterable[Any]) -> torch.Tensor:
    return torch.tensor(sorted({int(place) for place in places}))


def _places(weights: Iterable[torch.Tensor]) -> set[int]:
    """Where weights lie in memory."""
    return {weight.data_ptr() for weight in weights} - {0}


def _warn_of_copy(la: Posterior, other: Any) -> None:
    """Warn of a copy of the fitted model, which has learnt the held-out examples as well."""
    fitted, found = la.mean, flattened(other.blocks, la._device)
    if fitted.shape == found.shape and torch.equal(fitted, found.to(fitted.dtype)):
        warn(
            "train has returned LoRA weights that equal those of the fitted model, which has seen "
            "the held-out examples: train another adapter on the given examples alone."
        )


def _mean(histories: Sequence[TuningHistory], sizes: Sequence[int]) -> TuningHistory:
    """The mean loss of several searches, weighted by how many examples each asked."""
    first, *others = histories
    if any(not torch.equal(other.prior_precision, first.prior_precision) for other in others):
        raise ValueError(
            "The searches of several trainings must try the same prior precisions: use GridSearch."
        )
    objectives = torch.stack([history.objective for history in histories])
    weights = torch.tensor(sizes, dtype=objectives.dtype) / sum(sizes)
    return replace(first, objective=weights @ objectives)


def _chosen(data: Any, places: list[int]) -> Any:
    """Some examples of a data set; trainers know columns only of a `datasets.Dataset`."""
    places = sorted(places)
    return data.select(places) if hasattr(data, "select") else Subset(data, places)
