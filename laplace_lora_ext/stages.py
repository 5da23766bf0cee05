"""Training in stages: the first holds out texts that choose the prior, a short one learns them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import TrainerCallback, set_seed

from laplace_lora_ext.callback import eval_figures
from laplace_lora_ext.laplace import Laplace
from laplace_lora_ext.messages import check_counts, warn
from laplace_lora_ext.mixture import LaplaceMixture
from laplace_lora_ext.models.adapters import (
    active_again,
    add_fresh_adapter,
    find_peft_model,
    own_adapter_back,
    read_adapter,
    write_adapter,
)
from laplace_lora_ext.models.logits_model import find_transformer
from laplace_lora_ext.models.lora_layers import is_untrained
from laplace_lora_ext.processes.exchange import of_first
from laplace_lora_ext.processes.shards import (
    check_divisible,
    divided,
    in_order,
    in_order_like,
    taken,
)
from laplace_lora_ext.training.groups import groups_of
from laplace_lora_ext.training.trainers import (
    check_trainer,
    loader_of,
    same_random_states,
    train,
)
from laplace_lora_ext.tuning.method import TuningHistory

SECOND_STAGE = 0.25
"""Steps of the second stage, relative to a training on all texts."""

Train = Callable[[nn.Module, Dataset, float], object]
"""Trains a model's active adapter on examples, for a share of the steps of a whole training."""

_MEMBER = "member_{}"  # adapters of a mixture but the first, which is the user's
_MARK = "laplace_stage.json"


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
    schedule of its own, and keeps the prior precision. No label is lost. With few texts the first
    stage may leave a poor model that the second does not mend: compare its accuracy once.

    Callbacks, logs, evaluations and checkpoints of the trainer work in both stages. The adapter and
    the posterior end in its `output_dir`, checkpoints of the first stage in "stage_1" there, and
    the posterior's figures in `trainer.state.log_history`, with the logs of all stages. After each
    training the random states are those of the trainer's seed.

    Parameters
    ----------
    trainer : transformers.Trainer
        or a subclass, such as TRL's `SFTTrainer` and `RewardTrainer`, with a PEFT model and a
        `train_dataset` that has a length
    held_out : float, default=0.2
        the share of the texts that the first stage holds out, between 0 and 1: of each class as
        of all, but never its last text, and of numbers by quantiles
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
        Before any training: if the trainer's data can't be divided, no class has a second text, or
        the model or a batch does not suit the likelihood.
    """
    check_trainer(trainer)
    options |= {"likelihood": likelihood or _likelihood(trainer, options)}
    find_peft_model(trainer.model)
    output, log = Path(trainer.args.output_dir), []
    names = ["", *(_MEMBER.format(number) for number in range(1, members))]
    trainings = [("stage_1", output / "stage_1" / name) for name in names]
    trainings += [("stage_2", output / "stage_2" / name if name else output) for name in names]
    if not resume_from_checkpoint and trainer.args.should_save:
        for _, folder in trainings:
            (folder / _MARK).unlink(missing_ok=True)
    left = iter(enumerate(trainings, 1))

    def run(model: nn.Module, examples: Dataset, share: float) -> None:
        number, (stage, folder) = next(left)
        entries = _trained(trainer, examples, share, folder, resume_from_checkpoint)
        log.extend(entry | {"stage": stage} for entry in entries)
        set_seed(trainer.args.seed + number)  # whether it has been trained now, or before

    la, history = _in_stages(
        run,
        trainer.model,
        in_order(trainer.train_dataset, 1),
        lambda examples: loader_of(trainer, examples),
        held_out,
        members,
        torch.Generator().manual_seed(trainer.args.data_seed or trainer.args.seed),
        progress_bar,
        options,
    )
    trainer.save_model()
    if trainer.args.should_save:
        la.save_pretrained(output)
    priors = [member.prior_precision.mean().item() for member in getattr(la, "members", [la])]
    figures = {
        "laplace_held_out_nll": history.objective.min().item(),
        "laplace_prior_precision": sum(priors) / len(priors),
    }
    if trainer.eval_dataset is not None and not isinstance(trainer.eval_dataset, dict):
        figures |= eval_figures(la, loader_of(trainer, trainer.eval_dataset))
    trainer.state.log_history = log
    trainer.log(figures)
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
    """`train_in_stages` for a training loop of one's own.

    Parameters
    ----------
    train : callable
        `train(model, data_set, share)` trains the active adapter on the data set, for that share of
        a whole training's steps, with a new optimizer and schedule. The data set is a
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

    def batches_of(examples: Any) -> DataLoader:
        return in_order_like(train_loader, examples)

    choices = held_out, members, generator, progress_bar
    return _in_stages(train, model, train_loader, batches_of, *choices, options)[0]


