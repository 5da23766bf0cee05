"""What depends on the likelihood: an object for each, chosen by its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from laplace.curvature import CurvatureInterface
from laplace.curvature.curvlinops import CurvlinopsGGN

from laplace_lora_ext.curvature.backend import (
    LowRankKronGGN,
    LowRankKronInterface,
    MultiLabelCurvlinopsGGN,
)
from laplace_lora_ext.likelihoods import (
    LIKELIHOODS,
    MULTI_LABEL,
    TOKENS,
    Likelihood,
)
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.preference_model import PreferenceModel
from laplace_lora_ext.models.token_labels_model import TokenLabelsModel
from laplace_lora_ext.models.tokens_model import TokensModel
from laplace_lora_ext.text.priors import (
    TokenGridSearch,
)
from laplace_lora_ext.tuning import METHODS
from laplace_lora_ext.tuning.marglik import Marglik
from laplace_lora_ext.tuning.method import TuningMethod


@dataclass(frozen=True)
class Problem:
    """What a model was trained to predict, with all that depends on it.

    Attributes
    ----------
    name : str
        the likelihood's
    name_for_host : str
        that of the host's likelihood that it is computed with
    trained : Likelihood
        of the training data
    predicted : Likelihood
        of predictions
    adapter : type of LogitsModel
        makes logits of the model's output
    methods : Mapping
        to choose the prior precision, by their names
    writes : bool
        whether examples are texts, which have no class: each of their tokens is
        predicted
    labels_tokens : bool
        whether examples are texts whose tokens have classes
    instead_of_logit_scale : str
        what to use in place of `logit_scale`; empty where the logits can be scaled
    of_other : str
        the `problem_type` of models that were trained for another likelihood
    """

    name: str
    name_for_host: str
    trained: Likelihood
    predicted: Likelihood
    adapter: type[LogitsModel] = LogitsModel
    methods: Mapping[str, type[TuningMethod]] = field(default_factory=lambda: METHODS)
    writes: bool = False
    labels_tokens: bool = False
    instead_of_logit_scale: str = ""
    of_other: str = ""

    def backend_kwargs(
        self, backend: type[CurvatureInterface], given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Complete the user's options of a backend, and refuse unsuitable ones."""
        return dict(given)

    def check_logit_scale(self, value: float) -> None:
        """Refuse a scale where predictions have no logits that a likelihood reads."""
        if value != 1 and self.instead_of_logit_scale:
            raise ValueError(
                f"{self.name} has no logit_scale: use {self.instead_of_logit_scale}."
            )

    def backend(self, backend: type[CurvatureInterface]) -> type[CurvatureInterface]:
        """Choose the class that computes this likelihood's curvature."""
        return backend

    def check_model(self, model: LogitsModel) -> None:
        """Refuse a model whose configuration names another likelihood."""
        if self.of_other and model.problem_type == self.of_other:
            raise ValueError(
                f'The likelihood "{self.name}" does not fit the model, whose '
                f"problem_type is {self.of_other!r}: use the likelihood "
                f'"{LIKELIHOOD_OF[self.of_other]}", or set config.problem_type if it '
                "is wrong."
            )

    def check_linearised(self) -> None:
        """Refuse predictions of the linearised model where outputs are too many."""


LIKELIHOOD_OF = {
    "single_label_classification": "classification",
    "multi_label_classification": MULTI_LABEL,
    "regression": "regression",
}
"""Likelihoods by what transformers calls the `problem_type`."""


CLASSIFICATION = Problem(
    name="classification",
    name_for_host="classification",
    trained=LIKELIHOODS["classification"],
    predicted=LIKELIHOODS["classification"],
    of_other="multi_label_classification",
)

REGRESSION = Problem(
    name="regression",
    name_for_host="regression",
    trained=LIKELIHOODS["regression"],
    predicted=LIKELIHOODS["regression"],
    instead_of_logit_scale="sigma_noise",
)

