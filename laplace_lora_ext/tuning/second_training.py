"""Trains again without some of the examples, which then choose the prior precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import set_seed

from laplace_lora_ext.models.adapters import add_fresh_adapter, own_adapter_back
from laplace_lora_ext.models.weights import flatten_weights
from laplace_lora_ext.predicting import Predictor
from laplace_lora_ext.predictive.posterior import Posterior
from laplace_lora_ext.training.trainers import (
    Examples,
    peft_model_of,
    train_with,
    without_trace,
)
from laplace_lora_ext.tuning.gridsearch import GridSearch
from laplace_lora_ext.tuning.method import TuningHistory, TuningMethod

_NAME = "second_training_0"  # of the adapter that a trainer trains


@dataclass(frozen=True, kw_only=True, eq=False)
class SecondTraining(TuningMethod):
    """Train again without some examples, and let these choose the prior.

    The posterior of that other training is fitted to the rest of the data. The prior
    precision that predicts the held-out examples best then serves the model of all
    examples, which stays as it is. Held-out labels show what no method can read off the
    trained weights, such as noise that a model has memorised.

    The other posterior is in the history: `LaplaceMixture([la, *history.posteriors])`
    often has a lower NLL than each alone.

    Parameters
    ----------
    trainer : transformers.Trainer, optional
        the one that has trained the model. It trains a new adapter of the same
        configuration on the same base model, "second_training_0", with another seed
        and its checkpoints in a folder of that name in its `output_dir`.
        The adapter stays in the model, and yours active
    train : callable, optional
        in place of a trainer: takes a data set, trains another adapter on it as the
        fitted one was trained, from the same start, and returns the model with that
        adapter active. This may be the fitted model with an adapter added. The data set
        is a `torch.utils.data.Subset`, or what the `select` of a `datasets.Dataset`
        returns
    train_loader : DataLoader, optional
        for `train`: the data of the fit. Examples that its sampler leaves out are not
        used
    held_out : float, default=0.2
        the share of the examples to hold out, between 0 and 1: of each class as of all,
        but never its last example. Copies of a text stay together
    generator : torch.Generator, optional
        for the examples to hold out; if omitted, every call holds out the same
    init_prior_prec : float or torch.Tensor, default=1.0
        as for `GridSearch`
    prior_structure : {"scalar", "kind", "layerwise", "diag"}, optional
        as for `GridSearch`
    progress_bar : bool, default=False
        whether to show one

    Raises
    ------
    ValueError
        If there is not either a trainer or `train` with a `train_loader`; if `held_out`
        is not between 0 and 1, the data have no length or too few examples, the model
        has an adapter of that name, or the training ends with the LoRA weights of the
        fitted model.
    """

    trainer: Any = None
    train: Callable[[Dataset], nn.Module] | None = None
    train_loader: DataLoader | None = None
    held_out: float = 0.2
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        # Both without a trainer, and neither beside one.
        needed = self.trainer is None
        given = [self.train is not None, self.train_loader is not None]
        if given != [needed, needed]:
            raise ValueError(
                "A second training needs either the trainer that has trained the "
                "model, or train, a function that trains another model, and "
                "train_loader."
            )

    def _search(self, la: Predictor) -> TuningHistory:
        (fitted,) = la.members
        fitted.task.check_linearised()
        fitted.check_model()
        if self.trainer is not None:
            examples = Examples.of_trainer(self.trainer)
        else:
            assert self.train_loader is not None
            examples = Examples.of_loader(self.train_loader)
        rest, held, _ = examples.divided(fitted, self.held_out, self.generator)
        train = self.train or partial(self._from_trainer, fitted)
        with own_adapter_back(fitted.model):
            model = train(rest)
            # A function of the user's own may have trained the fitted adapter itself.
            fitted.check_model()
            posterior = fitted.for_model(model)
            own, others = (
                flatten_weights(la.blocks, fitted.model.device).double()
                for la in (fitted, posterior)
            )
            if torch.equal(own, others):
                raise ValueError(
                    "train has returned the LoRA weights of the fitted model, which "
                    "has seen the held-out examples: train another adapter in each "
                    "call, on the given examples alone, and return the model with that "
                    "adapter active."
                )
            posterior.fit(examples.batches(rest), progress_bar=self.progress_bar)
            search = GridSearch(
                val_loader=examples.batches(held),
                init_prior_prec=self.init_prior_prec,
                prior_structure=self.prior_structure,
                progress_bar=self.progress_bar,
            )
            history = search(posterior)
        return replace(history, posteriors=(posterior,))

    def _from_trainer(self, la: Posterior, rest: Dataset) -> nn.Module:
        """Let the trainer train a new adapter of the fitted model."""
        model = peft_model_of(self.trainer, la.model)
        fitted_adapter = la.blocks[0].adapter
        with without_trace(self.trainer):
            # Not the seed of the first training, whose weights the new ones would begin
            # with.
            set_seed(self.trainer.args.seed + 1)
            if model.active_adapter != fitted_adapter:
                model.set_adapter(fitted_adapter)
            add_fresh_adapter(model, _NAME)
            folder = Path(self.trainer.args.output_dir, _NAME)
            train_with(self.trainer, rest, 1 - self.held_out, folder)
        return la.model.model
