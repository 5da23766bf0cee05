"""A mixture of Laplace approximations: the mean of what several posteriors predict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from laplace_lora_ext.laplace import from_pretrained
from laplace_lora_ext.lora_laplace import LoRALaplace
from laplace_lora_ext.models.adapters import (
    find_peft_model,
    own_adapter_back,
    write_adapter,
)
from laplace_lora_ext.models.running import exclusive, normal_tensors
from laplace_lora_ext.predicting import Predictor
from laplace_lora_ext.predictive.learnt_variance import LearntVariance
from laplace_lora_ext.predictive.moments import mix_moments
from laplace_lora_ext.predictive.statistics import MixtureStatistics
from laplace_lora_ext.processes.shards import Share
from laplace_lora_ext.saving import write_whole
from laplace_lora_ext.tuning import build
from laplace_lora_ext.tuning.gridsearch import GridMethod
from laplace_lora_ext.tuning.method import TuningHistory, TuningMethod

DESCRIPTION = "laplace_mixture.json"


class LaplaceMixture(Predictor):
    """A mean of the predictions of posteriors around several trained adapters.

    Posteriors around other adapters of the same base model know what one can't: other
    solutions. The members may be adapters of one `PeftModel`, whichever is active. They
    are copied, so that the given posteriors keep their prior precisions.

    A mean of predictions is less sure than each of them. So a mixture may want a larger
    prior precision than its members alone: with data that no member has learnt,
    `optimize_prior_precision` chooses it.

    Parameters
    ----------
    members : sequence of LoRALaplace
        fitted posteriors with the same outputs and likelihood

    Attributes
    ----------
    members : list of LoRALaplace
        the posteriors
    prior_precision : torch.Tensor
        `(1,)`, a common factor of the members' own prior precisions, 1 at first
    logit_scale : float
        a common factor of the members' own scales of the logits, 1 at first

    Raises
    ------
    ValueError
        If the members differ in their likelihood or their outputs.
    AttributeError
        If one has no fit.
    RuntimeError
        If the model of one has changed since its fit.

    References
    ----------
    Eschenhagen et al., "Mixtures of Laplace approximations for improved post-hoc
    uncertainty in deep learning", arXiv:2111.03577 (2021).
    """

    members: list[LoRALaplace]

    @normal_tensors
    def __init__(self, members: Sequence[LoRALaplace]) -> None:
        self.members = [copy(member) for member in members]
        for member in self.members:
            member.check_model()
        _check_alike(self.members)
        self._priors = tuple(member.prior_precision.detach() for member in self.members)
        self._factor = torch.ones(1)
        self._scales = tuple(member.logit_scale for member in self.members)
        self._scale = 1.0

    def __copy__(self) -> LaplaceMixture:
        """Copy the members too, as their priors are set with the mixture's."""
        other = object.__new__(type(self))
        vars(other).update(vars(self), members=[copy(each) for each in self.members])
        return other

    # --- predictions ------------------------------------------------------------------

    @exclusive
    def __call__(self, x: Any, **options: Any) -> Any:
        """Average the members' probabilities `(B, C)`, or mix their moments.

        Parameters
        ----------
        x : Mapping or torch.Tensor
            as for a call of a posterior
        **options
            those of a call of a posterior, such as `link_approx` and `pred_type`

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            of a regression mean and covariance
        """
        outputs: list[Any] = [member(x, **options) for member in self.members]
        if isinstance(outputs[0], Tensor):
            return torch.stack(outputs).mean(0)
        means, covariances = zip(*outputs, strict=True)
        return mix_moments(torch.stack(means), torch.stack(covariances))

    def amortize(self, loader: Any, **options: Any) -> list[LearntVariance]:
        """Let each member learn its variances.

        Arguments are those of `LoRALaplace.amortize`.
        """
        return [member.amortize(loader, **options) for member in self.members]

    @exclusive
    def predictive_statistics(self, loader: Any, **options: Any) -> MixtureStatistics:
        """Pass over a data set with each member.

        Parameters
        ----------
        loader : DataLoader or iterable
            read once, so that all members see the same rows
        **options
            as for `LowRankKronLoRALaplace.predictive_statistics`
        """
        # Typed so, since only members of "lowrank_kron" have statistics.
        members: list[Any] = self.members
        data = Share.read_once(loader)
        return MixtureStatistics(
            [member.predictive_statistics(data, **options) for member in members]
        )

    # --- prior ------------------------------------------------------------------------

    @property
    def prior_precision(self) -> Tensor:
        return self._factor

    @prior_precision.setter
    @exclusive
    @normal_tensors
    def prior_precision(self, factor: float | Tensor) -> None:
        factor = torch.tensor([float(factor)])
        for member, prior in zip(self.members, self._priors, strict=True):
            member.prior_precision = factor.to(prior) * prior
        self._factor = factor

    @property
    def logit_scale(self) -> float:
        return self._scale

    @logit_scale.setter
    @exclusive
    def logit_scale(self, factor: float) -> None:
        for member, scale in zip(self.members, self._scales, strict=True):
            member.logit_scale = factor * scale
        self._scale = float(factor)

    def optimize_prior_precision(
        self, method: str | TuningMethod = "gridsearch", **options: Any
    ) -> TuningHistory:
        """Choose common factors of the members' prior precisions and scales.

        Parameters
        ----------
        method : {"gridsearch"}, GridSearch or TokenGridSearch
            needs data that no member has learnt
        **options
            of `GridSearch`, or of texts `TokenGridSearch`: `val_loader`, a loader or
            what `predictive_statistics` returned, with the link "mean_field" by default

        Returns
        -------
        TuningHistory
            its prior precisions are the factors
        """
        choose = build(method, options, self.members[0].task)
        if not isinstance(choose, GridMethod):
            raise ValueError(
                'A mixture takes method="gridsearch" or a GridSearch(...), not '
                f"{type(choose).__name__}."
            )
        return choose(self)

    # --- files ------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.members)})"

    @exclusive
    def save_pretrained(self, folder: str | Path) -> None:
        """Write each member's adapter and posterior into a folder of its name.

        Raises
        ------
        ValueError
            If the members are not adapters of one `PeftModel`.
        """
        models = [find_peft_model(member.model) for member in self.members]
        names = [member.blocks[0].adapter for member in self.members]
        of_one_model = all(model is models[0] for model in models)
        if not of_one_model or len(set(names)) < len(names):
            raise ValueError(
                "A mixture is saved if its members are adapters of one PeftModel: save "
                "these posteriors one by one."
            )
        # It is written last: a folder without it holds no mixture, only parts.
        Path(folder, DESCRIPTION).unlink(missing_ok=True)
        for member, name in zip(self.members, names, strict=True):
            # PEFT gives any adapter but "default" a folder of its own.
            parent = Path(folder, name) if name == "default" else Path(folder)
            member.save_pretrained(write_adapter(models[0], name, {}, parent))
        content = json.dumps({"members": names}).encode()
        write_whole(Path(folder, DESCRIPTION), content)

    @classmethod
    def from_pretrained(
        cls, model: nn.Module, folder: str | Path, **kwargs: Any
    ) -> LaplaceMixture:
        """Load a mixture that `save_pretrained` wrote.

        Parameters
        ----------
        model : torch.nn.Module
            the base model without adapters, or a `PeftModel` of it: members' adapters
            that it lacks are added, those that it has must be the saved ones, and its
            active adapter stays so
        folder : str or Path
            that `save_pretrained` wrote
        **kwargs
            for the posteriors' classes, such as `dict_key_y`

        Raises
        ------
        FileNotFoundError
            If the folder holds no mixture.
        ValueError
            If files are parts, or an adapter or the base model is not that of the fit.
        """
        content = Path(folder, DESCRIPTION).read_text(encoding="utf-8")
        names = json.loads(content)["members"]
        if not isinstance(model, PeftModel):
            model = PeftModel.from_pretrained(
                model, str(Path(folder, names[0])), names[0]
            )  # pyright: ignore[reportArgumentType]
        members = []
        with own_adapter_back(model):
            for name in names:
                if name not in model.peft_config:
                    model.load_adapter(str(Path(folder, name)), name)
                model.set_adapter(name)
                members.append(from_pretrained(model, Path(folder, name), **kwargs))
        return cls(members)


def _check_alike(members: Sequence[LoRALaplace]) -> None:
    """Refuse members whose predictions have no mean."""
    facts = [
        (la.likelihood, la.n_outputs, la.model.class_token_ids, la.model.normalised)
        for la in members
    ]
    if any(fact != facts[0] for fact in facts):
        raise ValueError(
            "The members differ in likelihood, n_outputs, class_token_ids or "
            f"normalised: {facts}."
        )
