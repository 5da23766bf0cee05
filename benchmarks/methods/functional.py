"""The host's function-space posteriors around LoRA weights.

They are Gaussian processes of logits, with a kernel J Jᵀ / λ of the Jacobians J of
texts. The host makes J anew for every pair of batches, and can't always read mappings.
So J is made once, as for all other posteriors here, and the host gets a linear model of
numbered texts. It sees nothing of J but inner products with the texts that it selects:
coordinates in an orthonormal basis of their Jacobians have the same, and are fewer.
"""

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from laplace.baselaplace import ELLA, FunctionalLaplace, VaLLA
from laplace.curvature.curvlinops import CurvlinopsGGN
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.data import DataLoader, Subset, TensorDataset

from benchmarks.models import AdaptedModel
from laplace_lora_ext import LoRALaplace
from laplace_lora_ext.curvature.accumulation import Structure

# Logits of the texts that posteriors select: the host solves such a system for each
# text. The lab draws its texts class by class in turns, so that the first have all.
MOST_ROWS = 1000
BATCH_SIZE = 16
KEPT = 0.75  # of ELLA's directions
MOST_INDUCING = 100  # texts of VaLLA
STEPS = 500  # of VaLLA, which has no closed form
LEARNING_RATE = 0.05

OfHost = FunctionalLaplace | ELLA | VaLLA