def _in_stages(
    train: Train,
    model: nn.Module,
    whole: DataLoader,
    batches_of: Callable[[Any], DataLoader],
    held_out: float,
    members: int,
    generator: torch.Generator | None,
    progress_bar: bool,
    options: dict[str, Any],
) -> tuple[Any, TuningHistory]:
    """The posterior of all examples, and the loss of the held-out ones under the priors tried."""
    check_counts(members=members)
    check_divisible(whole, held_out)
    everything = taken(whole)
    with same_random_states(), warnings.catch_warnings():  # refuse now what can't be fitted
        warnings.simplefilter("ignore")
        la: Any = Laplace(model, **options)
        la.fit(list(islice(batches_of(everything), 1)))
        groups = groups_of(la, batches_of(everything), held_out)
    if not is_untrained(la.blocks):
        warn(
            "The adapter looks trained: its lora_B is not 0. If it knows these texts, held-out "
            "ones are no test, and the prior precision becomes too large. Begin with a new adapter."
        )
    ((rest, held),) = divided(whole, held_out, groups, generator)
    validation = batches_of(held)

    def fitted(examples: Any) -> Any:
        la: Any = Laplace(model, **options)
        la.fit(batches_of(examples), progress_bar=progress_bar)
        return la

    with own_adapter_back(model):
        actives = [active_again(model)]
        for number in range(1, members):
            add_fresh_adapter(find_peft_model(model), _MEMBER.format(number))
            actives.append(active_again(model))
        firsts, seconds = [], []
        for activate in actives:
            activate()
            train(model, rest, 1 - held_out)
            firsts.append(fitted(rest))
        choice: Any = firsts[0] if members == 1 else LaplaceMixture(firsts)
        is_text = choice.likelihood == "language_modeling"  # has neither classes nor links
        how: Any = {} if is_text else {"link_approx": "mean_field"}
        history = choice.optimize_prior_precision(
            method="gridsearch", val_loader=validation, progress_bar=progress_bar, **how
        )
        chosen = [choice] if members == 1 else choice.members
        for activate, of_first_stage in zip(actives, chosen, strict=True):
            activate()
            train(model, everything, SECOND_STAGE)
            seconds.append(fitted(everything))
            seconds[-1].prior_precision = of_first_stage.prior_precision.detach().clone()
    return seconds[0] if members == 1 else LaplaceMixture(seconds), history


def _likelihood(trainer: Any, options: dict[str, Any]) -> str | None:
    """The likelihood that a trainer's kind tells; None if the model tells it."""
    if any(cls.__name__ == "RewardTrainer" for cls in type(trainer).__mro__):
        return "reward_modeling"
    transformer = find_transformer(trainer.model)
    writes = transformer is not None and transformer.can_generate()
    return "language_modeling" if writes and not options.get("class_token_ids") else None


def _trained(
    trainer: Any, examples: Any, share: float, folder: Path, resume: bool
) -> list[dict[str, Any]]:
    """Train the active adapter and save it, or load what an interrupted run has saved; its log.

    A mark in the folder holds the run's name, the number of examples, and once the training has
    ended its log.
    """
    model = find_peft_model(trainer.model)
    adapter: Any = model.active_adapter
    noted, checkpoint = of_first(_noted(folder) if resume else (None, None))
    if noted is not None and noted["n_examples"] != len(examples):
        raise ValueError(
            f"{folder} is of a training on {noted['n_examples']} examples, not {len(examples)}: "
            "resume with the same held_out and data, or train anew without resuming."
        )
    if noted is not None and noted["log"] is not None:
        read_adapter(model, adapter, folder)
        return noted["log"]
    name = of_first(uuid4().hex) if noted is None else noted["run"]

    def note(log: list[dict[str, Any]] | None) -> None:
        if trainer.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"run": name, "n_examples": len(examples), "log": log})
            (folder / _MARK).write_text(text, encoding="utf-8")

    if noted is None:
        note(None)
    marking = _MarkCheckpoints(name)
    trainer.add_callback(marking)
    try:
        train(trainer, examples, share, folder, checkpoint)
    finally:
        trainer.remove_callback(marking)
    if trainer.args.should_save:
        write_adapter(model, adapter, {}, folder)
    note(trainer.state.log_history)
    return trainer.state.log_history


class _MarkCheckpoints(TrainerCallback):
    """Marks each checkpoint with its run's name once it is whole.

    A folder may hold checkpoints of other runs, and may have been copied since.
    """

    def __init__(self, run: str) -> None:
        self.run = run

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.should_save:
            checkpoint = Path(args.output_dir, f"checkpoint-{state.global_step}")
            mark = {"run": self.run, "step": state.global_step}
            (checkpoint / _MARK).write_text(json.dumps(mark), encoding="utf-8")


def _noted(folder: Path) -> tuple[Any, Path | None]:
    """What a training has noted in its folder, and its last whole checkpoint."""
    if not (folder / _MARK).exists():
        return None, None
    noted = _read(folder / _MARK)
    marks = {path.parent: _read(path) for path in folder.glob(f"checkpoint-*/{_MARK}")}
    steps = {path: mark["step"] for path, mark in marks.items() if mark["run"] == noted["run"]}
    return noted, max(steps, key=steps.__getitem__, default=None)


def _read(mark: Path) -> dict[str, Any]:
    return json.loads(mark.read_text(encoding="utf-8"))