# It learns from preferences, which are two classes, and predicts numbers.
REWARD_MODELING = Problem(
    name="reward_modeling",
    name_for_host="reward_modeling",
    trained=LIKELIHOODS["reward_modeling"],
    predicted=LIKELIHOODS["regression"],
    adapter=PreferenceModel,
)


class _MultiLabel(Problem):
    """Several labels for each example, or a single logit of two classes."""

    def backend(self, backend: type[CurvatureInterface]) -> type[CurvatureInterface]:
        return MultiLabelCurvlinopsGGN if backend is CurvlinopsGGN else backend


MULTI_LABEL_CLASSIFICATION = _MultiLabel(
    name=MULTI_LABEL,
    # The host does not know this likelihood: to it, every label is a classification.
    name_for_host="classification",
    trained=LIKELIHOODS[MULTI_LABEL],
    predicted=LIKELIHOODS[MULTI_LABEL],
    of_other="single_label_classification",
)


class _LanguageModeling(Problem):
    """Tokens of texts: as many outputs as there are words, at every token."""

    def backend_kwargs(
        self, backend: type[CurvatureInterface], given: Mapping[str, Any]
    ) -> dict[str, Any]:
        if not issubclass(backend, LowRankKronInterface):
            raise ValueError(
                f'The likelihood "{self.name}" needs hessian_structure="lowrank_kron": '
                "other structures can't draw the tokens of a text."
            )
        if given.get("kfac_approx", "gradient") != "gradient":
            raise NotImplementedError(
                f'{self.name} works with kfac_approx="gradient" only.'
            )
        # The exact Fisher would take a backward pass for each word of the vocabulary.
        # What two tokens of a text add to its gradient has nearly all of the noise,
        # which signs have too.
        if issubclass(backend, LowRankKronGGN):
            defaults = {"stochastic": True, "draws": "labels", "num_samples": 1}
            return defaults | dict(given)
        return dict(given)

    def check_linearised(self) -> None:
        raise NotImplementedError(
            "Moments of logits would need Jacobians of the whole vocabulary at every "
            "token: use la.score(batch), or la.draw_logits(batch)."
        )


class _TokenClassification(Problem):
    """Labels of tokens: data are texts, and each of their labels counts."""

    def backend(self, backend: type[CurvatureInterface]) -> type[CurvatureInterface]:
        if issubclass(backend, LowRankKronInterface):
            return backend
        raise ValueError(
            f'{backend.__name__} has no likelihood "{self.name}": use '
            'hessian_structure="lowrank_kron", "diag" or "full", and leave out backend.'
        )

    def backend_kwargs(
        self, backend: type[CurvatureInterface], given: Mapping[str, Any]
    ) -> dict[str, Any]:
        if given.get("kfac_approx", "gradient") != "gradient":
            raise NotImplementedError(
                f'{self.name} works with kfac_approx="gradient" only.'
            )
        return dict(given)


TOKEN_CLASSIFICATION = _TokenClassification(
    name=TOKENS,
    # The host does not know this likelihood: to it, every token is a classification.
    name_for_host="classification",
    trained=LIKELIHOODS[TOKENS],
    predicted=LIKELIHOODS[TOKENS],
    adapter=TokenLabelsModel,
    labels_tokens=True,
)

LANGUAGE_MODELING = _LanguageModeling(
    name="language_modeling",
    # The host does not know this likelihood: to it, every token is a classification.
    name_for_host="classification",
    trained=LIKELIHOODS["language_modeling"],
    predicted=LIKELIHOODS["classification"],
    adapter=TokensModel,
    instead_of_logit_scale="draw_logits, and divide by a temperature",
    methods={
        "gridsearch": TokenGridSearch,
        "marglik": Marglik,
    },
    writes=True,
)

PROBLEMS = {
    problem.name: problem
    for problem in (
        CLASSIFICATION,
        REGRESSION,
        REWARD_MODELING,
        MULTI_LABEL_CLASSIFICATION,
        TOKEN_CLASSIFICATION,
        LANGUAGE_MODELING,
    )
}
