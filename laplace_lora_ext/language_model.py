"""Laplace-LoRA of a language model that writes: the likelihood "language_modeling"."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
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
from laplace_lora_ext.text.generation import GeneratedText, Prompt, Settings, predictive
from laplace_lora_ext.text.gridsearch import TokenGridSearch
from laplace_lora_ext.text.perturbations import Perturbation, SampledWeights, drawn_logits
from laplace_lora_ext.text.proof import proven
from laplace_lora_ext.text.scores import TextScores, score
from laplace_lora_ext.tuning import Marglik, TuningHistory, TuningMethod, build
from laplace_lora_ext.tuning.by_name import tuned

_NAME = "language_modeling"
_METHODS: dict[str, type[TuningMethod]] = {
    "agreement": TokenAgreement,
    "marglik": Marglik,
    "gridsearch": TokenGridSearch,
}


class LanguageModelLaplace(LowRankKronLoRALaplace, likelihood=_NAME):
    """Laplace-LoRA over all tokens of a text, for a language model that writes.

    `laplace.Laplace` makes it for the likelihood "language_modeling" and
    `hessian_structure="lowrank_kron"`. `fit` takes batches of supervised fine-tuning, mappings with
    `input_ids`, `attention_mask` and `labels` (-100 where there is none). The Fisher is a
    Monte-Carlo estimate: a token is drawn from the model at every labelled place, and the loss of
    a whole text is back-propagated at once.

    Parameters
    ----------
    model : torch.nn.Module
        a `PeftModel` of a causal language model or of an encoder-decoder
    likelihood : {"language_modeling"}
    **kwargs
        of `LoRALaplace`, but for `class_token_ids`
    backend : type of LowRankKronInterface, default=LowRankKronGGN
    backend_kwargs : dict, optional
        `rank` (10), `tail` (True), and `num_samples` (1) draws of every text
    products : Perturbation, optional
        how products of the Jacobian with draws are computed: `ForwardMode()` or
        `CentralDifference(step)` of `laplace_lora_ext.text.perturbations`. The first batch that
        needs them decides if omitted

    Attributes
    ----------
    products : Perturbation or None
        None until a batch has decided; None again makes the next one decide

    Raises
    ------
    ValueError
        If the model writes no text, or `class_token_ids` are given.
    NotImplementedError
        For another `kfac_approx` than "gradient".
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
            raise NotImplementedError(f'{_NAME} has kfac_approx="gradient" alone.')
        # The host knows no such likelihood. For it, every token is a classification.
        backend_of_host: Any = {"backend": backend, "backend_kwargs": settings}
        super().__init__(model, "classification", **backend_of_host, **kwargs)
        self.trained_likelihood = LIKELIHOODS[_NAME]
        self.products = products

    @property
    def likelihood(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What the posterior is of, and what its state says."""
        return _NAME

    @likelihood.setter
    def likelihood(self, value: str) -> None:
        """The host sets the name that it was given."""

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
        method : {"marglik", "agreement", "gridsearch"} or TuningMethod
            "marglik" needs no data, "agreement" the training texts (`TokenAgreement`), and
            "gridsearch" validation texts (`TokenGridSearch`). The other methods need Jacobians of
            the whole vocabulary, and there are none
        verbose : bool, default=False
            print the result
        **options
            the fields of the method's object

        Returns
        -------
        TuningHistory

        Raises
        ------
        ValueError
            For another method, an option that it lacks, or data that are missing or don't suit it.
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
        """How likely given texts are, and how uncertain the model is of each of their tokens.

        Parameters
        ----------
        batch : Mapping
            texts with labels, as for `fit`
        n_samples : int, default=10
            draws of the posterior, S; 0 scores the trained model itself. The time is that of
            `1 + 2 S` forward passes, the memory that of a few logits `(N, V)` whatever S
        generator : torch.Generator, optional
            of the draws: the same state gives the same draws for another batch
        method : {"linearized", "adapters"}
            draws of the model that is linear in the LoRA weights, or the model with drawn weights,
            as `sample_adapters` writes them; S forward passes then

        Returns
        -------
        TextScores

        Raises
        ------
        ValueError
            If the batch has no labelled token, or does not suit the model, or a logit is not
            finite.
        RuntimeError
            If the model is not the fitted one, or products with its Jacobian can't be computed.
        """
        self._check_H_init()
        self._check_model()
        way = self._way(method, batch, n_samples)
        return self._score(batch, way, Noise.seeded(n_samples, generator))

    def _score(self, batch: Mapping[str, Any], way: Perturbation, noise: Noise) -> TextScores:
        f, tokens = self.tokens(batch)
        with self.model.prepared():
            weights = LoRAWeights(self.model, self.blocks)
            directions = noise.directions(self._precision, self.blocks)
            run = partial(weights.run, batch)
            drawn = drawn_logits(way, weights.values, directions, run, f)
            return score(f, drawn, tokens, self.model.labelled(batch).to(f.device))

    def tokens(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The trained model's logits `(N, V)` at the labelled tokens, and these, `(N,)`."""
        with self.model.prepared():
            f = self.model(batch)
        check_logits(f)
        return f, self.trained_likelihood.check_targets(self.model.targets(batch), f)

    @property
    def _precision(self) -> LowRankKronDecomposed:
        precision: Any = self.posterior_precision
        return precision

    def way(self, batch: Any) -> Perturbation:
        """How products with Jacobians are computed: what a batch has shown to be right."""
        if self.products is None:
            with self.model.prepared():
                weights = LoRAWeights(self.model, self.blocks)
                typical = Noise(1, 0).direction(0, self._precision, self.blocks)
                self.products = proven(partial(weights.run, batch), weights.values, typical)
        return self.products

    def _way(self, method: str, batch: Any, n_samples: int) -> Perturbation:
        if n_samples < 0:
            raise ValueError(f"n_samples must not be negative, and is {n_samples}.")
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
        """Write texts whose every next token follows the posterior predictive.

        transformers' own `generate` runs, with all of its options (greedy, sampling, beams,
        stopping, logits processors), and keeps its caches. The draws stay the same for a whole
        text, so that each is one model's text: a token costs the passes of `score`, for itself
        alone. Without draws the texts are those of the model's own `generate`, token for token.

        Parameters
        ----------
        n_samples, generator, method
            as for `score`
        **generation_kwargs
            of `generate`: `input_ids` and `attention_mask` as a tokenizer makes them, padded on
            the left, `max_new_tokens` and so on

        Returns
        -------
        GeneratedText

        Raises
        ------
        NotImplementedError
            For an encoder-decoder, and for beam search where the model returns no `Cache`.
        ValueError
            If there are no `input_ids`.
        """
        self._check_H_init()
        self._check_model()
        if self.model.is_encoder_decoder:
            raise NotImplementedError("generate is for causal language models; score is for both.")
        transformer = self.model.transformer
        settings = Settings.of(transformer, generation_kwargs)
        prompt = Prompt.of(generation_kwargs, settings, self.model.device)
        way = self._way(method, prompt.as_text(), n_samples)
        noise = Noise.seeded(n_samples, generator)
        with self.model.prepared(), way.passes():
            weights = LoRAWeights(transformer, self.blocks)
            draws = [
                way.draw(weights.values, direction)
                for direction in noise.directions(self._precision, self.blocks)
            ]
            with predictive(transformer, weights, draws, settings.num_beams > 1):
                output = transformer.generate(**(generation_kwargs | vars(prompt)))
        sequences = getattr(output, "sequences", output)
        batch = prompt.continued(sequences, settings)
        return GeneratedText(sequences, self._score(batch, way, noise), output)

    # --- what would need Jacobians of a whole vocabulary --------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse()

    def _moments(self, X: Any, joint: bool) -> NoReturn:
        _refuse()

    def _statistics(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse()

    def linearize(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse()


def _refuse() -> NoReturn:
    raise NotImplementedError(
        "Moments of logits would take Jacobians of a whole vocabulary at every token: use "
        "la.score(batch) for given texts and la.generate(**inputs) for new ones."
    )
