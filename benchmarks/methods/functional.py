"""The host's function-space posteriors around LoRA weights.

They are Gaussian processes of logits, with a kernel J Jᵀ / λ of the Jacobians J of
texts. The host makes J anew for every pair of batches, and can't always read mappings.
So J is made once, as for all other posteriors here, and the host gets a linear model of
numbered texts. It sees nothing of J but inner products: coordinates in an orthonormal
basis of the training texts' Jacobians have the same, and are fewer.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from laplace.baselaplace import ELLA, FunctionalLaplace, VaLLA
from laplace.curvature.curvlinops import CurvlinopsGGN
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.models import AdaptedModel
from laplace_lora_ext import LoRALaplace
from laplace_lora_ext.curvature.accumulation import Structure

MOST_BYTES = 4e9  # of all training texts' Jacobians
MOST_ROWS = 1000  # logits of the subset: the host solves such a system for each text
BATCH_SIZE = 16
KEPT = 0.75  # of ELLA's directions: texts may be alike
MOST_INDUCING = 100  # texts of VaLLA
STEPS = 500  # of VaLLA, which has no closed form
LEARNING_RATE = 0.05

OfHost = FunctionalLaplace | ELLA | VaLLA


@dataclass(frozen=True)
class Texts:
    """Jacobians (texts, classes, weights), logits and labels of training batches."""

    jacobians: tuple[Tensor, ...] = ()
    logits: tuple[Tensor, ...] = ()
    labels: tuple[Tensor, ...] = ()

    def __add__(self, other: "Texts") -> "Texts":
        together = Texts(
            self.jacobians + other.jacobians,
            self.logits + other.logits,
            self.labels + other.labels,
        )
        n_bytes = sum(each.nbytes for each in together.jacobians)
        if n_bytes > MOST_BYTES:
            n_texts = sum(len(each) for each in together.labels)
            raise MemoryError(
                f"The Jacobians of {n_texts} texts alone take {n_bytes / 1e9:.1f} GB."
            )
        return together


class Linearised(nn.Module):
    """A linear model in a shift of the weights, of texts by their numbers."""

    def __init__(self, rows: Tensor, logits: Tensor) -> None:
        super().__init__()
        self.shift = nn.Parameter(rows.new_zeros(rows.shape[-1]))
        self.rows, self.logits = rows, logits  # Jacobians (texts, classes, coordinates)

    def forward(self, numbers: Tensor) -> Tensor:
        """Compute logits (batch, classes)."""
        return self.logits[numbers] + self.rows[numbers] @ self.shift


class Basis:
    """An orthonormal basis of training texts' Jacobians, and of what a text adds."""

    def __init__(self, jacobians: Tensor) -> None:
        n_texts, self.n_outputs, _ = jacobians.shape
        self.jacobians = jacobians.flatten(0, 1)
        gram = (self.jacobians @ self.jacobians.T).double()
        values, vectors = torch.linalg.eigh(gram)
        # What float32 can't tell from nothing has no direction.
        is_known = values > 1e-6 * values[-1]
        self.coordinates = vectors[:, is_known] / values[is_known].sqrt()
        own = vectors[:, is_known] * values[is_known].sqrt()
        self.training = pad(own, (0, self.n_outputs)).unflatten(0, (n_texts, -1))

    def rows(self, Js: Tensor) -> Tensor:
        """Compute coordinates of Jacobians (texts, rows, weights), of at most C rows.

        The last C coordinates are of what lies outside of the training texts'.
        """
        seen = (Js @ self.jacobians.T).double() @ self.coordinates
        outside = (Js @ Js.mT).double() - seen @ seen.mT
        values, vectors = torch.linalg.eigh(outside)
        root = vectors * values.clamp_min(0).sqrt()[:, None]
        missing = self.n_outputs - root.shape[-1]
        return torch.cat([seen, pad(root, (0, missing))], dim=-1)


class InFunctionSpace:
    """A host's posterior, fitted to the coordinates of training texts."""

    def __init__(self, host: OfHost, basis: Basis) -> None:
        self.host, self.basis = host, basis
        self._seen: tuple[Tensor, Tensor] | None = None

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


class FunctionSpaceStructure(Structure):
    """Keeps the Jacobians of all training texts, and lets the host fit them."""

    def posterior(self, model: Linearised, loader: DataLoader) -> OfHost:
        """Fit a posterior of the host to numbers and labels of texts."""
        raise NotImplementedError

    def zeros(self) -> Texts:
        return Texts()

    def _add(self, sums: Texts, x: Any, y: Tensor) -> tuple[Tensor, Texts]:
        Js, logits = self.recorder.jacobians(x)
        labels = self.task.check_targets(y, logits)
        return self.task.loss(logits, labels), sums + Texts((Js,), (logits,), (labels,))

    def decompose(self, sums: Texts, n_data: int) -> InFunctionSpace:
        basis = Basis(torch.cat(sums.jacobians))
        model = Linearised(basis.training, torch.cat(sums.logits).double())
        texts = TensorDataset(torch.arange(n_data), torch.cat(sums.labels))
        host = self.posterior(model, DataLoader(texts, BATCH_SIZE, shuffle=True))
        return InFunctionSpace(host, basis)


class UprightSubset(FunctionalLaplace):
    """The host's subset of data, whose kernels of two texts it has transposed."""

    def _kernel_batch_star(self, jacobians: Tensor, batch: Tensor) -> Tensor:
        return super()._kernel_batch_star(jacobians, batch).transpose(-1, -2)


class SubsetStructure(FunctionSpaceStructure):
    """A Gaussian process of some texts (Immer et al. 2021)."""

    def posterior(self, model: Linearised, loader: DataLoader) -> OfHost:
        """Fit as many texts as the host can solve for."""
        n_texts, n_classes, _ = model.rows.shape
        la = UprightSubset(
            model,
            "classification",
            n_subset=min(n_texts, max(1, MOST_ROWS // n_classes)),
            backend=CurvlinopsGGN,
        )
        la.fit(loader)
        return la


class ELLAStructure(FunctionSpaceStructure):
    """Features by one logit of each text (Deng et al. 2022)."""

    def posterior(self, model: Linearised, loader: DataLoader) -> OfHost:
        """Keep the largest directions of all texts."""
        n_texts = len(model.rows)
        la = ELLA(
            model,
            "classification",
            subsample_size=n_texts,
            n_eigenvalues=max(1, round(KEPT * n_texts)),
            backend=CurvlinopsGGN,
        )
        la.fit(loader)
        return la


class VaLLAStructure(FunctionSpaceStructure):
    """A variational posterior by labels' logits of texts (Ortega et al. 2024)."""

    def posterior(self, model: Linearised, loader: DataLoader) -> OfHost:
        """Descend on the host's objective, which chooses a prior precision too."""
        la = VaLLA(
            model,
            "classification",
            "random",
            num_inducing=min(len(model.rows), MOST_INDUCING),
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
