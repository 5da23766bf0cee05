"""Training in stages: the first holds out texts that choose the prior, a short one learns them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import set_seed

from laplace_lora_ext.callback import eval_figures
from laplace_lora_ext.laplace import Laplace
from laplace_lora_ext.messages import check_counts, naming
from laplace_lora_ext.mixture import LaplaceMixture
from laplace_lora_ext.models.adapters import (
    active_again,
    add_fresh_adapter,
    find_peft_model,
    own_adapter_back,
    read_adapter,
    write_adapter,
)
from laplace_lora_ext.models.batches import named_batches
from laplace_lora_ext.models.logits_model import find_transformer
from laplace_lora_ext.processes.exchange import gathered, of_first, together
from laplace_lora_ext.training.examples import divided, in_order, taken
from laplace_lora_ext.training.trainers import (
    check_trainer,
    loader_of,
    same_random_states,
    train,
    whole_loader,
)
from laplace_lora_ext.tuning.method import TuningHistory

SECOND_STAGE = 0.25
"""Steps of the second stage, relative to a training on all texts."""

CAUTION = 0.5
"""Standard errors by which the held-out loss may exceed its minimum for a broader posterior.

The second stage learns the held-out examples too, and makes the model surer of itself.
"""

Train = Callable[[nn.Module, Dataset, float], object]
"""Trains a model's active adapter on examples, for a share of the steps of a whole training."""

_MEMBER = "member_{}"  # adapters of a mixture but the first, which is the user's
_MARK = "laplace_stage.json"


class Stages(NamedTuple):
    """What training in stages came to.

    Attributes
    ----------
    la : LoRALaplace or LaplaceMixture
        fitted to all examples
    history : TuningHistory
        the prior precisions that were tried, with their loss on the held-out examples
    """

    la: Any
    history: TuningHistory


def train_in_stages(
    trainer: Any,
    held_out: float = 0.2,
    *,
    members: int = 1,
    likelihood: str | None = None,
    resume_from_checkpoint: bool = False,
    progress_bar: bool = False,
    **options: Any,
) -> Any:
    """Train a calibrated model, in place of `trainer.train()`, at 1.05 times its cost.

    The first stage trains without a share of the texts, which then choose the prior precision; the
    second trains the same adapter on all texts for a quarter of the steps, with an optimizer and a
    schedule of its own, and keeps the prior precision. No label is lost.

    Callbacks, logs, evaluations and checkpoints of the trainer work in both stages. The adapter and
    the posterior end in its `output_dir`, checkpoints of the first stage in "stage_1" there, and
    the posterior's figures in `trainer.state.log_history`, with the logs of all stages. After each
    training the random states are those of the trainer's seed.

    Parameters
    ----------
    trainer : transformers.Trainer
        or an heir, such as TRL's `SFTTrainer` and `RewardTrainer`, with a PEFT model and a
        `train_dataset` that has a length
    held_out : float, default=0.2
        the share of the texts that the first stage holds out, between 0 and 1
    members : int, default=1
        how many adapters to train on the same base model. All hold out the same texts, which choose
        the prior of their mixture; each costs as much as the first
    likelihood : str, optional
        as for `laplace_lora_ext.Laplace`; of a reward trainer "reward_modeling", and of a language
        model without `class_token_ids` "language_modeling"
    resume_from_checkpoint : bool, default=False
        go on after an interruption, in whichever stage it was
    progress_bar : bool, default=False
    **options
        for the Laplace class, such as `class_token_ids` and `backend_kwargs`

    Returns
    -------
    LoRALaplace or LaplaceMixture
        fitted, with its prior precision; a mixture if there are several members

    Raises
    ------
    ValueError
        Before any training: if the trainer's data can't be divided, see `check_trainer`, a class
        would be without texts, or the model or a batch does not suit the likelihood.
    """
    check_trainer(trainer)
    options |= {"likelihood": likelihood or _likelihood(trainer, options)}
    log: list[dict[str, Any]] = []
    find_peft_model(trainer.model)
    folders = list(_folders(Path(trainer.args.output_dir), members))
    trainings = iter(enumerate(folders, 1))

    def run(model: nn.Module, examples: Dataset, share: float) -> None:
        number, (stage, folder) = next(trainings)
        if number == 1 and not resume_from_checkpoint and trainer.args.should_save:
            for _, each in folders:
                (each / _MARK).unlink(missing_ok=True)
        entries = _trained(trainer, examples, share, folder, resume_from_checkpoint)
        log.extend(entry | {"stage": stage} for entry in entries)
        set_seed(trainer.args.seed + number)  # whether it has been trained now, or before

    generator = torch.Generator().manual_seed(trainer.args.data_seed or trainer.args.seed)
    batches = _Batches(whole_loader(trainer), lambda examples: loader_of(trainer, examples))
    choices = held_out, members, generator, progress_bar
    stages = _in_stages(run, trainer.model, batches, *choices, options)
    _finish(trainer, stages, log)
    return stages.la


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
    """`train_in_stages` for a training loop of one's own.

    Parameters
    ----------
    train : callable
        takes the model, with the adapter to train active, a data set, and a share of the steps of a
        whole training, and trains with an optimizer and a schedule made anew. The data set is a
        `torch.utils.data.Subset`, or what the `select` of a `datasets.Dataset` returns
    model : torch.nn.Module
        with an adapter to be trained; for several members a `PeftModel`
    train_loader : DataLoader
        of all examples; its collator and batch size also serve the fits
    held_out, members, progress_bar
        as for `train_in_stages`
    generator : torch.Generator, optional
        for the examples to hold out; if omitted, every call holds out the same
    **options
        for `laplace_lora_ext.Laplace`, such as `likelihood` and `class_token_ids`

    Returns
    -------
    LoRALaplace or LaplaceMixture

    Raises
    ------
    ValueError
        Before any training, as `train_in_stages`.
    """
    batches = _Batches(train_loader, lambda examples: in_order(examples, train_loader))
    choices = held_out, members, generator, progress_bar
    return _in_stages(train, model, batches, *choices, options).la


