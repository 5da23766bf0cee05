"""Laplace-LoRA for language models that write: the likelihood "language_modeling"."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any, ClassVar, NoReturn

import torch
from laplace.curvature import CurvatureInterface
from torch import nn
from transformers import PreTrainedModel

from laplace_lora_ext.curvature.backend import LowRankKronGGN
from laplace_lora_ext.likelihoods import LIKELIHOODS
from laplace_lora_ext.lowrank_kron import LowRankKronLoRALaplace
from laplace_lora_ext.models.adapters import only_active
from laplace_lora_ext.models.locks import exclusive
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.tokens_model import TokensModel
from laplace_lora_ext.models.weights import LoRAWeights, Values
from laplace_lora_ext.passes import Directions, every_output
from laplace_lora_ext.passes.graph import check_logits
from laplace_lora_ext.text.agreement import TokenAgreement
from laplace_lora_ext.text.draws import drawn
from laplace_lora_ext.text.generation import GeneratedText, write
from laplace_lora_ext.text.gridsearch import TokenGridSearch, TokenSecondTraining
from laplace_lora_ext.text.scores import TextScores, score
from laplace_lora_ext.tuning import Marglik, TuningMethod
from laplace_lora_ext.tuning.method import draw_seed

_NAME = "language_modeling"


class LanguageModelLaplace(LowRankKronLoRALaplace, likelihood=_NAME):
    """Laplace-LoRA over all tokens of a text, for a language model that writes.

    `laplace.Laplace` makes it for the likelihood "language_modeling" and
    `hessian_structure="lowrank_kron"`. `fit` takes batches as supervised fine-tuning does: mappings
    with `input_ids`, `attention_mask` and `labels` (-100 for tokens that don't count). The Fisher
    is a Monte-Carlo estimate: it draws a token from the model wherever there is a label, and
    back-propagates the loss of a whole text at once.

    Methods of `optimize_prior_precision`: "marglik" needs no data, "agreement" training texts
    (`TokenAgreement`), "gridsearch" validation texts (`TokenGridSearch`), and "second_training" a
    function that trains (`SecondTraining`).

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

    Raises
    ------
    ValueError
        If the model writes no text, or `class_token_ids` are given.
    NotImplementedError
        For any `kfac_approx` but "gradient".
    """

    _key = ("lora", "lowrank_kron", _NAME)
    _methods: ClassVar[Mapping[str, type[TuningMethod]]] = {
        "agreement": TokenAgreement,
        "marglik": Marglik,
        "gridsearch": TokenGridSearch,
        "second_training": TokenSecondTraining,
    }
    model: Any  # a TokensModel

    def __init__(
        self,
        model: nn.Module,
        likelihood: str = _NAME,
        *,
        backend: type[CurvatureInterface] | None = None,
        backend_kwargs: dict[str, Any] | None = None,
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

    @property
    def likelihood(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The likelihood's own name, which the state has too."""
        return _NAME

    @likelihood.setter
    def likelihood(self, value: str) -> None:
        """Ignore the name that the host was given."""

    def _adapted(self, likelihood: str) -> type[LogitsModel]:
        return TokensModel

    # --- texts ---------------------------------------------------------------------------------

    @exclusive
    @torch.inference_mode(False)
    @torch.no_grad()
    def score(
        self,
        batch: Mapping[str, Any],
        n_samples: int = 10,
        generator: torch.Generator | None = None,
    ) -> TextScores:
        """How likely texts are, and how uncertain the model is of each of their tokens.

        Parameters
        ----------
        batch : Mapping
            texts with labels, as for `fit`
        n_samples : int, default=10
            models with weights drawn from the posterior, S, of which `sample_adapters` writes the
            like; 0 scores the trained model itself. Scoring takes `1 + S` forward passes, and the
            memory of a few logits `(N, V)` whatever S is
        generator : torch.Generator, optional
            for the draws: with the same state, another batch gets the same draws

        Returns
        -------
        TextScores

        Raises
        ------
        ValueError
            If the batch has no labelled token or does not suit the model, or a logit is not
            finite.
        RuntimeError
            If the model is not the fitted one.
        """
        return score_texts([self], batch, n_samples, generator)

    def tokens(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The trained model's logits `(N, V)` for the labelled tokens, and the tokens, `(N,)`."""
        self.check_model()
        with self.model.prepared():
            f = self.model(batch)
        check_logits(f)
        return f, self.trained_likelihood.check_targets(self.model.targets(batch), f)

    @exclusive
    @torch.inference_mode(False)
    @torch.no_grad()
    def generate(
        self,
        *,
        n_samples: int = 10,
        generator: torch.Generator | None = None,
        **generation_kwargs: Any,
    ) -> GeneratedText:
        """Write texts, drawing each next token from the posterior predictive.

        This runs transformers' own `generate`, greedy or sampling, with its stopping, its logits
        processors and its caches, for one text after the other. A whole text keeps the same draws,
        so each draw is one model reading that text. Without draws the texts equal those of the
        model's own `generate`.

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
            with a `generate` of their own; without `use_cache=False` also for `guidance_scale` and
            models that keep no cache.
        ValueError
            If there are no prompts, or if they are padded on the wrong side.
        """
        return generate_texts([self], generation_kwargs, n_samples, generator)

    # --- what would need Jacobians of the whole vocabulary ------------------------------------

    def moments(self, X: Any, joint: bool, directions: Directions = every_output) -> NoReturn:
        """Refused, as all that needs moments of logits."""
        raise NotImplementedError(
            "Moments of logits would need Jacobians of the whole vocabulary at every token: use "
            "la.score(batch) for given texts and la.generate(**inputs) for new ones."
        )

    def _statistics(self, batch: Any, *_: Any) -> NoReturn:
        self.moments(batch, False)

    def __call__(self, x: Any, pred_type: str = "glm", **options: Any) -> NoReturn:
        """Refused, whatever `pred_type` and `**options`: `score` and `generate` predict texts."""
        self.moments(x, False)


def score_texts(
    members: Sequence[LanguageModelLaplace],
    batch: Mapping[str, Any],
    n_samples: int,
    generator: torch.Generator | None,
) -> TextScores:
    """`LanguageModelLaplace.score` of a posterior, or of a mixture of several."""
    return _score(members, batch, _drawn(members, n_samples, generator))


def generate_texts(
    members: Sequence[LanguageModelLaplace],
    generation_kwargs: dict[str, Any],
    n_samples: int,
    generator: torch.Generator | None,
) -> GeneratedText:
    """`LanguageModelLaplace.generate` of a posterior, or of a mixture of several.

    Without draws, a mixture is that of the trained models.
    """
    first = members[0]
    transformer, draws = first.model.transformer, list(_drawn(members, n_samples, generator))
    used = draws
    if not draws and len(members) > 1:
        used = [(m, LoRAWeights(transformer, m.blocks).values) for m in members]
    with first.model.prepared():
        sequences, batch, outputs = write(
            transformer,
            [partial(_run, transformer, *draw) for draw in used],
            first.model.device,
            generation_kwargs,
        )
    return GeneratedText(sequences, _score(members, batch, draws), outputs)


def _run(
    transformer: PreTrainedModel,
    la: LanguageModelLaplace,
    values: Values,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    with only_active(transformer, la.blocks[0].adapter):
        return LoRAWeights(transformer, la.blocks).call(values, args, kwargs)


def _drawn(
    members: Sequence[LanguageModelLaplace], n_samples: int, generator: torch.Generator | None
) -> Iterable[tuple[LanguageModelLaplace, Values]]:
    """Draws, divided among the members, the first ones getting the rest."""
    if not isinstance(n_samples, Integral) or n_samples < 0:
        raise ValueError(f"n_samples must be a whole number, 0 or more, and is {n_samples}.")
    for place, member in enumerate(members):
        member.check_model()
        own = (int(n_samples) + len(members) - 1 - place) // len(members)
        if own:
            yield from ((member, values) for values in drawn(member, own, draw_seed(generator)))


def _score(
    members: Sequence[LanguageModelLaplace],
    batch: Mapping[str, Any],
    draws: Iterable[tuple[LanguageModelLaplace, Values]],
) -> TextScores:
    found = [member.tokens(batch) for member in members]
    f, tokens = found[0]
    if len(found) > 1:  # logits of the mixture of the trained models
        f = torch.stack([f.log_softmax(-1) for f, _ in found]).logsumexp(0)

    def logits() -> Iterator[torch.Tensor]:
        for la, values in draws:
            with la.model.prepared():
                yield LoRAWeights(la.model, la.blocks).run(batch, values)

    return score(f, logits(), tokens, members[0].model.labelled(batch).to(f.device))