class Linearised(nn.Module):
    """A linear model in a shift of the weights, of texts by their numbers."""

    def __init__(self, rows: Tensor, logits: Tensor, n_selected: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(rows.new_zeros(rows.shape[-1]))
        self.rows, self.logits = rows, logits  # Jacobians (texts, classes, coordinates)
        self.n_selected = n_selected

    def forward(self, numbers: Tensor) -> Tensor:
        """Compute logits (batch, classes)."""
        return self.logits[numbers] + self.rows[numbers] @ self.shift


class Basis:
    """An orthonormal basis of selected texts' Jacobians, and of what another adds."""

    def __init__(self, jacobians: Tensor) -> None:
        n_texts, self.n_outputs, _ = jacobians.shape
        self.jacobians = jacobians.flatten(0, 1)
        gram = (self.jacobians @ self.jacobians.T).double()
        values, vectors = torch.linalg.eigh(gram)
        # What float32 can't tell from nothing has no direction.
        is_known = values > 1e-6 * values[-1]
        self.coordinates = vectors[:, is_known] / values[is_known].sqrt()
        own = vectors[:, is_known] * values[is_known].sqrt()
        self.selected = pad(own, (0, self.n_outputs)).unflatten(0, (n_texts, -1))

    def rows(self, Js: Tensor) -> Tensor:
        """Compute coordinates of Jacobians (texts, rows, weights), of at most C rows.

        The last C coordinates are of what lies outside of the selected texts'.
        """
        seen = (Js @ self.jacobians.T).double() @ self.coordinates
        outside = (Js @ Js.mT).double() - seen @ seen.mT
        values, vectors = torch.linalg.eigh(outside)
        root = vectors * values.clamp_min(0).sqrt()[:, None]
        missing = self.n_outputs - root.shape[-1]
        return torch.cat([seen, pad(root, (0, missing))], dim=-1)


class InFunctionSpace:
    """A host's posterior, fitted to the coordinates of training texts."""

    def __init__(self, host: OfHost, basis: Basis, diagonal: Tensor) -> None:
        self.host, self.basis = host, basis
        self._diagonal = diagonal
        self._seen: tuple[Tensor, Tensor] | None = None

    def diag(self) -> Tensor:
        """Return the diagonal of the training texts' curvature in its coordinates."""
        return self._diagonal

    def covariance(self, Js: Tensor, prior_precision: Tensor) -> Tensor:
        """Compute covariances of outputs, by Jacobians (texts, rows, weights)."""
        # A search asks for many prior precisions of the same texts.
        if self._seen is None or self._seen[0] is not Js:
            self._seen = Js, self.basis.rows(Js)
        with warnings.catch_warnings():  # of a prior that has changed, as it should
            warnings.simplefilter("ignore")
            self.host.prior_precision = prior_precision.double()
            self.host._refresh_posterior()  # which a subset of data would not do
            covariance = self.host.functional_variance(self._seen[1])
        return covariance.detach().to(Js)


@dataclass(frozen=True)
class Texts:
    """Training texts: Jacobians of those that are selected, coordinates of others."""

    selected: tuple[Tensor, ...] = ()
    others: tuple[Tensor, ...] = ()
    basis: Basis | None = None  # once there are others
    logits: tuple[Tensor, ...] = ()
    labels: tuple[Tensor, ...] = ()

    def and_more(self, Js: Tensor) -> "Texts":
        """Take the Jacobians of a batch."""
        room = max(1, MOST_ROWS // Js.shape[1]) - sum(map(len, self.selected))
        first, rest = Js[:room], Js[room:]
        selected = (*self.selected, first) if len(first) else self.selected
        if not len(rest):
            return replace(self, selected=selected)
        basis = self.basis or Basis(torch.cat(selected))
        others = (*self.others, basis.rows(rest))
        return replace(self, selected=selected, others=others, basis=basis)


class FunctionSpaceStructure(Structure):
    """Keeps Jacobians of training texts, and lets the host fit them."""

    def posterior(self, model: Linearised, loader: DataLoader) -> OfHost:
        """Fit a posterior of the host to numbers and labels of texts."""
        raise NotImplementedError

    def zeros(self) -> Texts:
        return Texts()

    def add(
        self, sums: Texts, x: Any, y: Tensor, examples: Tensor
    ) -> tuple[Tensor, Texts]:
        Js, logits = self.recorder.jacobians(x)
        labels = self.task.check_targets(y, logits)
        more = replace(
            sums.and_more(Js),
            logits=(*sums.logits, logits),
            labels=(*sums.labels, labels),
        )
        return self.task.loss(logits, labels), more

    def decompose(self, sums: Texts, n_data: int) -> InFunctionSpace:
        basis = sums.basis or Basis(torch.cat(sums.selected))
        rows = torch.cat([basis.selected, *sums.others])
        logits = torch.cat(sums.logits).double()
        texts = TensorDataset(torch.arange(n_data), torch.cat(sums.labels))
        loader = DataLoader(texts, BATCH_SIZE, shuffle=True)
        model = Linearised(rows, logits, len(basis.selected))
        p = logits.softmax(-1)
        fishers = torch.diag_embed(p) - p[:, :, None] * p[:, None]
        diagonal = (rows * (fishers @ rows)).sum((0, 1))
        return InFunctionSpace(self.posterior(model, loader), basis, diagonal)


class UprightSubset(FunctionalLaplace):
    """The host's subset of data, whose kernels of two texts it has transposed."""

    def _kernel_batch_star(self, jacobians: Tensor, batch: Tensor) -> Tensor:
        return super()._kernel_batch_star(jacobians, batch).transpose(-1, -2)


class SubsetStructure(FunctionSpaceStructure):
    """A Gaussian process of the selected texts (Immer et al. 2021)."""

    def posterior(self, model: Linearised, loader: DataLoader) -> OfHost:
        """Fit the selected texts, and no others."""
        texts = Subset(loader.dataset, range(model.n_selected))
        la = UprightSubset(
            model, "classification", n_subset=len(texts), backend=CurvlinopsGGN
        )
        la.fit(DataLoader(texts, BATCH_SIZE))
        return la


class FirstTexts(ELLA):
    """ELLA, whose features are of the first texts."""

    def _indices(self, loader: DataLoader, balanced: bool) -> Tensor:
        return torch.arange(self.subsample_size)


class ELLAStructure(FunctionSpaceStructure):
    """Features by one logit of each selected text (Deng et al. 2022)."""

    def posterior(self, model: Linearised, loader: DataLoader) -> OfHost:
        """Keep the largest directions, fewer where texts are nearly alike."""
        n_kept = round(KEPT * model.n_selected)
        while True:
            la = FirstTexts(
                model,
                "classification",
                subsample_size=model.n_selected,
                n_eigenvalues=max(1, n_kept),
                backend=CurvlinopsGGN,
            )
            try:
                la.fit(loader)
                return la
            except ValueError:  # before any curvature: too few directions
                if n_kept <= 1:
                    raise
                n_kept //= 2


class VaLLAStructure(FunctionSpaceStructure):
    """A variational posterior by labels' logits of texts (Ortega et al. 2024)."""

    def posterior(self, model: Linearised, loader: DataLoader) -> OfHost:
        """Descend on the host's objective, which chooses a prior precision too."""
        numbers, labels = loader.dataset[: min(model.n_selected, MOST_INDUCING)]
        la = VaLLA(
            model,
            "classification",
            numbers,
            inducing_classes=labels,
            backend=CurvlinopsGGN,
        )
        la.fit(loader, iterations=STEPS, lr=LEARNING_RATE)
        return la


class FunctionSpaceLaplace(LoRALaplace):
    """Predicts and chooses its prior as any posterior over LoRA weights does."""

    def __init__(self, model: nn.Module, likelihood: str, **settings: Any) -> None:
        # A task knows the structures that users may name, and asks for no other.
        self._key = "lora", "full"
        super().__init__(model, likelihood, **settings)

    def functional_variance(self, Js: Tensor) -> Tensor:
        """Compute covariances of outputs, by Jacobians (texts, rows, weights)."""
        return self.H.covariance(Js, self.prior_precision)

    @classmethod
    def of(cls, model: AdaptedModel) -> "FunctionSpaceLaplace":
        """Make it for a model of the lab."""
        tokens = model.class_token_ids
        return cls(model.model, "classification", class_token_ids=tokens)


class SubsetLaplace(FunctionSpaceLaplace):
    """By `SubsetStructure`."""

    _key = ("lora", "subset")
    _kind_of_structure = SubsetStructure


class ELLALaplace(FunctionSpaceLaplace):
    """By `ELLAStructure`."""

    _key = ("lora", "ella")
    _kind_of_structure = ELLAStructure


class VaLLALaplace(FunctionSpaceLaplace):
    """By `VaLLAStructure`."""

    _key = ("lora", "valla")
    _kind_of_structure = VaLLAStructure
