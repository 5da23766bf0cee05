"""Fits a posterior at the end of a transformers trainer's run."""

from __future__ import annotations

import warnings
from collections.abc import Sized
from typing import Any

from torch.utils.data import DataLoader
from transformers import TrainerCallback

from laplace_lora_ext.laplace import Laplace
from laplace_lora_ext.lora_laplace import LoRALaplace
from laplace_lora_ext.metrics import compare
from laplace_lora_ext.predictive.data_sets import Columns, over_loader
from laplace_lora_ext.processes.shards import in_order
from laplace_lora_ext.training.trainers import same_random_states
from laplace_lora_ext.tuning import required_data
from laplace_lora_ext.tuning.method import TuningHistory

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
        the posterior
    history : TuningHistory or None
        how its prior precision was chosen
    """

    fits_posteriors = True  # it takes no part in trainings for the sake of a posterior

    def __init__(
        self,
        likelihood: str | None = None,
        *,
        method: str | None = None,
        trainer: Any = None,
        **options: Any,
    ) -> None:
        self._needed = required_data(method) if method else []  # refuses other names
        if method == _TRAINS and trainer is None:
            raise ValueError(f'method="{_TRAINS}" trains again: pass trainer=trainer.')
        self.la: LoRALaplace | None = None
        self.history: TuningHistory | None = None
        self._method, self._trainer = method, trainer
        self._options = {"likelihood": likelihood, **options}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse what could not be fitted in the end."""
        with same_random_states(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the fit will warn
            Laplace(kwargs["model"], **self._options)
        if not isinstance(kwargs["train_dataloader"].dataset, Sized):
            raise ValueError("A posterior needs all training data: give these a length.")
        if "val_loader" in self._needed and not args.do_eval:
            raise ValueError(
                f'method="{self._method}" needs validation data: give the trainer an eval_dataset '
                "and an eval_strategy."
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fit the trained model."""
        loaders = {"train_loader": kwargs["train_dataloader"]}
        if kwargs.get("eval_dataloader") is not None:
            loaders["val_loader"] = kwargs["eval_dataloader"]
        data: dict[str, Any] = {
            name: in_order(each.dataset, args.per_device_eval_batch_size, each.collate_fn)
            for name, each in loaders.items()
        }
        with same_random_states():
            la: Any = Laplace(kwargs["model"], **self._options)
            shown = state.is_world_process_zero and not args.disable_tqdm
            la.fit(data["train_loader"], progress_bar=shown)
            default = "marglik" if la.trained_likelihood.is_gaussian else "agreement"
            method = self._method or default
            needed = {name: data[name] for name in required_data(method)}
            if method == _TRAINS:
                needed = {"trainer": self._trainer}
            self.la, self.history = la, la.optimize_prior_precision(method=method, **needed)
            figures = {
                "laplace_evidence": la.log_marginal_likelihood().item(),
                "laplace_prior_precision": la.prior_precision.mean().item(),
            }
            if "val_loader" in data:
                figures |= eval_figures(la, data["val_loader"])
        if args.should_save:
            la.save_pretrained(args.output_dir)
        if self._trainer is not None:
            self._trainer.log(figures)
        elif state.is_world_process_zero:
            state.log_history.append({**figures, "step": state.global_step})


def eval_figures(la: Any, loader: DataLoader) -> dict[str, float]:
    """NLL and ECE on evaluation data; of texts the NLL of a token, of a regression nothing."""
    if la.trained_likelihood.is_gaussian:
        return {}
    if la.likelihood == "language_modeling":

        def of_batch(batch: Any) -> Columns:
            scores = la.score(batch)
            return scores.sums.log_prob, scores.labelled.sum(1)

        log_probs, counts = over_loader(loader, of_batch)
        return {"eval_laplace_nll": -log_probs.double().sum().item() / counts.sum().item()}
    found = compare(la, loader).posterior
    return {f"eval_laplace_{name}": found[name] for name in ("nll", "ece")}
