"""Training in stages: some texts choose the prior, and are learnt afterwards."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import set_seed

from laplace_lora_ext.laplace import Laplace, has_answers
from laplace_lora_ext.lora_laplace import LoRALaplace
from laplace_lora_ext.messages import check_counts, warn
from laplace_lora_ext.metrics import compare
from laplace_lora_ext.mixture import LaplaceMixture
from laplace_lora_ext.models.adapters import (
    active_again,
    add_fresh_adapter,
    find_peft_model,
    own_adapter_back,
)
from laplace_lora_ext.models.logits_model import find_transformer
from laplace_lora_ext.models.lora_layers import looks_trained
from laplace_lora_ext.predicting import Predictor
from laplace_lora_ext.predictive.posterior import Hyperparameters
from laplace_lora_ext.processes.shards import Division, check_divisible, divide
from laplace_lora_ext.training.averaging import share_of
from laplace_lora_ext.training.trainers import (
    Examples,
    Log,
    forget,
    loader_of,
    same_random_states,
    train_or_read,
)
from laplace_lora_ext.tuning.gridsearch import GridSearch, nll_of_tokens
from laplace_lora_ext.tuning.method import TuningHistory

SECOND_STAGE = 0.25
"""Steps of the second stage, relative to a training on all texts."""

_MEMBER = "member_{}"  # adapters of a mixture but the first, which is the user's

Train = Callable[[nn.Module, Dataset, float], object]
"""Trains a model's active adapter on examples, for a share of the steps of a whole
training."""

TrainStage = Callable[[int, int, float, Any], object]
"""Trains in stage 1 or 2 a member, which is active, for a share of the steps of a whole
training on examples."""


def add_member(model: nn.Module, number: int) -> Callable[[], None]:
    """Add an untrained adapter like the active one, by torch's random state.

    Returns a function that makes it active again.
    """
    add_fresh_adapter(find_peft_model(model), _MEMBER.format(number))
    return active_again(model)


@dataclass(frozen=True)
class Choice:
    """Holds what held-out examples chose for each member, and their losses."""

    hyperparameters: list[Hyperparameters]
    history: TuningHistory


def choose_priors(
    posteriors: Sequence[LoRALaplace], held_out: Any, progress_bar: bool = False
) -> Choice:
    """Let held-out examples choose for one posterior, or for the mixture of several.

    Chosen are prior precision and scale; the posteriors keep their own.

    Parameters
    ----------
    posteriors : sequence of LoRALaplace
    held_out : DataLoader
        or what `predictive_statistics` of the posterior, or of the mixture, returned
    progress_bar : bool, default=False
        whether to show one
    """
    first = posteriors[0]
    has_noise = first.task.has_noise
    kinds = {block.kind for block in first.blocks}
    has_kinds = len(kinds) > 1 and not first.task.writes
    if len(posteriors) > 1 and (has_noise or has_kinds):
        # A mixture has a common factor alone: its members choose how prior precisions
        # of kinds differ, and numbers' noise.
        posteriors = [copy(la) for la in posteriors]
        of_members = getattr(held_out, "members", [held_out] * len(posteriors))
        for la, own in zip(posteriors, of_members, strict=True):
            search = GridSearch(
                val_loader=own, optimize_scale=has_noise, progress_bar=progress_bar
            )
            search(la)
    # A mixture wants another prior than each of its members: it is less sure than they
    # are.
    together = joined(posteriors)
    # Texts that are written have no link, and all others are predicted with the default
    # one.
    history = together.optimize_prior_precision(
        method="gridsearch", val_loader=held_out, progress_bar=progress_bar
    )
    return Choice([member.hyperparameters for member in together.members], history)


def joined(posteriors: Sequence[LoRALaplace]) -> LoRALaplace | LaplaceMixture:
    """Copy a posterior, or join copies of several to a mixture."""
    return copy(posteriors[0]) if len(posteriors) == 1 else LaplaceMixture(posteriors)


@dataclass(frozen=True)
class _Training:
    """A model that is trained in stages, and how posteriors are fitted to it."""

    model: nn.Module
    examples: Examples
    settings: dict[str, Any]  # for the Laplace class
    progress_bar: bool

    def divided(
        self, held_out: float, generator: torch.Generator | None
    ) -> tuple[Division, str]:
        """Hold out a share of the examples; return a hash of which, and of what else.

        Refuses what could not be fitted later.
        """
        check_divisible(self.examples.loader, held_out)
        with same_random_states(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the fits will warn
            la = Laplace(self.model, **self.settings)
            # One batch shows most of what a fit refuses, before hours of training.
            la.fit(list(islice(self.examples.batches(self.examples.all), 1)))
            groups = self.examples.groups(la)
        if looks_trained(self.model, la.blocks):
            warn(
                "The adapter looks trained: its lora_B is not 0. If it knows these "
                "texts, held-out ones are no test, and the prior precision becomes too "
                "large. Begin with a new adapter."
            )
        division = divide(self.examples.loader, held_out, groups, generator)
        # In another order, examples have their classes elsewhere.
        identity = [division.places, groups.tolist()]
        return division, hashlib.sha256(str(identity).encode()).hexdigest()[:16]

    def run(
        self, train: TrainStage, division: Division, held_out: float, members: int
    ) -> tuple[LoRALaplace | LaplaceMixture, TuningHistory]:
        """Return the posterior of all examples, and the losses of the held-out ones."""
        validation = self.examples.batches(division.held)
        with own_adapter_back(self.model):
            adapters = [active_again(self.model)]
            for number in range(1, members):
                adapters.append(add_member(self.model, number))

            def posteriors(stage: int, share: float, examples: Any) -> list[Any]:
                """Train the members in turn, and fit a posterior around each."""
                fitted = []
                for member, activate in enumerate(adapters):
                    activate()
                    train(stage, member, share, examples)
                    la = Laplace(self.model, **self.settings)
                    batches = self.examples.batches(examples)
                    la.fit(batches, progress_bar=self.progress_bar)
                    fitted.append(la)
                return fitted

            # The same texts for all members: only what none of them has learnt can
            # judge their mixture.
            firsts = posteriors(1, 1 - held_out, division.rest)
            # Now: the second stage changes the weights that these posteriors are
            # around.
            choice = choose_priors(firsts, validation, self.progress_bar)
            seconds = posteriors(2, SECOND_STAGE, self.examples.all)
        for la, hyperparameters in zip(seconds, choice.hyperparameters, strict=True):
            la.hyperparameters = hyperparameters
        return joined(seconds), choice.history


def train_in_stages(
    trainer: Any,
    held_out: float = 0.2,
    *,
    members: int = 1,
    average: bool | float = False,
    likelihood: str | None = None,
    resume_from_checkpoint: bool = False,
    progress_bar: bool = False,
    **options: Any,
) -> Any:
    """Train a calibrated model, in place of `trainer.train()`, at 1.05 times its cost.

    The first stage trains without a share of the texts, which then choose the prior
    precision and the scale of the logits; the second trains the same adapter on all
    texts for a quarter of the steps, with an optimizer and a schedule of its own, and
    keeps both. No label is lost. With few texts the first stage may leave a poor model
    that the second does not mend: compare its accuracy once.

    Callbacks, logs, evaluations and checkpoints of the trainer work in both stages. The
    adapter and the posterior end in its `output_dir`, checkpoints of the first stage in
    "stage_1" there, and the posterior's figures in `trainer.state.log_history`, with
    the logs of all stages. After each training the random states are those of the
    trainer's seed.

    Parameters
    ----------
    trainer : transformers.Trainer
        or a subclass, such as TRL's `SFTTrainer` and `RewardTrainer`, with a PEFT model
        and a `train_dataset` that has a length
    held_out : float, default=0.2
        the share of the texts that the first stage holds out, between 0 and 1: of each
        class as of all, but never its last text
    members : int, default=1
        how many adapters to train on the same base model. All hold out the same texts,
        which choose the prior of their mixture; each costs as much as the first
    average : bool or float, default=False
        with True, the mean of the weights over the last 0.6 of each stage's steps, or
        over another share of them, is what a stage leaves, saves and fits. The learning
        rate is then constant after the warm-up: see `AveragingCallback`
    likelihood : str, optional
        as for `laplace_lora_ext.Laplace`; of a reward trainer "reward_modeling", and of
        a language model without `class_token_ids` and `class_texts`
        "language_modeling"; with batches of choices pass "classification"
    resume_from_checkpoint : bool, default=False
        go on after an interruption, in whichever stage it was
    progress_bar : bool, default=False
        whether to show one
    **options
        for the Laplace class, such as `class_token_ids` and `backend_kwargs`; the
        `tokenizer` of `class_texts` is the trainer's unless you pass one

    Returns
    -------
    LoRALaplace or LaplaceMixture
        fitted, with its prior precision; a mixture if there are several members

    Raises
    ------
    ValueError
        Before any training: if the trainer's data can't be divided, no class has a
        second text, or the model or a batch does not suit the likelihood.
    """
    check_counts(members=members)
    share_to_average = share_of(average)
    if options.get("class_texts") is not None:
        options.setdefault("tokenizer", trainer.processing_class)
    training = _Training(
        model=trainer.model,
        examples=Examples.of_trainer(trainer),
        settings=options | {"likelihood": likelihood or _likelihood(trainer, options)},
        progress_bar=progress_bar,
    )
    args = trainer.args
    seed = args.seed if args.data_seed is None else args.data_seed
    generator = torch.Generator().manual_seed(seed)
    division, identity = training.divided(held_out, generator)
    output = Path(args.output_dir)
    if not resume_from_checkpoint and args.should_save:
        for stage, member in product((1, 2), range(members)):
            forget(output / _folder(stage, member))
    log: Log = []

    def train(stage: int, member: int, share: float, examples: Any) -> None:
        entries = train_or_read(
            trainer,
            examples,
            share,
            output / _folder(stage, member),
            average=share_to_average,
            decided_by={"members": members, "held-out examples": identity},
            resume=resume_from_checkpoint,
        )
        log.extend(entry | {"stage": f"stage_{stage}"} for entry in entries)
        # Whether it has been trained now, or before it was interrupted.
        set_seed(args.seed + 1 + (stage - 1) * members + member)

    la, history = training.run(train, division, held_out, members)
    trainer.save_model()
    if trainer.args.should_save:
        la.save_pretrained(output)
    trainer.state.log_history = log
    trainer.log(_figures(trainer, la, history))
    trainer.save_state()
    return la


def in_stages(
    train: Train,
    model: nn.Module,
    train_loader: DataLoader,
    held_out: float = 0.2,
    *,
    members: int = 1,
    generator: torch.Generator | None = None,
    progress_bar: bool = False,
    **options: Any,
) -> Any:
    """Train in stages as `train_in_stages` does, with a training loop of one's own.

    Parameters
    ----------
    train : callable
        `train(model, data_set, share)` trains the active adapter on the data set, for
        that share of a whole training's steps, with a new optimizer and schedule, and
        perhaps with a `WeightAverage`. The data set is a `torch.utils.data.Subset`, or
        what the `select` of a `datasets.Dataset` returns
    model : torch.nn.Module
        with an adapter to be trained; for several members a `PeftModel`
    train_loader : DataLoader
        of all examples; its collator and batch size also serve the fits
    held_out : float, default=0.2
        as for `train_in_stages`
    members : int, default=1
        as for `train_in_stages`
    generator : torch.Generator, optional
        for the examples to hold out; if omitted, every call holds out the same
    progress_bar : bool, default=False
        over the passes between the trainings
    **options
        for `laplace_lora_ext.Laplace`, such as `likelihood` and `class_token_ids`

    Returns
    -------
    LoRALaplace or LaplaceMixture
        of all texts; a mixture where there are several members

    Raises
    ------
    ValueError
        Before any training, as `train_in_stages`.
    """
    check_counts(members=members)
    training = _Training(model, Examples.of_loader(train_loader), options, progress_bar)

    def train_stage(stage: int, member: int, share: float, examples: Any) -> None:
        train(model, examples, share)

    division, _ = training.divided(held_out, generator)
    la, _ = training.run(train_stage, division, held_out, members)
    return la


def _folder(stage: int, member: int) -> Path:
    """Name the folder of a training, below that of all outputs."""
    # The user's own adapter ends where an ordinary training would leave it.
    if (stage, member) == (2, 0):
        return Path()
    return Path(f"stage_{stage}", _MEMBER.format(member) if member else "")


def _likelihood(trainer: Any, options: dict[str, Any]) -> str | None:
    """Tell the likelihood by the kind of a trainer; None if the model tells it."""
    # By name, since TRL need not be installed.
    if any(cls.__name__ == "RewardTrainer" for cls in type(trainer).__mro__):
        return "reward_modeling"
    transformer = find_transformer(trainer.model)
    writes = transformer is not None and transformer.can_generate()
    return "language_modeling" if writes and not has_answers(options) else None


def _figures(trainer: Any, la: Predictor, history: TuningHistory) -> dict[str, float]:
    """Measure a posterior: on held-out texts, and on the trainer's evaluation data."""
    priors = [member.prior_precision.mean().item() for member in la.members]
    scales = [member.logit_scale for member in la.members]
    figures = {
        "laplace_held_out_nll": history.loss,
        "laplace_prior_precision": sum(priors) / len(priors),
        "laplace_logit_scale": sum(scales) / len(scales),
    }
    if la.members[0].task.has_noise:
        noises = [member.sigma_noise.item() for member in la.members]
        figures["laplace_sigma_noise"] = sum(noises) / len(noises)
    # A dictionary is of several data sets, and each would need figures of its own.
    if trainer.eval_dataset is not None and not isinstance(trainer.eval_dataset, dict):
        figures |= eval_figures(la, loader_of(trainer, trainer.eval_dataset))
    return figures


def eval_figures(la: Predictor, loader: Iterable[Any]) -> dict[str, float]:
    """Measure a posterior on evaluation data.

    The figures are those of `quality`, or of `quality_of_numbers`; of texts the NLL of
    a token.
    """
    if la.members[0].task.writes:
        return {"eval_laplace_nll": nll_of_tokens(la, loader)}
    measured = compare(la, loader).posterior
    return {f"eval_laplace_{name}": figure for name, figure in measured.items()}
