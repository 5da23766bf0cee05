"""Fits a posterior at the end of a transformers trainer's run, or at every checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Sized
from pathlib import Path
from typing import Any

import torch
from laplace.baselaplace import BaseLaplace
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from laplace_lora_ext.laplace import Laplace
from laplace_lora_ext.metrics import quality
from laplace_lora_ext.models.batches import named_batches
from laplace_lora_ext.predictive.data_sets import over_loader
from laplace_lora_ext.processes.exchange import gathered
from laplace_lora_ext.training.examples import in_order
from laplace_lora_ext.training.trainers import same_random_states
from laplace_lora_ext.tuning import TuningHistory, required_data

_LINK = "mean_field"
_TRAINS = "second_training"


class LaplaceCallback(TrainerCallback):
    """Fits a posterior around a trainer's model, tunes its prior, and saves it with the adapter.

    It does not affect training: weights, gradients, modes and random states stay as they were. The
    figures become an entry of `trainer.state.log_history`, and of the trainer's reports if you pass
    `trainer`. What can't be fitted is refused before training begins, wherever that can be known.

    The likelihood is the plain one, whatever loss the trainer has (label smoothing, class weights).

    Parameters
    ----------
    likelihood : str, optional
        as for `laplace_lora_ext.Laplace`
    every_checkpoint : bool, default=False
        also fit at every checkpoint, and save into its folder
    method : str, optional
        as for `optimize_prior_precision`; "agreement" if omitted, and for a regression "marglik"
    batch_size : int, optional
        how many examples to fit or predict at once; by default the trainer's evaluation batch size
    trainer : transformers.Trainer, optional
        to report the figures with its `log`:
        `trainer.add_callback(LaplaceCallback(trainer=trainer))`. "second_training" trains with it
    **options
        for the Laplace class, such as `class_token_ids` and `backend_kwargs`

    Attributes
    ----------
    la : BaseLaplace or None
        the last posterior
    history : TuningHistory or None
        how its prior precision was chosen
    """

    fits_posteriors = True  # it takes no part in trainings for the sake of a posterior

    def __init__(
        self,
        likelihood: str | None = None,
        *,
        every_checkpoint: bool = False,
        method: str | None = None,
        batch_size: int | None = None,
        trainer: Any = None,
        **options: Any,
    ) -> None:
        self.la: BaseLaplace | None = None
        self.history: TuningHistory | None = None
        self._likelihood = likelihood
        self._every_checkpoint = every_checkpoint
        self._method = method
        if method is not None:
            required_data(method)  # refuses other names
        if method == _TRAINS and trainer is None:
            raise ValueError(
                f'method="{_TRAINS}" trains again with the trainer: pass it, as in '
                f'LaplaceCallback(method="{_TRAINS}", trainer=trainer).'
            )
        if method == _TRAINS and every_checkpoint:
            raise ValueError(
                f'method="{_TRAINS}" would train again at every checkpoint: leave every_checkpoint '
                "out."
            )
        self._batch_size = batch_size
        self._trainer = trainer
        self._options = {"subset_of_weights": "lora", "hessian_structure": "lowrank_kron"} | options

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        with same_random_states(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the fits will warn
            la = self._unfitted(kwargs["model"])
        if not isinstance(kwargs["train_dataloader"].dataset, Sized):
            raise ValueError("A posterior is fitted to all training data: these have no length.")
        name = "eval_strategy" if hasattr(args, "eval_strategy") else "evaluation_strategy"
        if getattr(args, name) == "no" and kwargs.get("eval_dataloader") is None:
            self._needed(la, {"train_loader": kwargs["train_dataloader"], "val_loader": None})

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        if self._every_checkpoint:
            folder = Path(args.output_dir or ".", f"checkpoint-{state.global_step}")
            self._fit(folder, args, state, **kwargs)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        self._fit(Path(args.output_dir or "."), args, state, **kwargs)

    def _fit(
        self,
        folder: Path,
        args: TrainingArguments,
        state: TrainerState,
        *,
        model: nn.Module,
        train_dataloader: Any,
        eval_dataloader: Any = None,
        **_: Any,
    ) -> None:
        train = self._loader(train_dataloader, args)
        test = None if eval_dataloader is None else self._loader(eval_dataloader, args)
        with same_random_states():
            la = self._unfitted(model)
            needed = self._needed(la, {"train_loader": train, "val_loader": test})
            shown = state.is_world_process_zero and not args.disable_tqdm
            la.fit(train, progress_bar=shown)
            self.history = la.optimize_prior_precision(method=self._method_of(la), **needed)
            figures = {
                "laplace_evidence": la.log_marginal_likelihood().item(),
                "laplace_prior_precision": la.prior_precision.mean().item(),
                **({} if test is None else eval_figures(la, test)),
            }
        self.la = la
        if args.should_save:
            la.save_pretrained(folder)
        if self._trainer is not None:
            self._trainer.log(figures)
        elif state.is_world_process_zero:
            state.log_history.append({**figures, "step": state.global_step})

    def _unfitted(self, model: nn.Module) -> Any:
        return Laplace(model, self._likelihood, **self._options)

    def _method_of(self, la: Any) -> str:
        gaussian = la.trained_likelihood.is_gaussian
        return self._method or ("marglik" if gaussian else "agreement")

    def _needed(self, la: Any, data: dict[str, Any]) -> dict[str, Any]:
        """Those of the data that the method needs."""
        method = self._method_of(la)
        if method == _TRAINS:
            return {"trainer": self._trainer}
        needed = {name: data[name] for name in required_data(method)}
        if any(loader is None for loader in needed.values()):
            raise ValueError(
                f'method="{method}" needs validation data: give the trainer an eval_dataset and an '
                "eval_strategy."
            )
        return needed

    def _loader(self, loader: Any, args: TrainingArguments) -> DataLoader:
        """The loader's data, once and in order; each process gets its share."""
        size = self._batch_size or args.per_device_eval_batch_size
        like = DataLoader(loader.dataset, batch_size=size, collate_fn=loader.collate_fn)
        return in_order(loader.dataset, like)


def eval_figures(la: Any, loader: DataLoader) -> dict[str, float]:
    """NLL and ECE on evaluation data; of texts the NLL of a token, of a regression nothing."""
    if la.trained_likelihood.is_gaussian:
        return {}
    if la.likelihood == "language_modeling":
        found = [la.score(batch) for _, batch in named_batches(loader)]
        total = sum(float(scores.sums.log_prob.sum()) for scores in found)
        count = sum(int(scores.labelled.sum()) for scores in found)
        totals, counts = zip(*gathered((total, count)), strict=True)
        return {"eval_laplace_nll": -sum(totals) / sum(counts)}

    def evaluate(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        X, y = la.model.split(batch)
        predicted = la(X, link_approx=_LINK, fitting=True)
        return predicted.cpu(), la.trained_likelihood.check_targets(y, predicted).cpu()

    predicted, targets = over_loader(loader, evaluate)
    found = quality(predicted, targets)
    return {f"eval_laplace_{name}": found[name] for name in ("nll", "ece")}
