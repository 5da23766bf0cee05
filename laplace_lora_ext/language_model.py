"""Laplace-LoRA for language models that write: the likelihood "language_modeling"."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from numbers import Integral
from typing import Any, NoReturn

import torch
from laplace.curvature import CurvatureInterface
from torch import nn

from laplace_lora_ext.curvature.backend import LowRankKronGGN
from laplace_lora_ext.curvature.matrix import LowRankKronDecomposed
from laplace_lora_ext.likelihoods import LIKELIHOODS
from laplace_lora_ext.lowrank_kron import LowRankKronLoRALaplace
from laplace_lora_ext.models.locks import exclusive
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.tokens_model import TokensModel
from laplace_lora_ext.models.weights import LoRAWeights
from laplace_lora_ext.passes.checks import check_logits
from laplace_lora_ext.text.agreement import TokenAgreement
from laplace_lora_ext.text.draws import Noise
from laplace_lora_ext.text.generation import GeneratedText, Settings
from laplace_lora_ext.text.gridsearch import TokenGridSearch
from laplace_lora_ext.text.joined import TextPasses
from laplace_lora_ext.text.mixture import predictive
from laplace_lora_ext.text.perturbations import Perturbation, SampledWeights
from laplace_lora_ext.text.prompts import given
from laplace_lora_ext.text.proof import proven
from laplace_lora_ext.text.scores import TextScores, score
from laplace_lora_ext.text.second_training import TokenSecondTraining
from laplace_lora_ext.text.val_gd import TokenValGD
from laplace_lora_ext.tuning import Marglik, TuningHistory, TuningMethod, build
from laplace_lora_ext.tuning.by_name import tuned

_NAME = "language_modeling"
_METHODS: dict[str, type[TuningMethod]] = {
    "agreement": TokenAgreement,
    "marglik": Marglik,
    "gridsearch": TokenGridSearch,
    "val_gd": TokenValGD,
    "second_training": TokenSecondTraining,
}


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        "Moments of logits would need Jacobians of the whole vocabulary at every token: use "
        "la.score(batch) for given texts and la.generate(**inputs) for new ones."
    )


class LanguageModelLaplace(LowRankKronLoRALaplace, likelihood=_NAME):
    """Laplace-LoRA over all tokens of a text, for a language model that writes.

    `laplace.Laplace` makes it for the likelihood "language_modeling" and
    `hessian_structure="lowrank_kron"`. `fit` takes batches as supervised fine-tuning does: mappings
    with `input_ids`, `attention_mask` and `labels` (-100 for tokens that don't count). The Fisher
    is a Monte-Carlo estimate: it draws a token from the model wherever there is a label, and
    back-propagates the loss of a whole text at once.

    Parameters
    ----------
    model : torch.nn.Module
        a `PeftModel` of a causal language model or of an encoder-decoder
    likelihood : {"language_modeling"}
    **kwargs
        as for `LoRALaplace`, without `class_token_ids`
    backend : type of LowRankKronInterface, default=LowRankKronGGN
    backend_kwargs : dict, optional
        `rank` (10), `tail` (True), and `num_samples` (1) draws of every text
    products : Perturbation, optional
        how to compute products of the Jacobian with draws: `ForwardMode()` or
        `CentralDifference(step)` from `laplace_lora_ext.text.perturbations`. If omitted, the first
        batch that needs products decides

    Attributes
    ----------
    products : Perturbation or None
        None until a batch decides; set it to None to let the next batch decide again

    Raises
    ------
    ValueError
        If the model writes no text, or `class_token_ids` are given.
    NotImplementedError
        For any `kfac_approx` but "gradient".
    """

    _key = ("lora", "lowrank_kron", _NAME)
    model: Any  # a TokensModel

    def __init__(
        self,
        model: nn.Module,
        likelihood: str = _NAME,
        *,
        backend: type[CurvatureInterface] | None = None,
        backend_kwargs: dict[str, Any] | None = None,
        products: Perturbation | None = None,
        **kwargs: Any,
    ) -> None:
        if likelihood != _NAME:
            raise ValueError(f'The likelihood is "{_NAME}" here, not {likelihood!r}.')
        samples = issubclass(backend or LowRankKronGGN, LowRankKronGGN)
        settings = ({"stochastic": True} if samples else {}) | (backend_kwargs or {})
        if settings.get("kfac_approx", "gradient") != "gradient":
            raise NotImplementedError(f'{_NAME} works with kfac_approx="gradient" only.')
        # The host does not know this likelihood: to it, every token is a classification.
        backend_of_host: Any = {"backend": backend, "backend_kwargs": settings}
        super().__init__(model, "classification", **backend_of_host, **kwargs)
        self.trained_likelihood = LIKELIHOODS[_NAME]
        self.products = products

    @property
    def likelihood(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The likelihood's own name, which the state has too."""
        return _NAME

    @likelihood.setter
    def likelihood(self, value: str) -> None:
        """Ignore the name that the host was given."""

    def _adapted(self, likelihood: str) -> type[LogitsModel]:
        return TokensModel

    # --- prior ---------------------------------------------------------------------------------

    @exclusive
    @torch.inference_mode(False)
    @torch.enable_grad()
    def optimize_prior_precision(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, method: str | TuningMethod = "marglik", *, verbose: bool = False, **options: Any
    ) -> TuningHistory:
        """Choose the prior precision; if anything goes wrong, it stays as it was.

        Parameters
        ----------
        method : {"marglik", "agreement", "gridsearch", "val_gd", "second_training"} or TuningMethod
            "marglik" needs no data, "agreement" training texts (`TokenAgreement`), "gridsearch" and
            "val_gd" validation texts (`TokenGridSearch`, `TokenValGD`), and "second_training" a
            function that trains (`SecondTraining`). The other methods would need Jacobians of the
            whole vocabulary
        verbose : bool, default=False
            print the result
        **options
            fields of the method's object

        Returns
        -------
        TuningHistory

        Raises
        ------
        ValueError
            For another method, for an option that the method lacks, and if data are missing or
            don't suit it.
        """
        return tuned(self, build(method, options, _METHODS), verbose)

    # --- texts ---------------------------------------------------------------------------------

    @exclusive
    @torch.inference_mode(False)
    @torch.no_grad()
    def score(
        self,
        batch: Mapping[str, Any],
        n_samples: int = 10,
        generator: torch.Generator | None = None,
        method: str = "linearized",
    ) -> TextScores:
        """How likely texts are, and how uncertain the model is of each of their tokens.

        Parameters
        ----------
        batch : Mapping
            texts with labels, as for `fit`
        n_samples : int, default=10
            draws of the posterior, S; 0 scores the trained model itself. Scoring takes `1 + 2 S`
            forward passes, of which those of short texts run as one batch, and the memory of a few
            logits `(N, V)` whatever S is
        generator : torch.Generator, optional
            for the draws: with the same state, another batch gets the same draws
        method : {"linearized", "adapters"}
            "linearized" draws from the model that is linear in the LoRA weights. "adapters" runs
            the model with drawn weights, as `sample_adapters` writes them, in S forward passes

        Returns
        -------
        TextScores

        Raises
        ------
        ValueError
            If the batch has no labelled token or does not suit the model, or a logit is not
            finite.
        RuntimeError
            If the model is not the fitted one, or no way to multiply with its Jacobian works.
        """
        self._check_H_init()
        self._check_model()
        way = self._way(method, batch, n_samples)
        return self._score(batch, way, Noise.seeded(n_samples, generator))

    def _score(self, batch: Mapping[str, Any], way: Perturbation, noise: Noise) -> TextScores:
        f, tokens = self.tokens(batch)
        with self.model.prepared():
            directions = noise.directions(self._precision, self.blocks)
            passes = TextPasses(self.model, self.blocks, batch)
            drawn = passes.drawn(way, directions, noise.n_samples, f)
            return score(f, drawn, tokens, self.model.labelled(batch).to(f.device))

    def tokens(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The trained model's logits `(N, V)` for the labelled tokens, and the tokens, `(N,)`."""
        self._check_model()
        with self.model.prepared():
            f = self.model(batch)
        check_logits(f)
        return f, self.trained_likelihood.check_targets(self.model.targets(batch), f)

    @property
    def _precision(self) -> LowRankKronDecomposed:
        precision: Any = self.posterior_precision
        return precision

    def way(self, batch: Any) -> Perturbation:
        """How to multiply with Jacobians: the way that a batch proved right."""
        if self.products is None:
            with self.model.prepared():
                weights = LoRAWeights(self.model, self.blocks)
                typical = Noise(1, 0).direction(0, self._precision, self.blocks)
                self.products = proven(partial(weights.run, batch), weights.values, typical)
        return self.products

    def _way(self, method: str, batch: Any, n_samples: int) -> Perturbation:
        if not isinstance(n_samples, Integral) or n_samples < 0:
            raise ValueError(f"n_samples must be a whole number, 0 or more, and is {n_samples}.")
        if method not in ("linearized", "adapters"):
            raise ValueError(f'method {method!r} is neither "linearized" nor "adapters".')
        return SampledWeights() if method == "adapters" or not n_samples else self.way(batch)

    @exclusive
    @torch.inference_mode(False)
    @torch.no_grad()
    def generate(
        self,
        *,
        n_samples: int = 10,
        generator: torch.Generator | None = None,
        method: str = "linearized",
        **generation_kwargs: Any,
    ) -> GeneratedText:
        """Write texts, drawing each next token from the posterior predictive.

        This runs transformers' own `generate` with all of its options (greedy, sampling, beams,
        stopping, logits processors) and with its caches. A whole text keeps the same draws, so
        each draw is one model reading that text. The passes of all draws run as one batch beside
        the model's own, unless prompts are long or the model mixes its rows; then one after the
        other. Without draws the texts equal those of the model's own `generate`.

        Parameters
        ----------
        n_samples, generator, method
            as for `score`
        **generation_kwargs
            for `generate`: `input_ids` and `attention_mask` as a tokenizer makes them, padded on
            the left unless an encoder reads them, images or sounds as a processor makes them,
            `max_new_tokens` and so on

        Returns
        -------
        GeneratedText

        Raises
        ------
        NotImplementedError
            For beam search if the model returns no `Cache`, for `past_key_values` that hold a text
            already, without `use_cache=False` for a model that keeps something else, for several
            texts a prompt beside images, and for models with a `generate` of their own.
        ValueError
            If there are no prompts, or if they are padded on the wrong side.
        """
        self._check_H_init()
        self._check_model()
        transformer = self.model.transformer
        settings = Settings.of(transformer, generation_kwargs)
        prompt = given(transformer, generation_kwargs, settings, self.model.device)
        way = self._way(method, prompt.as_text(), n_samples)
        noise = Noise.seeded(n_samples, generator)
        with self.model.prepared(), way.passes():
            weights = LoRAWeights(transformer, self.blocks)
            draws = [
                way.draw(weights.values, direction)
                for direction in noise.directions(self._precision, self.blocks)
            ]
            beams, known = settings.num_beams > 1, self.model.layouts
            with predictive(transformer, weights, draws, prompt, beams, known):
                output = transformer.generate(**(generation_kwargs | prompt.inputs()))
        sequences = getattr(output, "sequences", output)
        batch = prompt.continued(sequences, settings)
        return GeneratedText(sequences, self._score(batch, way, noise), output)

    # --- what would need Jacobians of the whole vocabulary ------------------------------------

    __call__: Any = _refuse
    amortize: Any = _refuse
    _moments: Any = _refuse
    _statistics: Any = _refuse
