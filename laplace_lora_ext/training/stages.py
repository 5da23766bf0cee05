"""Training in stages: some texts choose the prior, and are learnt afterwards.

A training may go on where an interrupted run stopped. A mark in its folder says what
decides it, and once it has ended what its log is. Checkpoints that are older than the
mark are those of another run.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence, Sized
from copy import copy
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from statistics import fmean
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import set_seed
from transformers.trainer import TRAINER_STATE_NAME

from laplace_lora_ext.laplace import Laplace, has_answers
from laplace_lora_ext.lora_laplace import LoRALaplace
from laplace_lora_ext.messages import warn
from laplace_lora_ext.metrics import compare
from laplace_lora_ext.mixture import DESCRIPTION, LaplaceMixture
from laplace_lora_ext.models.adapters import (
    active_again,
    add_fresh_adapter,
    find_peft_model,
    own_adapter_back,
    read_adapter,
    write_adapter,
)
from laplace_lora_ext.models.batches import pad_token, text_config
from laplace_lora_ext.models.logits_model import find_transformer
from laplace_lora_ext.models.lora_layers import looks_trained
from laplace_lora_ext.predicting import Predictor
from laplace_lora_ext.predictive.posterior import Hyperparameters
from laplace_lora_ext.processes import of_first, rank
from laplace_lora_ext.processes.shards import Division
from laplace_lora_ext.saving import write_whole
from laplace_lora_ext.training.trainers import (
    Examples,
    loader_of,
    same_random_states,
    train_with,
)
from laplace_lora_ext.tuning.gridsearch import GridSearch, nll_of_tokens
from laplace_lora_ext.tuning.method import TuningHistory

SECOND_STAGE = 0.25
"""Steps of the second stage, relative to a training on all texts."""

_MARK = "laplace_stage.json"
# Arguments of a trainer that decide what it learns, beside model and data.
_DECISIVE = (
    "seed",
    "data_seed",
    "max_steps",
    "num_train_epochs",
    "train_batch_size",
    "gradient_accumulation_steps",
    "optim",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
    "label_smoothing_factor",
    "max_grad_norm",
    "adam_beta1",
    "adam_beta2",
)
_OF_ADAPTER = ("lora_alpha", "lora_dropout", "use_rslora")

_MEMBER = "member_{}"  # adapters of a mixture but the first, which is the user's

Log = list[dict[str, Any]]
"""What a trainer has logged."""

Train = Callable[[nn.Module, Dataset, float], object]
"""Trains a model's active adapter on examples, for a share of the steps of a whole
training."""


def add_member(model: nn.Module, number: int) -> Callable[[], None]:
    """Add an untrained adapter like the active one, by torch's random state.

    Returns a function that makes it active again.
    """
    add_fresh_adapter(find_peft_model(model), _MEMBER.format(number))
    return active_again(model)


def choose_priors(
    posteriors: Sequence[LoRALaplace], held_out: Any, progress_bar: bool = False
) -> tuple[list[Hyperparameters], TuningHistory]:
    """Let held-out examples choose for one posterior, or for the mixture of several.

    Returns what is chosen for each, its prior precision and scale among it, and the
    examples' losses; the posteriors keep their own.

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
    return [member.hyperparameters for member in together.members], history


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

    def divided(self, held_out: float, generator: torch.Generator | None) -> Division:
        """Hold out a share of the examples.

        Refuses what could not be fitted later.
        """
        with same_random_states(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the fits will warn
            la = Laplace(self.model, **self.settings)
            divided = self.examples.divided(la, held_out, generator)
            # One batch shows most of what a fit refuses, before hours of training.
            la.fit(list(islice(self.examples.batches(self.examples.all), 1)))
        if looks_trained(self.model, la.blocks):
            warn(
                "The adapter looks trained: its lora_B is not 0. If it knows these "
                "texts, held-out ones are no test, and the prior precision becomes too "
                "large. Begin with a new adapter."
            )
        return divided

    def run(
        self, train: Train, division: Division, held_out: float, members: int
    ) -> tuple[LoRALaplace | LaplaceMixture, TuningHistory]:
        """Return the posterior of all examples, and the losses of the held-out ones."""
        validation = self.examples.batches(division.held)
        with own_adapter_back(self.model):
            adapters = [active_again(self.model)]
            adapters += [add_member(self.model, each) for each in range(1, members)]

            def posteriors(share: float, examples: Any) -> list[Any]:
                """Train the members in turn, and fit a posterior around each."""
                fitted = []
                for activate in adapters:
                    activate()
                    train(self.model, examples, share)
                    la = Laplace(self.model, **self.settings)
                    batches = self.examples.batches(examples)
                    la.fit(batches, progress_bar=self.progress_bar)
                    fitted.append(la)
                return fitted

            # The same texts for all members: only what none of them has learnt can
            # judge their mixture.
            firsts = posteriors(1 - held_out, division.rest)
            # Now: the second stage changes the weights that these posteriors are
            # around.
            chosen, history = choose_priors(firsts, validation, self.progress_bar)
            seconds = posteriors(SECOND_STAGE, self.examples.all)
        for la, hyperparameters in zip(seconds, chosen, strict=True):
            la.hyperparameters = hyperparameters
        return joined(seconds), history


def train_in_stages(
    trainer: Any,
    held_out: float = 0.2,
    *,
    members: int = 1,
    likelihood: str | None = None,
    resume_from_checkpoint: bool = False,
    progress_bar: bool | None = None,
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
    the logs of all stages. Posteriors of several members are in folders there, one
    each. After each training the random states are those of the trainer's seed and the
    training's number.

    Parameters
    ----------
    trainer : transformers.Trainer
        or a subclass, such as TRL's `SFTTrainer` and `RewardTrainer`, with a PEFT model
        and a `train_dataset` that has a length
    held_out : float, default=0.2
        the share of the texts that the first stage holds out, between 0 and 1: of each
        class as of all, but never its last text. Copies of a text stay together
    members : int, default=1
        how many adapters to train on the same base model. All hold out the same texts,
        which choose the prior of their mixture; each costs as much as the first
    likelihood : str, optional
        as for `laplace_lora_ext.Laplace`; of a reward trainer "reward_modeling", and of
        a language model without `class_token_ids` and `class_texts`
        "language_modeling"; with batches of choices pass "classification"
    resume_from_checkpoint : bool, default=False
        go on after an interruption, in whichever stage it was
    progress_bar : bool, optional
        whether to show one between the trainings; by default where the trainer does
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
    tokenizer = trainer.processing_class
    if options.get("class_texts") is not None:
        options.setdefault("tokenizer", tokenizer)
    transformer = find_transformer(trainer.model)
    # As `trainer.train()` sets it: decoders that classify find the end of a text by it.
    if transformer is not None and pad_token(transformer) is None:
        text_config(transformer).pad_token_id = getattr(tokenizer, "pad_token_id", None)
    if progress_bar is None:
        progress_bar = not trainer.args.disable_tqdm
    training = _Training(
        model=trainer.model,
        examples=Examples.of_trainer(trainer),
        settings=options | {"likelihood": likelihood or _likelihood(trainer, options)},
        progress_bar=progress_bar,
    )
    args = trainer.args
    seed = args.seed if args.data_seed is None else args.data_seed
    generator = torch.Generator().manual_seed(seed)
    division = training.divided(held_out, generator)
    identity = str(crc32(str(division.indices).encode()))
    output = Path(args.output_dir)
    trainings = list(product((1, 2), range(members)))
    if not resume_from_checkpoint and args.should_save:
        for stage, member in trainings:
            (output / _folder(stage, member) / _MARK).unlink(missing_ok=True)
    in_turn = iter(enumerate(trainings, start=1))
    log: Log = []

    def train(_: nn.Module, examples: Any, share: float) -> None:
        number, (stage, member) = next(in_turn)
        entries = _train_or_read(
            trainer, examples, share, output / _folder(stage, member), identity
        )
        log.extend(entry | {"stage": f"stage_{stage}"} for entry in entries)
        # Whether it has been trained now, or before it was interrupted.
        set_seed(args.seed + number)

    la, history = training.run(train, division, held_out, members)
    if args.should_save:
        # An earlier run's mixture would still be read.
        Path(output, DESCRIPTION).unlink(missing_ok=True)
        la.save_pretrained(output)
    trainer.save_model()  # last, since it may upload the folder
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
        that share of a whole training's steps, with a new optimizer and schedule. The
        data set is a `torch.utils.data.Subset`, or what the `select` of a
        `datasets.Dataset` returns
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
    training = _Training(model, Examples.of_loader(train_loader), options, progress_bar)
    division = training.divided(held_out, generator)
    la, _ = training.run(train, division, held_out, members)
    return la


def _train_or_read(
    trainer: Any, examples: Any, share_of_steps: float, folder: Path, identity: str
) -> Log:
    """Train and save the active adapter, or resume where a run stopped.

    A run with other arguments that decide it, or another `identity` of its data, is
    refused (`ValueError`). Returns the training's log.
    """
    model = find_peft_model(trainer.model)
    adapter = str(model.active_adapter)
    # As text: types are lost in a file.
    deciding = {name: str(getattr(trainer.args, name)) for name in _DECISIVE}
    config = model.peft_config[adapter]
    deciding |= {name: str(getattr(config, name)) for name in _OF_ADAPTER}
    deciding["held-out examples"] = identity
    # Rank 0 looks for all: others may have disks of their own, or see a file that it is
    # writing.
    mark, checkpoint = of_first(_begun(folder) if rank() == 0 else (None, None))
    if mark is None:
        mark = {"decided_by": deciding, "log": None}
        if trainer.args.should_save:
            _write(folder, mark)
    for name, value in deciding.items():
        before = mark["decided_by"].get(name)
        if before != value:
            raise ValueError(
                f"{folder} is of a training with {name}={before}, and this one has "
                f"{value}: resume with the same trainer, data and options, or train "
                "anew without resuming."
            )
    # The training had ended: there is nothing left but to read what it learnt.
    if mark["log"] is not None:
        read_adapter(model, adapter, folder)
        return mark["log"]
    train_with(trainer, examples, share_of_steps, folder, checkpoint)
    log = trainer.state.log_history
    if trainer.args.should_save:
        write_adapter(model, adapter, {}, folder)
        # Last: a log says that the adapter is whole.
        _write(folder, mark | {"log": log})
    return log


def _begun(folder: Path) -> tuple[dict[str, Any] | None, Path | None]:
    """Find a training's mark, and its last checkpoint that is whole."""
    mark = folder / _MARK
    if not mark.exists():
        return None, None
    # The file that a trainer writes last. What is older than the mark is another run's.
    whole = [
        state.parent
        for state in folder.glob(f"checkpoint-*/{TRAINER_STATE_NAME}")
        if state.stat().st_mtime_ns > mark.stat().st_mtime_ns
    ]
    last = max(whole, key=lambda path: int(path.name.split("-")[1]), default=None)
    return json.loads(mark.read_text(encoding="utf-8")), last


def _write(folder: Path, content: dict[str, Any]) -> None:
    write_whole(folder / _MARK, json.dumps(content).encode())


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
    figures = {
        "laplace_held_out_nll": history.loss,
        "laplace_prior_precision": fmean(priors),
        "laplace_logit_scale": fmean(member.logit_scale for member in la.members),
    }
    task = la.members[0].task
    if task.has_noise:
        noises = [member.sigma_noise.item() for member in la.members]
        figures["laplace_sigma_noise"] = fmean(noises)
    data = trainer.eval_dataset
    # Streams have no length, and a dictionary's data sets would need figures each.
    if not isinstance(data, Sized) or isinstance(data, dict):
        return figures
    try:
        loader = loader_of(trainer, data)
        if task.writes:  # of texts the NLL of a token
            return figures | {"eval_laplace_nll": nll_of_tokens(la, loader)}
        measured = compare(la, loader).posterior
    # Of texts without labels, say: no training ends in vain for that.
    except (TypeError, ValueError) as error:
        warn(f"The posterior has no figures of eval_dataset: {error}")
        return figures
    return figures | {f"eval_laplace_{name}": f for name, f in measured.items()}
