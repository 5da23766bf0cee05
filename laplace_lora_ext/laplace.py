"""Posteriors of each structure, by the host's factory or from files.

The host finds each class by its `_key`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import laplace
import torch
from laplace.baselaplace import DiagLaplace, FullLaplace, KronLaplace
from laplace.utils.matrix import KronDecomposed
from laplace.utils.utils import invsqrt_precision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from laplace_lora_ext.curvature.accumulation import (
    DiagStructure,
    FullStructure,
    KronStructure,
    LowRankKronStructure,
)
from laplace_lora_ext.curvature.decomposed import LowRankKronDecomposed
from laplace_lora_ext.lora_laplace import LoRALaplace
from laplace_lora_ext.messages import check_name
from laplace_lora_ext.models.logits_model import find_transformer
from laplace_lora_ext.models.running import exclusive, normal_tensors
from laplace_lora_ext.models.same_model import ModelState
from laplace_lora_ext.passes.recorder import Directions
from laplace_lora_ext.predictive.data_sets import Columns, over_loader
from laplace_lora_ext.predictive.links import DEFAULT_LINK
from laplace_lora_ext.predictive.statistics import (
    PredictiveStatistics,
    contrasts_for,
    statistics_of_batch,
)
from laplace_lora_ext.saving import read_state
from laplace_lora_ext.tasks import LIKELIHOOD_OF
from laplace_lora_ext.tasks.token_labels import TOKEN_CLASSIFICATION


class LowRankKronLoRALaplace(LoRALaplace, KronLaplace):
    """Laplace-LoRA: Kronecker-factored curvature whose large factors are kept low-rank.

    It alone takes the likelihood "language_modeling", for language models that write.

    Parameters
    ----------
    model : torch.nn.Module
        a `PeftModel`, or any module that holds plain LoRA layers and maps a batch to
        logits
    likelihood : str
        as for `LoRALaplace`. With "language_modeling", `fit` takes batches as
        supervised fine-tuning does: mappings with `input_ids`, `attention_mask` and
        `labels` (-100 for tokens that don't count). The Fisher is then a Monte-Carlo
        estimate: it draws a token from the model wherever there is a label, and
        back-propagates the loss of a whole text at once. `score` predicts, by draws
        of the weights
    backend_kwargs : dict, optional
        `rank` (10), `kfac_approx` ("gradient"), `tail` (True), `stochastic` (draws
        where they take fewer passes; False is exact), `draws` ("signs"), `num_samples`
        (2 backward passes), `seed` (0); for the paper's settings pass
        `laplace_lora_ext.PAPER_SETTINGS`
    **kwargs
        all others as for `LoRALaplace`

    Attributes
    ----------
    H : LowRankKronDecomposed or None
        the curvature, without a prior; None before `fit`
    H_facs : list of KroneckerBlock or None
        the sums behind it, to which a later fit can add: with twice as many columns as
        the rank

    References
    ----------
    Yang et al., "Bayesian low-rank adaptation for large language models", ICLR 2024.
    """

    _key = ("lora", "lowrank_kron")
    _kind_of_structure = LowRankKronStructure

    # --- what is particular to the structure ------------------------------------------

    @property
    @normal_tensors
    def posterior_precision(self) -> LowRankKronDecomposed:
        """Return the posterior precision, made once for a fit and its prior."""
        return self._once(lambda: self.H * self._H_factor + self.prior_precision)

    def _linearised(
        self, part: Any, joint: bool, directions: Directions
    ) -> tuple[Tensor, Tensor]:
        precision = self.posterior_precision
        f_var: Any = 0

        def add(indices: list[int], jacobians: Tensor) -> None:
            nonlocal f_var
            if joint:
                jacobians = jacobians.flatten(1, 2)[:, None]
            of_blocks = precision.inv_square_form_of(indices, jacobians)
            f_var = f_var + of_blocks.to(self.mean)

        f_mu = self.recorder.visit_jacobians(part, add, directions)
        return f_mu, f_var[0] if joint else f_var

    @property
    def log_det_posterior_precision(self) -> Tensor:
        """Compute the log-determinant of the posterior precision, in float64."""
        self._check_H_init()
        return self.H.spectrum.logdet(self._H_factor, self.prior_precision)

    @exclusive
    @normal_tensors
    def predictive_statistics(
        self,
        loader: DataLoader | Iterable[Any],
        progress_bar: bool = False,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        link_approx: str = DEFAULT_LINK,
    ) -> PredictiveStatistics:
        """Pass over a data set once, to predict it under any prior precision.

        Parameters
        ----------
        loader : DataLoader or iterable
            of mappings or pairs `(X, y)`; labels, if there are any, become `targets`
        progress_bar : bool, default=False
            whether to show one
        device : torch.device or str, default="cpu"
            where to keep the statistics; `PredictiveStatistics` says how large they are
        dtype : torch.dtype, default=torch.float32
            in which precision to keep them
        link_approx : str, default="mean_field"
            link that they are for. Those for "probit" are of all outputs, by C passes,
            and serve every link; so do all of numbers and, unless `n_contrasts` asks
            for fewer, of up to nine classes. Of more "mean_field" and "mc" need some
            alone

        Returns
        -------
        PredictiveStatistics
            all that any prior precision needs

        Raises
        ------
        ValueError
            If the loader is empty, only some batches have labels, or in a batch, which
            the message names, labels don't fit or a number is not finite.
        RuntimeError
            If the model has changed since the fit.
        NotImplementedError
            For free text.
        """
        self.task.check_linearised()
        self._check_H_init()

        contrasts = contrasts_for(self, link_approx)

        def of_batch(batch: Any) -> Columns:
            return statistics_of_batch(self, batch, contrasts, device, dtype).columns

        columns = over_loader(
            loader,
            of_batch,
            "[Predictive statistics]",
            progress_bar,
            owners=self.model.owners,
        )
        f_mu, projections, inner_products, *others = (
            column.to(device) for column in columns
        )
        classes = None if contrasts is None else others.pop()
        return PredictiveStatistics(
            f_mu,
            projections,
            inner_products,
            spectrum=self.H.spectrum,
            scale=self._H_factor.detach(),
            targets=others.pop() if others else None,
            classes=classes,
        )

    @exclusive
    def summary(self) -> str:
        """Make a table of the weights and their priors: `print(la.summary())`.

        The last column says how many of a weight's parameters the data determine rather
        than the prior: the sum of e / (e + λ) over the eigenvalues e of its curvature,
        with the prior precision λ (MacKay, "Bayesian interpolation", Neural Computation
        4, 1992).
        """
        self._check_H_init()
        spectrum = self.H.spectrum
        priors = self.prior_precision.double().expand(len(self.blocks))
        shifted = spectrum.shifted(self._H_factor, priors)  # e + λ
        shares = spectrum.multiplicity * (1 - priors[spectrum.block] / shifted)
        determined = torch.zeros_like(priors).index_add(0, spectrum.block, shares)
        names = [block.name.removeprefix("base_model.model.") for block in self.blocks]
        width = max(len(name) for name in names)
        rows = [f"{'weight':{width}}  parameters  prior precision  determined"]
        for row in zip(names, self._sizes, priors, determined, strict=True):
            name, size, prior, number = row
            rows.append(f"{name:{width}}  {size:10,}  {prior:15.4g}  {number:10.1f}")
        if not self.has_variance:
            rows.append("The weights do not vary: there is no epistemic uncertainty.")
        return "\n".join(rows)


# --- the host's own structures --------------------------------------------------------


class KronLoRALaplace(LoRALaplace, KronLaplace):
    """The host's `KronLaplace` over LoRA weights: both Kronecker factors dense."""

    _key = ("lora", "kron")
    _kind_of_structure = KronStructure

    @property
    def log_det_posterior_precision(self) -> Tensor:
        """Compute the log-determinant of the posterior precision, in float64."""
        self._check_H_init()
        # Pairs, whatever the host's annotation says.
        eigenvalues: Any = [
            [values.double() for values in pair] for pair in self.H.eigenvalues
        ]
        curvature = KronDecomposed(self.H.eigenvectors, eigenvalues)
        prior = self.prior_precision.double()
        return (curvature * self._H_factor.double() + prior).logdet()


class DiagLoRALaplace(LoRALaplace, DiagLaplace):
    """The host's `DiagLaplace` over LoRA weights."""

    _key = ("lora", "diag")
    _kind_of_structure = DiagStructure

    @property
    def log_det_posterior_precision(self) -> Tensor:
        """Compute the log-determinant of the posterior precision, in float64."""
        return self.posterior_precision.double().log().sum()


class FullLoRALaplace(LoRALaplace, FullLaplace):
    """The host's dense `FullLaplace` over LoRA weights, for small adapters."""

    _key = ("lora", "full")
    _kind_of_structure = FullStructure

    @property
    @normal_tensors
    def posterior_scale(self) -> Tensor:
        """Return a root of the covariance, made once for a fit and its prior."""
        return self._once(lambda: invsqrt_precision(self.posterior_precision))

    @property
    def log_det_posterior_precision(self) -> Tensor:
        """Compute the log-determinant of the posterior precision, in float64."""
        return self.posterior_precision.double().logdet()


# --- made, or read --------------------------------------------------------------------

_CLASSES = (LowRankKronLoRALaplace, KronLoRALaplace, DiagLoRALaplace, FullLoRALaplace)


def Laplace(  # noqa: N802
    model: nn.Module,
    likelihood: str | None = None,
    subset_of_weights: str = "lora",
    hessian_structure: str = "lowrank_kron",
    **options: Any,
) -> LoRALaplace:
    """Make a posterior over LoRA weights as `laplace.Laplace` does.

    The likelihood is optional.

    Parameters
    ----------
    model : torch.nn.Module
        a `PeftModel`, or any module that holds plain LoRA layers
    likelihood : str, optional
        "classification", "regression", "multi_label_classification" (also for a single
        logit of two classes), "token_classification", "reward_modeling" or
        "language_modeling". If omitted: classification with `class_token_ids` or
        `class_texts`, "token_classification" for a model of that kind, otherwise what
        the transformers configuration says (`problem_type`, or `num_labels`: one means
        regression, more mean classification)
    subset_of_weights : str, default="lora"
        as for `laplace.Laplace`, which has other classes for other weights
    hessian_structure : {"lowrank_kron", "kron", "diag", "full"}
        the curvature; "lowrank_kron" by default
    **options
        for the class that these two select

    Returns
    -------
    LoRALaplace
        of the structure's class; `from_pretrained` returns it fitted

    Raises
    ------
    ValueError
        If the likelihood can't be read off the model.
    """
    if likelihood is None:
        likelihood = "classification" if has_answers(options) else _likelihood_of(model)
    if subset_of_weights == "lora":
        structures = [cls._key[1] for cls in _CLASSES]
        check_name("hessian_structure", hessian_structure, structures)
    la: Any = laplace.Laplace(
        model, likelihood, subset_of_weights, hessian_structure, **options
    )
    return la


def from_pretrained(model: nn.Module, folder: str | Path, **kwargs: Any) -> LoRALaplace:
    """Load a posterior that `save_pretrained` wrote, around a model's present weights.

    Parameters
    ----------
    model : torch.nn.Module
        the fitted model, with its adapter, head and base, in the same wrapper: a
        `PeftModel` if it was one
    folder : str or Path
        with the posterior's file
    **kwargs
        for the posterior's class, such as `dict_key_y`, or a `prior_precision` in place
        of the file's. Answers are the file's: leave out `class_texts`

    Returns
    -------
    LoRALaplace
        of the structure's class, fitted

    Raises
    ------
    FileNotFoundError
        If the folder holds no posterior.
    ValueError
        If the file is only a part, or the model is not the fitted one. The message says
        which.
    """
    state = read_state(folder)
    fitted = ModelState.from_state_dict(state["model"])
    classes = {cls.__name__: cls for cls in _CLASSES}
    # Given ones that differ are refused when the state is loaded.
    options: dict[str, Any] = {
        "class_token_ids": fitted.class_token_ids,
        "mask_token_id": fitted.mask_token_id,
        "normalised": fitted.normalised,
        "weight_names": list(fitted.blocks),
        "backend_kwargs": state["settings"],
    }
    la = classes[state["cls_name"]](model, state["likelihood"], **options | kwargs)
    # Of what files hold, such as a prior, the user's own is taken.
    own = {name: kwargs[name] for name in kwargs.keys() & state.keys()}
    la.load_state_dict(state | own)
    return la


def has_answers(options: Mapping[str, Any]) -> bool:
    """Tell whether options of a Laplace class say what a language model answers."""
    return any(
        options.get(name) is not None for name in ("class_token_ids", "class_texts")
    )


def _likelihood_of(model: nn.Module) -> str:
    transformer = find_transformer(model)
    if transformer is None:
        raise ValueError(
            "Pass the likelihood: the model has no transformers configuration."
        )
    if transformer.can_generate():
        raise ValueError(
            "Pass the likelihood, or class_token_ids, the tokens of the answers, or "
            "class_texts."
        )
    if type(transformer).__name__.endswith("ForTokenClassification"):
        return TOKEN_CLASSIFICATION.name
    config = transformer.config
    by_number = (
        "regression" if config.num_labels == 1 else "single_label_classification"
    )
    problem_type = getattr(config, "problem_type", None) or by_number
    return LIKELIHOOD_OF[problem_type]