class _Batches(NamedTuple):
    """A loader of the data to divide, and what makes batches of some of them."""

    whole: DataLoader
    of: Callable[[Any], DataLoader]


def _in_stages(
    train: Train,
    model: nn.Module,
    batches: _Batches,
    held_out: float,
    members: int,
    generator: torch.Generator | None,
    progress_bar: bool,
    options: dict[str, Any],
) -> Stages:
    check_counts(members=members)
    ((rest, held),) = divided(batches.whole, held_out, generator)
    everything = taken(batches.whole)
    first, validation = batches.of(rest), batches.of(held)
    _check(model, first, validation, options)

    def fitted(loader: DataLoader) -> Any:
        la: Any = Laplace(model, **options)
        la.fit(loader, progress_bar=progress_bar)
        return la

    with own_adapter_back(model):
        actives = [active_again(model)]
        for number in range(1, members):
            add_fresh_adapter(find_peft_model(model), _MEMBER.format(number))
            actives.append(active_again(model))
        firsts = []
        for activate in actives:
            activate()
            train(model, rest, 1 - held_out)
            firsts.append(fitted(first))
        choice: Any = firsts[0] if members == 1 else LaplaceMixture(firsts)
        link: Any = {} if _writes(choice) else {"link_approx": "mean_field", "caution": CAUTION}
        history = choice.optimize_prior_precision(
            method="gridsearch", val_loader=validation, progress_bar=progress_bar, **link
        )
        chosen = [choice] if members == 1 else choice.members
        seconds = []
        for activate, of_first_stage in zip(actives, chosen, strict=True):
            activate()
            train(model, everything, SECOND_STAGE)
            seconds.append(fitted(batches.of(everything)))
            seconds[-1].prior_precision = of_first_stage.prior_precision.detach().clone()
    return Stages(seconds[0] if members == 1 else LaplaceMixture(seconds), history)


def _writes(la: Any) -> bool:
    """Whether a posterior is over texts, which have neither classes nor links."""
    return la.likelihood == "language_modeling"


