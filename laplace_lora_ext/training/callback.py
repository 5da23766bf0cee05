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
from laplace_lora_ext.training.trainers import same_random_states, with_tokenizer
from laplace_lora_ext.tuning import required_data
from laplace_lora_ext.tuning.method import TuningHistory

_TRAINS = "second_training"


class LaplaceCallback(TrainerCallback):
    """Fits a posterior when training ends, tunes its prior, and saves it.

    It does not affect training: weights, gradients, modes and random states stay as
    they were. The figures become an entry of `trainer.state.log_history`, and of the
    trainer's reports if you pass `trainer`. A model that can't be fitted is refused
    before training begins.

    The likelihood is the plain one, whatever loss the trainer has (label smoothing,
    class weights).

    Parameters
    ----------
    likelihood : str, optional
        as for `laplace_lora_ext.Laplace`
    method : str, optional
        "agreement" (the default), "marglik", "gridsearch", "val_gd" or
        "second_training", as for `optimize_prior_precision`. "gridsearch" and "val_gd"
        need evaluation data, "second_training" the trainer
    trainer : transformers.Trainer, optional
        to report the figures with its `log`, and to train again:
        `trainer.add_callback(LaplaceCallback(trainer=trainer))`
    **options
        for `laplace_lora_ext.Laplace`, such as `class_token_ids` and `backend_kwargs`;
        the `tokenizer` of `class_texts` is the trainer's unless you pass one

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
        # Other names are refused here, before any training.
        self._needed = required_data(method) if method else []
        if method == _TRAINS and trainer is None:
            raise ValueError(f'method="{_TRAINS}" trains again: pass trainer=trainer.')
        self.la: LoRALaplace | None = None
        self.history: TuningHistory | None = None
        self._method = method
        self._trainer = trainer
        self._settings = {"likelihood": likelihood, **options}

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        **kwargs: Any,
    ) -> None:
        """Refuse what could not be fitted in the end."""
        tokenizer = kwargs.get("processing_class")
        # Made for its checks alone: hours of training would come before the same error
        # otherwise.
        with same_random_states(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the fit will warn
            Laplace(kwargs["model"], **with_tokenizer(tokenizer, self._settings))
        if not isinstance(kwargs["train_dataloader"].dataset, Sized):
            raise ValueError(
                "A posterior needs all training data: give these a length."
            )
        if "val_loader" in self._needed and not args.do_eval:
            raise ValueError(
                f'method="{self._method}" needs validation data: give the trainer an '
                "eval_dataset and an eval_strategy."
            )

    def on_train_end(
        self,
        args: Any,
        state: Any,
        control: Any,
        **kwargs: Any,
    ) -> None:
        """Fit the trained model."""
        data: dict[str, Any] = {"train_loader": _once(kwargs["train_dataloader"], args)}
        if kwargs.get("eval_dataloader") is not None:
            data["val_loader"] = _once(kwargs["eval_dataloader"], args)
        shown = state.is_world_process_zero and not args.disable_tqdm
        # Whoever trains on in this process gets the random numbers of a run without the
        # callback.
        with same_random_states():
            settings = with_tokenizer(kwargs.get("processing_class"), self._settings)
            la = Laplace(kwargs["model"], **settings)
            la.fit(data["train_loader"], progress_bar=shown)
            self.la = la
            self.history = self._choose_prior(la, data)
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

    def _choose_prior(
        self,
        la: LoRALaplace,
        data: dict[str, Any],
    ) -> TuningHistory:
        """Choose the prior precision with what the method needs of a trainer's data."""
        method = self._method or "agreement"
        if method == _TRAINS:
            return la.optimize_prior_precision(method=method, trainer=self._trainer)
        needed = {name: data[name] for name in required_data(method)}
        return la.optimize_prior_precision(method=method, **needed)


def _once(loader: DataLoader, args: Any) -> DataLoader:
    """Give a trainer's loader each example once, in order, as for evaluation."""
    return in_order(loader.dataset, args.per_device_eval_batch_size, loader.collate_fn)


def eval_figures(
    la: Any,
    loader: DataLoader,
) -> dict[str, float]:
    """Measure a posterior on evaluation data.

    The figures are its NLL and ECE; of texts the NLL of a token; of numbers those of
    `quality_of_numbers`.
    """
    first = la.members[0]
    if first.problem.writes:
        return {"eval_laplace_nll": _nll_of_tokens(la, loader)}
    measured = compare(la, loader).posterior
    names = measured if first.trained_likelihood.is_gaussian else ("nll", "ece")
    return {f"eval_laplace_{name}": measured[name] for name in names}


def _nll_of_tokens(la: Any, loader: DataLoader) -> float:
    """Compute a token's mean loss under the posterior predictive."""

    def of_texts(batch: Any) -> Columns:
        scores = la.score(batch)
        return scores.sums.log_prob, scores.labelled.sum(1)

    log_probs, counts = over_loader(loader, of_texts)
    log_prob = log_probs.double().sum().item()
    return -log_prob / counts.sum().item()
