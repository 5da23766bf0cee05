"""What predicts: one posterior, or the mean of several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laplace_lora_ext.messages import check_name, warn
from laplace_lora_ext.models.adapters import find_peft_model, new_folders, write_adapter
from laplace_lora_ext.models.running import alone, cpu_as_default, exclusive
from laplace_lora_ext.models.weights import parameters_with
from laplace_lora_ext.predictive.amortization import learnt_moments
from laplace_lora_ext.predictive.data_sets import over_examples, padded
from laplace_lora_ext.predictive.links import (
    DEFAULT_LINK,
    LINKS,
    log_probabilities,
    shared_noise,
    softmax_samples,
)
from laplace_lora_ext.predictive.moments import Moments
from laplace_lora_ext.predictive.posterior import (
    Hyperparameters,
    Posterior,
    drawn_weights,
    moments_for,
)
from laplace_lora_ext.predictive.predictions import NumberPrediction, Prediction
from laplace_lora_ext.predictive.scores import TextScores, draw_logits, score_texts
from laplace_lora_ext.processes.shards import Columns, join_batches
from laplace_lora_ext.training import students


class Predictor:
    """What predicts: a posterior by itself, or a mixture by the mean of its members.

    Attributes
    ----------
    members : sequence of LoRALaplace
        alike in what they predict
    prior_precision : torch.Tensor
        `(1,)`, `(blocks,)` or `(parameters,)`; of a mixture `(1,)`, a factor
    logit_scale : float
        what predictions multiply the logits by
    """

    members: Sequence[Posterior]
    prior_precision: Any
    logit_scale: Any
    __call__: Callable[..., Any]
    _searched = ("prior_precision", "logit_scale")  # what a search sets

    @property
    def hyperparameters(self) -> Hyperparameters:
        """Collect what a search sets; of a mixture, factors."""
        return Hyperparameters(**{name: getattr(self, name) for name in self._searched})

    @hyperparameters.setter
    @exclusive  # other threads predict by all of them or none
    def hyperparameters(self, values: Hyperparameters) -> None:
        for name in self._searched:
            value = getattr(values, name)
            if value is not None:
                setattr(self, name, value)

    def predict(
        self,
        x: Any,
        link_approx: str = DEFAULT_LINK,
        n_samples: int = 1000,
        generator: torch.Generator | None = None,
        *,
        pred_type: str = "glm",
        collate_fn: Callable[[Any], Any] | None = None,
        batch_size: int = 32,
        progress_bar: bool = False,
    ) -> Prediction | NumberPrediction:
        """Predict a batch or a data set, with what a decision needs.

        Of numbers, the prediction is of targets with their noise: `total_std`,
        quantiles and intervals have `sigma_noise` in them, and `epistemic_std` has
        not.

        Parameters
        ----------
        x : Mapping, torch.Tensor, Moments, DataLoader, iterable of batches, or data set
            a batch as for a call; a loader of batches with or without labels, in the
            order of its data set; or a data set, such as one of `datasets`, of which
            texts of alike lengths are read together. Examples come back in their own
            order. In a `torch.distributed` process group all ranks share a data set, or
            a loader that shows each rank's part, and must all call this; each gets all
            predictions
        link_approx : {"mean_field", "probit", "mc"}, default="mean_field"
            link for the probabilities; numbers need none
        n_samples : int, default=1000
            draws of the logits, for entropies and for the link "mc"
        generator : torch.Generator, optional
            all batches of a data set get the same draws from it
        pred_type : {"glm", "amortized"}
            by the linearised model, in a forward pass and a backward pass for each
            contrast ("probit": for each class); or in one forward pass, with the
            variances that `la.amortize` has learnt
        collate_fn : callable, optional
            for a data set: makes a batch of a list of its rows
        batch_size : int, default=32
            for a data set: how many rows a batch has
        progress_bar : bool, default=False
            over batches

        Returns
        -------
        Prediction or NumberPrediction
            of numbers the second

        Raises
        ------
        ValueError
            For another link, a loader that shuffles, data without examples, or
            "amortized" if nothing was learnt for this fit and prior. An error of a
            loader's batch names it.
        """
        first = self.members[0]
        is_of_numbers = first.task.predicted.has_noise
        if not is_of_numbers:
            check_name("link_approx", link_approx, LINKS)
        state = None if generator is None else generator.get_state()

        def evaluate(batch: Any) -> Columns:
            if is_of_numbers:
                return self._numbers(batch, pred_type)
            if generator is not None and state is not None:
                generator.set_state(state)  # the same draws for every batch
            return self._classes(batch, link_approx, n_samples, generator, pred_type)

        # With learnt variances, other threads wait for no batch of this one's.
        is_shared = pred_type == "amortized" and len(self.members) == 1
        with cpu_as_default() if is_shared else alone():
            columns = over_examples(
                first.model,
                x,
                evaluate,
                collate_fn,
                batch_size,
                progress_bar,
                join=padded if first.task.has_tokens else join_batches,
            )
        return NumberPrediction(*columns) if is_of_numbers else Prediction(*columns)

    def _classes(
        self,
        batch: Any,
        link_approx: str,
        n_samples: int,
        generator: torch.Generator | None,
        pred_type: str,
    ) -> Prediction:
        """Predict classes of a batch."""
        first = self.members[0]
        batch = first.model.unlabelled(batch)
        by_link, draws = [], []
        for moments in self._moments_of_members(batch, link_approx, pred_type):
            log_p = log_probabilities(moments, link_approx, n_samples, generator)
            by_link.append(log_p.exp())
            f_mu, f_var = moments
            noise = shared_noise(f_mu, n_samples, generator)
            draws.append(softmax_samples(f_mu, f_var, noise).exp())
        # A mixture's probabilities are the mean of its members', and its draws are all
        # theirs.
        probabilities = torch.stack(by_link).mean(0)
        prediction = Prediction.of_draws(probabilities, torch.cat(draws))
        shown = first.task.predicted.shown(probabilities)
        rows = prediction._replace(probabilities=shown)
        return Prediction(*(first.model.in_places(column, batch) for column in rows))

    def _numbers(self, batch: Any, pred_type: str) -> NumberPrediction:
        """Predict numbers of a batch, with their noise."""
        # They have no link: "probit" stands for one that reads all moments.
        moments = list(self._moments_of_members(batch, "probit", pred_type))
        # Rewards are read off preferences: nobody measures them.
        noises = [
            la.sigma_noise if la.task.predicted is la.task else 0.0
            for la in self.members
        ]
        return NumberPrediction.of(moments, noises)

    def _moments_of_members(
        self, batch: Any, link_approx: str, pred_type: str
    ) -> Iterator[Moments]:
        """Compute each member's moments for a link; a batch may be given as moments."""
        check_name("pred_type", pred_type, ["glm", "amortized"])
        is_learnt = pred_type == "amortized"
        moments_of = learnt_moments if is_learnt else moments_for
        for member in self.members:
            compute = partial(moments_of, member, batch, link_approx)
            yield member.model.in_turn(compute, may_share=is_learnt)

    def predict_proba(
        self, x: Any, link_approx: str = DEFAULT_LINK, **options: Any
    ) -> np.ndarray:
        """Predict class probabilities `(B, C)`, the same in every call.

        For scikit-learn's tools.

        Parameters and errors are those of `predict`; nothing is drawn but for the link
        "mc", by a generator of its own unless you pass one. A likelihood without
        classes is refused by a `ValueError`.
        """
        self.members[0].task.check_classes()
        # Draws serve entropies too, which nobody asks for here: without "mc", one is
        # enough.
        n_samples = 1000 if link_approx == "mc" else 1
        drawn = {"n_samples": n_samples, "generator": torch.Generator()}
        prediction = self.predict(x, link_approx, **drawn | options)
        assert isinstance(prediction, Prediction)
        return prediction.probabilities.detach().cpu().numpy()

    def distill(
        self,
        trainer: Any,
        unlabelled: Any = "swapped",
        adapter_name: str = "calibrated",
        *,
        generator: torch.Generator | None = None,
        progress_bar: bool = False,
    ) -> str:
        """Train an ordinary adapter whose own probabilities are those of the posterior.

        The student begins as a copy of the posterior's adapter, on the same base model.
        The trainer trains it on the posterior's probabilities (link "mean_field") of
        the training texts and of texts without labels, by the Kullback-Leibler
        divergence, for 30 % of the training's steps and without dropout, which would
        blur what is smooth already. Where the adapter has a head of its own, as
        classifiers do, the student's is divided by the best temperature and frozen: a
        student that starts much more confident than its teacher loses accuracy. Nothing
        is evaluated meanwhile. The result is an ordinary LoRA adapter, to be merged,
        quantised and served without this library: `model.set_adapter(name)`.

        With `class_token_ids`, the answers' tokens share the probability that the
        trained model gives them all together, so that greedy decoding still answers.

        Parameters
        ----------
        trainer : transformers.Trainer
            the one that has trained the model. It, the active adapter and all random
            states are the same afterwards; meanwhile copies of its callbacks act
        unlabelled : {"swapped"}, Dataset or None
            more texts to learn from: copies of the training texts in which 30 % of the
            tokens are swapped for those of other training texts, or a data set for the
            trainer's collator
        adapter_name : str, default="calibrated"
            of the student in the model, and of its folder in the trainer's `output_dir`
        generator : torch.Generator, optional
            for swapped tokens; if omitted, every call swaps the same
        progress_bar : bool, default=False
            whether to show one

        Returns
        -------
        str
            `adapter_name`

        Raises
        ------
        ValueError
            If the posterior predicts no classes or labels, the trainer has trained
            another model or can't train again, there is an
            adapter of that name, or there are no texts.
        NotImplementedError
            For labels of tokens, and free text.

        References
        ----------
        Hinton, Vinyals & Dean, "Distilling the knowledge in a neural network",
        arXiv:1503.02531 (2015).
        """
        first = self.members[0]
        first.task.check_classes()
        if first.task.has_tokens:
            raise NotImplementedError(
                "A student learns one distribution a text, and the likelihood "
                f"{first.likelihood!r} has one a token. For labels of tokens use "
                "la.amortize."
            )
        return students.distill(
            self.members,
            partial(self, link_approx=DEFAULT_LINK, fitting=True),
            trainer,
            unlabelled,
            adapter_name,
            generator,
            progress_bar,
        )

    def score(
        self,
        batch: Mapping[str, Any],
        n_samples: int = 10,
        generator: torch.Generator | None = None,
    ) -> TextScores:
        """Score how likely texts are, and how uncertain each of their tokens is.

        Parameters
        ----------
        batch : Mapping
            texts with labels, as for `fit`
        n_samples : int, default=10
            models with weights drawn from the posterior, S, of which `sample_adapters`
            writes the like; 0 scores the trained model itself. A mixture divides them
            among its members, the first ones getting the rest. Scoring takes `1 + S`
            forward passes (of a mixture one a member, and S), and the memory of a few
            logits `(N, V)`; from 1,024 tokens on also the last hidden states of S draws
        generator : torch.Generator, optional
            for the draws: with the same state, another batch gets the same draws

        Returns
        -------
        TextScores
            of each token and of each text

        Raises
        ------
        ValueError
            If the likelihood is another than "language_modeling", the batch has no
            labelled token or does not suit the model, or a logit is not finite.
        RuntimeError
            If the model is not the fitted one.
        """
        return score_texts(self.members, batch, n_samples, generator)

    def draw_logits(
        self,
        batch: Mapping[str, Any],
        n_samples: int = 10,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Compute logits `(S, N, V)` of S draws at N labelled tokens.

        For measures of one's own.

        Parameters are those of `score`. Without draws they are the trained model's, or
        each member's.
        """
        return draw_logits(self.members, batch, n_samples, generator)

    @exclusive
    def sample_adapters(
        self,
        n_samples: int,
        directory: str | Path,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> list[Path]:
        """Write draws from the posterior as LoRA adapters.

        For a multi-adapter server, say.

        The mean of their softmax probabilities is a posterior's prediction by
        `pred_type="nn"` with as many samples and a generator in the same state, if
        `logit_scale` multiplies their logits too, which an adapter can't. What the
        posterior is not over, such as most heads, is saved with its MAP values. A
        mixture divides the draws among its members, the first ones getting the rest.

        A prior precision that suits the linearised model is often far too small for
        drawn weights: compare larger ones by `la(batch, pred_type="nn")`.

        Parameters
        ----------
        n_samples : int
            how many adapters to write
        directory : str or Path
            gets one folder for each draw, "sample_0" and so on
        generator : torch.Generator, optional
            for the draws, on the model's device
        **kwargs
            of `PeftModel.save_pretrained`, such as `save_embedding_layers`

        Returns
        -------
        list of Path
            where `PeftModel.from_pretrained` finds each: of an adapter that is not
            "default", a folder of its name within

        Raises
        ------
        FileExistsError
            If one of the folders exists; nothing is written then.
        ValueError
            If the model holds no `PeftModel`.
        RuntimeError
            If the model is not the fitted one any more.

        Warns
        -----
        UserWarning
            If `logit_scale` is not 1.
        """
        folders = new_folders(directory, n_samples)
        written: list[Path] = []
        for place, la in enumerate(self.members[:n_samples]):
            la.check_model()
            if la.logit_scale != 1:
                warn(
                    "Multiply the logits of the adapters by logit_scale, "
                    f"{la.logit_scale:.4g}, as the posterior does: an adapter can't."
                )
            model, adapter = find_peft_model(la.model), la.blocks[0].adapter
            n_own = len(range(place, n_samples, len(self.members)))
            for drawn in drawn_weights(la, n_own, generator):
                values = parameters_with(la.blocks, drawn)
                folder = folders[len(written)]
                written.append(write_adapter(model, adapter, values, folder, **kwargs))
        return written
