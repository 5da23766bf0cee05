"""Fits a posterior at the end of a transformers trainer's run, or at every checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Sized
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from laplace_lora_ext.laplace import Laplace
from laplace_lora_ext.lora_laplace import LoRALaplace
from laplace_lora_ext.metrics import compare
from laplace_lora_ext.models.batches import named_batches
from laplace_lora_ext.processes.exchange import gathered
from laplace_lora_ext.training.examples import in_order
from laplace_lora_ext.training.trainers import same_random_states
from laplace_lora_ext.tuning import TuningHistory, required_data

_TRAINS = "second_training"


class LaplaceCallback(TrainerCallback):
    """Fits a posterior around a trainer's model, tunes its prior, and saves it with the adapter.

    It does not affect training: weights, gradients, modes and random states stay as they were. The
    figures become an entry of `trainer.state.log_history`, and of the trainer's reports if you pass
    `trainer`. A model that can't be fitted is refused before training begins.

    The likelihood is the plain one, whatever loss the trainer has (label smoothing, class weights).

    Parameters
    ----------
    likelihood : str, optional
        as for `laplace_lora_ext.Laplace`
    every_checkpoint : bool, default=False
        also fit at every checkpoint, and save into its folder
    method : {"agreement", "marglik", "gridsearch", "val_gd", "second_training"}, optional
        as for `optimize_prior_precision`; "agreement" if omitted, and for a regression "marglik".
        "gridsearch" and "val_gd" need evaluation data, "second_training" the trainer
    trainer : transformers.Trainer, optional
        to report the figures with its `log`, and to train again:
        `trainer.add_callback(LaplaceCallback(trainer=trainer))`
    **options
        for `laplace_lora_ext.Laplace`, such as `class_token_ids` and `backend_kwargs`

    Attributes
    ----------
    la : LoRALaplace or None
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
        trainer: Any = None,
        **options: Any,
    ) -> None:
        if method is not None:
            required_data(method)  # refuses other names
        if method == _TRAINS and (trainer is None or every_checkpoint):
            raise ValueError(
                'method="second_training" trains again with the trainer, once: pass '
                "trainer=trainer and no every_checkpoint."
            )
        self.la: LoRALaplace | None = None
        self.history: TuningHistory | None = None
        self._likelihood = likelihood
        self._every_checkpoint = every_checkpoint
        self._method = method
        self._trainer = trainer
        self._options = options

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Refuse what could not be fitted in the end."""
        with same_random_states(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the fits will warn
            Laplace(kwargs["model"], self._likelihood, **self._options)
        if not isinstance(kwargs["train_dataloader"].dataset, Sized):
            raise ValueError("A posterior is fitted to all training data: these have no length.")
        needed = required_data(self._method) if self._method else []
        if "val_loader" in needed and not args.do_eval:
            raise ValueError(
                f'method="{self._method}" needs validation data: give the trainer an eval_dataset '
                "and an eval_strategy."
            )

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Fit at a checkpoint, if it is to be."""
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
        """Fit the trained model."""
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
        data: dict[str, Any] = {"train_loader": _loader(train_dataloader, args)}
        if eval_dataloader is not None:
            data["val_loader"] = _loader(eval_dataloader, args)
        with same_random_states():
            la: Any = Laplace(model, self._likelihood, **self._options)
            shown = state.is_world_process_zero and not args.disable_tqdm
            la.fit(data["train_loader"], progress_bar=shown)
            method = self._method
            if method is None:
                method = "marglik" if la.trained_likelihood.is_gaussian else "agreement"
            needed = {name: data[name] for name in required_data(method)}
            if method == _TRAINS:
                needed = {"trainer": self._trainer}
            self.history = la.optimize_prior_precision(method=method, **needed)
            figures = {
                "laplace_evidence": la.log_marginal_likelihood().item(),
                "laplace_prior_precision": la.prior_precision.mean().item(),
            }
            if "val_loader" in data:
                figures |= eval_figures(la, data["val_loader"])
        self.la = la
        if args.should_save:
            la.save_pretrained(folder)
        if self._trainer is not None:
            self._trainer.log(figures)
        elif state.is_world_process_zero:
            state.log_history.append({**figures, "step": state.global_step})


def _loader(loader: Any, args: TrainingArguments) -> DataLoader:
    """The loader's data, once and in order; each process gets its share."""
    size = args.per_device_eval_batch_size
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

    found = compare(la, loader).posterior
    return {f"eval_laplace_{name}": found[name] for name in ("nll", "ece")}
