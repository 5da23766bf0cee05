"""Laplace-LoRA for language models that write: the likelihood "language_modeling"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from laplace.curvature import CurvatureInterface
from torch import nn

from laplace_lora_ext.curvature.backend import LowRankKronGGN
from laplace_lora_ext.likelihoods import LIKELIHOODS
from laplace_lora_ext.lowrank_kron import LowRankKronLoRALaplace
from laplace_lora_ext.models.tokens_model import TokensModel
from laplace_lora_ext.passes.graph import check_logits
from laplace_lora_ext.problems import Problem
from laplace_lora_ext.text.generation import GeneratedText, generate_texts
from laplace_lora_ext.text.priors import TokenAgreement, TokenGridSearch, TokenSecondTraining
from laplace_lora_ext.text.scores import TextScores, draw_logits, score_texts
from laplace_lora_ext.tuning.marglik import Marglik

_NAME = "language_modeling"


@dataclass(frozen=True)
class _LanguageModeling(Problem):
    """Tokens of texts: as many outputs as there are words, at every token."""

    def backend_kwargs(
        self, backend: type[CurvatureInterface], given: Mapping[str, Any]
    ) -> dict[str, Any]:
        if given.get("kfac_approx", "gradient") != "gradient":
            raise NotImplementedError(f'{self.name} works with kfac_approx="gradient" only.')
        if issubclass(backend, LowRankKronGGN):
            return {"stochastic": True, **given}
        return dict(given)

    def check_linearised(self) -> None:
        raise NotImplementedError(
            "Moments of logits would need Jacobians of the whole vocabulary at every token: use "
            "la.score(batch) for given texts and la.generate(**inputs) for new ones."
        )


LANGUAGE_MODELING = _LanguageModeling(
    name=_NAME,
    # The host does not know this likelihood: to it, every token is a classification.
    name_for_host="classification",
    trained=LIKELIHOODS[_NAME],
    predicted=LIKELIHOODS["classification"],
    adapter=TokensModel,
    methods={
        "agreement": TokenAgreement,
        "marglik": Marglik,
        "gridsearch": TokenGridSearch,
        "second_training": TokenSecondTraining,
    },
)


class LanguageModelLaplace(LowRankKronLoRALaplace):
    """Laplace-LoRA over all tokens of a text, for a language model that writes.

    `laplace.Laplace` makes it for the likelihood "language_modeling" and
    `hessian_structure="lowrank_kron"`. `fit` takes batches as supervised fine-tuning does: mappings
    with `input_ids`, `attention_mask` and `labels` (-100 for tokens that don't count). The Fisher
    is a Monte-Carlo estimate: it draws a token from the model wherever there is a label, and
    back-propagates the loss of a whole text at once.

    Methods of `optimize_prior_precision`: "marglik" needs no data, "agreement" training texts
    (`TokenAgreement`), "gridsearch" validation texts (`TokenGridSearch`), and "second_training" a
    trainer or a function that trains (`SecondTraining`).

    Parameters
    ----------
    model : torch.nn.Module
        a `PeftModel` of a causal language model or of an encoder-decoder
    likelihood : {"language_modeling"}
    **kwargs
        as for `LoRALaplace`, without `class_token_ids`
    backend : type of LowRankKronInterface, default=LowRankKronGGN
    backend_kwargs : dict, optional
        `rank` (10), `tail` (True), and `num_samples` (1) draws of every text by a `seed` (0)

    Raises
    ------
    ValueError
        If the model writes no text, or `class_token_ids` are given.
    NotImplementedError
        For any `kfac_approx` but "gradient".
    """

    _key = ("lora", "lowrank_kron", _NAME)
    _problems: ClassVar[Mapping[str, Problem]] = {_NAME: LANGUAGE_MODELING}
    model: Any  # a TokensModel

    def __init__(self, model: nn.Module, likelihood: str = _NAME, **kwargs: Any) -> None:
        super().__init__(model, likelihood, **kwargs)

    @property
    def members(self) -> Sequence[LanguageModelLaplace]:
        return [self]

    def score(
        self,
        batch: Mapping[str, Any],
        n_samples: int = 10,
        generator: torch.Generator | None = None,
    ) -> TextScores:
        """Score how likely texts are, and how uncertain the model is of each of their tokens.

        Parameters
        ----------
        batch : Mapping
            texts with labels, as for `fit`
        n_samples : int, default=10
            models with weights drawn from the posterior, S, of which `sample_adapters` writes the
            like; 0 scores the trained model itself. A mixture divides them among its members, the
            first ones getting the rest. Scoring takes `1 + S` forward passes, and the memory of a
            few logits `(N, V)` whatever S is
        generator : torch.Generator, optional
            for the draws: with the same state, another batch gets the same draws

        Returns
        -------
        TextScores

        Raises
        ------
        ValueError
            If the batch has no labelled token or does not suit the model, or a logit is not finite.
        RuntimeError
            If the model is not the fitted one.
        """
        return score_texts(self.members, batch, n_samples, generator)

    def draw_logits(
        self,
        batch: Mapping[str, Any],
        n_samples: int = 10,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Compute logits `(S, N, V)` of S draws at N labelled tokens, for measures of one's own.

        Parameters are those of `score`. Without draws they are the trained model's, or each
        member's.
        """
        return draw_logits(self.members, batch, n_samples, generator)

    def generate(
        self,
        *,
        n_samples: int = 10,
        generator: torch.Generator | None = None,
        **generation_kwargs: Any,
    ) -> GeneratedText:
        """Write texts, choosing each next token by the posterior predictive.

        This runs transformers' own `generate`, greedy or sampling, with its stopping, its logits
        processors and its caches, for one text after the other. A whole text keeps the same draws,
        so each draw is one model reading that text. Without draws the texts equal those of the
        model's own `generate`, and of a mixture those of the mixture of its trained models.

        Parameters
        ----------
        n_samples, generator
            as for `score`; each token takes `1 + S` forward passes
        **generation_kwargs
            for `generate`: `input_ids` and `attention_mask` as a tokenizer makes them, padded on
            the left unless an encoder reads them, `max_new_tokens` and so on

        Returns
        -------
        GeneratedText

        Raises
        ------
        NotImplementedError
            For beams, several texts a prompt, `past_key_values`, images beside text, and models
            with a `generate` of their own; without `use_cache=False` also for models that keep no
            cache.
        ValueError
            If there are no prompts, or if they are padded on the wrong side.
        """
        return generate_texts(
            self.members, n_samples=n_samples, generator=generator, **generation_kwargs
        )

    def tokens(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the trained model's logits `(N, V)`, and find the labelled tokens `(N,)`."""
        self.check_model()
        with self.model.prepared():
            f = self.model(batch)
        check_logits(f)
        return f, self.trained_likelihood.check_targets(self.model.targets(batch), f)


LowRankKronLoRALaplace._of_likelihood[_NAME] = LanguageModelLaplace
