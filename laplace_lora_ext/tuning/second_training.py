"""The prior precision that held-out examples choose for another training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import set_seed

from laplace_lora_ext.models.adapters import (
    add_fresh_adapter,
    find_peft_model,
    own_adapter_back,
)
from laplace_lora_ext.models.posterior import Posterior
from laplace_lora_ext.models.weights import flattened
from laplace_lora_ext.processes.shards import (
    check_divisible,
    divided,
    in_order,
    in_order_like,
    taken,
)
from laplace_lora_ext.training.groups import groups_of
from laplace_lora_ext.training.trainers import check_trainer, loader_of, restored
from laplace_lora_ext.training.trainers import train as train_with
from laplace_lora_ext.tuning.gridsearch import GridSearch
from laplace_lora_ext.tuning.method import TuningHistory, TuningMethod

_NAME = "second_training_{}"  # of adapters that a trainer trains


@dataclass(frozen=True, kw_only=True, eq=False)
class SecondTraining(TuningMethod):
    """Train again without some of the examples, and let these choose the prior precision.

    The posterior of that other training is fitted to the rest of the data. The prior precision that
    predicts the held-out examples best then serves the model of all examples, which stays as it is.
    Held-out labels show what no method can read off the trained weights, such as noise that a model
    has memorised.

    With few held-out examples the choice is largely chance. Several trainings each hold out other
    examples and choose together: five, with a fifth held out, are a full cross-validation.

    The other posteriors are in the history: `LaplaceMixture([la, *history.posteriors])` often has
    a lower NLL than each alone.

    Parameters
    ----------
    trainer : transformers.Trainer, optional
        the one that has trained the model. It trains a new adapter of the same configuration on
        the same base model, "second_training_0" and so on, with another seed and its checkpoints in
        a folder of that name in its `output_dir`. The adapter stays in the model, and yours active
    train : callable, optional
        in place of a trainer: takes a data set, trains another adapter on it as the fitted one was
        trained, from the same start, and returns the model with that adapter active. This may be
        the fitted model with an adapter added. The data set is a `torch.utils.data.Subset`, or what
        the `select` of a `datasets.Dataset` returns
    train_loader : DataLoader, optional
        the data of the fit; by default the trainer's. Examples that its sampler leaves out are not
        used
    held_out : float, default=0.2
        the share of the examples to hold out, between 0 and 1: of each class as of all, but never
        its last example, and of numbers by quantiles
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
        If there is not either a trainer or `train` with a `train_loader`; if `held_out` is not
        between 0 and 1, `trainings` below 1 or more than there are shares of that size, the data
        have no length or too few examples, a training ends with the LoRA weights of the fitted
        model, or the searches of several trainings tried other prior precisions.
    TypeError
        If `train` returns no model.
    """

    trainer: Any = None
    train: Callable[[Dataset], nn.Module] | None = None
    train_loader: DataLoader | None = None
    held_out: float = 0.2
    trainings: int = 1
    search: Callable[..., TuningMethod] = partial(GridSearch, link_approx="mean_field")  # noqa: RUF009
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.trainer is None) == (self.train is None or self.train_loader is None):
            raise ValueError(
                "A second training needs either the trainer that has trained the model, or train, "
                "a function that trains another model, and train_loader."
            )
        if self.trainings * self.held_out > 1:
            raise ValueError(
                f"{self.trainings} trainings can't each hold out another {self.held_out:g} of the "
                "examples: lower held_out or trainings."
            )

    def _search(self, la: Posterior) -> TuningHistory:
        la.check_model()
        loader = self._loader()
        searches, histories, sizes, others = [], [], [], []
        check_divisible(loader, self.held_out, self.trainings)
        groups = groups_of(la, self._batches(taken(loader), loader), self.held_out)
        divisions = divided(loader, self.held_out, groups, self.generator, self.trainings)
        with own_adapter_back(la.model) as activate:
            for number, (part, rest) in enumerate(divisions):
                other = self._other(la, part, number)
                activate()
                other.fit(self._batches(part, loader), progress_bar=self.progress_bar)
                search = self.search(
                    val_loader=self._batches(rest, loader),
                    init_prior_prec=self.init_prior_prec,
                    prior_structure=self.prior_structure,
                    progress_bar=self.progress_bar,
                )
                searches.append(search)
                histories.append(search.choose(other))
                sizes.append(len(rest))
                others.append(other)
        history = histories[0] if self.trainings == 1 else _mean(histories, sizes)
        la.prior_precision = (
            others[0].prior_precision
            if self.trainings == 1
            else history.prior_precision[history.objective.argmin()]
        )
        searches[0].remark(la, history)  # once, on what all trainings have chosen together
        return replace(history, posteriors=tuple(others))

    def _loader(self) -> DataLoader:
        """Of all examples; their columns are those that a trainer divides."""
        if self.trainer is None:
            assert self.train_loader is not None
            return self.train_loader
        check_trainer(self.trainer)
        return in_order(self.trainer.train_dataset, 1)

    def _batches(self, examples: Any, like: DataLoader) -> DataLoader:
        if self.trainer is None:
            return in_order_like(like, examples)
        return loader_of(self.trainer, examples)

    def _other(self, la: Posterior, part: Dataset, number: int) -> Any:
        """A posterior of the same kind around another training, without a fit."""
        if self.trainer is not None:
            model = self._from_trainer(la, part, number)
        else:
            assert self.train is not None
            model = self.train(part)
        if not isinstance(model, nn.Module):
            raise TypeError(f"train must return the model it has trained, not {model!r}.")
        la.check_model()
        other = la.for_model(model)
        fitted, found = (flattened(blocks, la.model.device) for blocks in (la.blocks, other.blocks))
        if torch.equal(fitted, found.to(fitted.dtype)):
            raise ValueError(
                "train has returned the LoRA weights of the fitted model, which has seen the "
                "held-out examples: train another adapter in each call, on the given examples "
                "alone, and return the model with that adapter active."
            )
        return other

    def _from_trainer(self, la: Posterior, part: Dataset, number: int) -> nn.Module:
        model, adapter = find_peft_model(la.model), _NAME.format(number)
        if find_peft_model(self.trainer.model) is not model:
            raise ValueError("Pass the trainer of the posterior's model: this one has another.")
        with restored(self.trainer):
            set_seed(self.trainer.args.seed + 1 + number)
            if model.active_adapter != la.blocks[0].adapter:
                model.set_adapter(la.blocks[0].adapter)
            add_fresh_adapter(model, adapter)
            folder = Path(self.trainer.args.output_dir, adapter)
            train_with(self.trainer, part, 1 - self.held_out, folder)
        return la.model.model


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