def _check(
    model: nn.Module, first: DataLoader, validation: DataLoader, options: dict[str, Any]
) -> None:
    """Refuse what can't be fitted or chosen, before any training."""
    found: list[set[Any]] = [set(), set()]
    with same_random_states(), warnings.catch_warnings(), together():
        warnings.simplefilter("ignore")  # the fits will warn
        la: Any = Laplace(model, **options)
        la.fit(list(islice(first, 1)))
        for labels, loader in zip(found, (first, validation), strict=True):
            for name, batch in named_batches(loader):
                with naming(name):
                    _, y = la.model.split(batch)
                if not (la.trained_likelihood.is_gaussian or _writes(la)):
                    labels.update(y.flatten().tolist())
        in_first, in_held = (set().union(*gathered(labels)) for labels in found)
    lost = sorted(in_held - in_first)
    if lost:
        raise ValueError(
            f"The first stage would train without any example of the classes {lost}, which are all "
            "held out: hold out a smaller share, or others with another seed."
        )


def _likelihood(trainer: Any, options: dict[str, Any]) -> str | None:
    """The likelihood that a trainer's kind tells; None if the model tells it."""
    if any(cls.__name__ == "RewardTrainer" for cls in type(trainer).__mro__):
        return "reward_modeling"
    transformer = find_transformer(trainer.model)
    writes = transformer is not None and transformer.can_generate()
    return "language_modeling" if writes and not options.get("class_token_ids") else None


def _folders(output: Path, members: int) -> Iterator[tuple[str, Path]]:
    """Stage and folder of each training, in their order."""
    for stage, folder in (("stage_1", output / "stage_1"), ("stage_2", output)):
        yield stage, folder
        for number in range(1, members):
            yield stage, output / stage / _MEMBER.format(number)


def _trained(
    trainer: Any, examples: Any, share: float, folder: Path, resume: bool
) -> list[dict[str, Any]]:
    """Train the active adapter and save it, or load what an interrupted run has saved; its log."""
    mark = folder / _MARK
    noted = of_first(_Noted.read(mark) if resume and mark.exists() else None)
    model = find_peft_model(trainer.model)
    adapter: Any = model.active_adapter
    if noted is not None and noted.n_examples != len(examples):
        raise ValueError(
            f"{folder} is of a training on {noted.n_examples} examples, not {len(examples)}: "
            "resume with the same held_out and data, or train anew without resuming."
        )
    if noted is not None and noted.log is not None:
        read_adapter(model, adapter, folder)
        return noted.log
    if noted is None and trainer.args.should_save:
        _Noted(len(examples)).write(mark)
    checkpoint = None if noted is None else _last_checkpoint(folder, noted.time)
    train(trainer, examples, share, folder, checkpoint)
    log = trainer.state.log_history
    if trainer.args.should_save:
        write_adapter(model, adapter, {}, folder)
        _Noted(len(examples), log).write(mark)
    return log


class _Noted(NamedTuple):
    """What a stage notes in its folder: its number of examples, and its log once it is trained."""

    n_examples: int
    log: list[dict[str, Any]] | None = None
    time: float = 0.0

    @classmethod
    def read(cls, mark: Path) -> _Noted:
        return cls(**json.loads(mark.read_text(encoding="utf-8")), time=mark.stat().st_mtime)

    def write(self, mark: Path) -> None:
        mark.parent.mkdir(parents=True, exist_ok=True)
        noted = {"n_examples": self.n_examples, "log": self.log}
        mark.write_text(json.dumps(noted), encoding="utf-8")


def _last_checkpoint(folder: Path, since: float) -> Path | None:
    """The last whole checkpoint since a time; those before it are of another training."""
    states = folder.glob("checkpoint-*/trainer_state.json")  # a trainer writes it last
    times = {path.parent: path.stat().st_mtime for path in states}
    last = max(times, key=times.__getitem__, default=None)
    return last if last is not None and times[last] >= since else None


def _finish(trainer: Any, stages: Stages, log: list[dict[str, Any]]) -> None:
    """Save adapter and posterior, add figures to the logs, and save these."""
    la, history = stages
    trainer.save_model()
    if trainer.args.should_save:
        la.save_pretrained(trainer.args.output_dir)
    priors = [member.prior_precision.mean().item() for member in getattr(la, "members", [la])]
    found = {
        "laplace_held_out_nll": history.objective.min().item(),
        "laplace_prior_precision": sum(priors) / len(priors),
    }
    if trainer.eval_dataset is not None and not isinstance(trainer.eval_dataset, dict):
        found |= eval_figures(la, loader_of(trainer, trainer.eval_dataset))
    trainer.state.log_history = log
    trainer.log(found)
    trainer.save_state()
