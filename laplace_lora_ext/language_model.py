"""Laplace-LoRA for language models that write: the likelihood "language_modeling"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

import torch
from laplace.curvature import CurvatureInterface
from torch import nn

from laplace_lora_ext.curvature.backend import LowRankKronGGN
from laplace_lora_ext.likelihoods import LIKELIHOODS
from laplace_lora_ext.lowrank_kron import LowRankKronLoRALaplace
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.tokens_model import TokensModel
from laplace_lora_ext.passes.graph import check_logits
from laplace_lora_ext.passes.recorder import Directions, every_output
from laplace_lora_ext.text.generation import generate_texts
from laplace_lora_ext.text.priors import TokenAgreement, TokenGridSearch, TokenSecondTraining
from laplace_lora_ext.text.scores import draw_logits, score_texts
from laplace_lora_ext.tuning.marglik import Marglik
from laplace_lora_ext.tuning.method import TuningMethod

_NAME = "language_modeling"


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
        """The likelihood's own name, which the state and the backend have too."""
        return _NAME

    @likelihood.setter
    def likelihood(self, value: str) -> None:
        """Ignore the name that the host was given."""

    def _adapted(self, likelihood: str) -> type[LogitsModel]:
        return TokensModel

    score = score_texts
    draw_logits = draw_logits
    generate = generate_texts

    def tokens(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The trained model's logits `(N, V)` for the labelled tokens, and the tokens, `(N,)`."""
        self.check_model()
        with self.model.prepared():
            f = self.model(batch)
        check_logits(f)
        return f, self.trained_likelihood.check_targets(self.model.targets(batch), f)

    def moments(self, X: Any, joint: bool, directions: Directions = every_output) -> NoReturn:
        """Refused, as all that needs moments of logits."""
        raise NotImplementedError(
            "Moments of logits would need Jacobians of the whole vocabulary at every token: use "
            "la.score(batch) for given texts and la.generate(**inputs) for new ones."
        )

    def predictive_statistics(self, loader: Any, **options: Any) -> NoReturn:
        """Refused, whatever `**options`: they need moments of logits."""
        self.moments(loader, False)

    def statistics_by_batch(self) -> NoReturn:
        """Refused, as all that needs moments of logits."""
        self.moments(None, False)

    def __call__(self, x: Any, pred_type: str = "glm", **options: Any) -> NoReturn:
        """Refused, whatever `pred_type` and `**options`: `score` and `generate` predict texts."""
        self.moments(x, False)


LowRankKronLoRALaplace._of_likelihood[_NAME] = LanguageModelLaplace
