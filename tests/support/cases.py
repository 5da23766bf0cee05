"""What a posterior is asked, whatever its model, its weights and its task, and answers.

A case has a model, batches, and how to compute each example's logits by itself. From
these alone follow dense Jacobians, curvatures, evidences, predictions and losses.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    nll_loss,
)
from torch.testing import assert_close

from tests.support.dense import (
    alone,
    batch_logits,
    bernoulli_fisher,
    curvature_of,
    evidence,
    exact_ggn,
    full_rank,
    glm_covariance,
    kronecker_block,
    labels_of,
    logits_of,
    predicted,
    softmax_fisher,
)
from tests.support.models import part_of
from tests.support.posteriors import make, priors_of_blocks

# --- what targets are distributed by --------------------------------------------------

LINKS = ["probit", "mean_field"]
"""Those that are formulas of the logits' moments."""


class Softmax:
    """One class for each row of logits `(N, C)`."""

    noise = 1.0
    fisher = staticmethod(softmax_fisher)

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Sum the negative log-likelihood `()`."""
        return cross_entropy(logits, y, reduction="sum")

    def log_likelihood(self, loss: Tensor, n: int) -> Tensor:
        """Return that of n numbers, of their loss."""
        return -loss

    def predictive(self, f_mu: Tensor, f_var: Tensor, link: str) -> tuple[Tensor, ...]:
        """Predict what targets are distributed by, of moments as MacKay does.

        They are `(..., C)` and `(..., C, C)`.
        """
        variances = f_var.diagonal(dim1=-2, dim2=-1)
        if link == "probit":
            return ((f_mu / (1 + math.pi / 8 * variances).sqrt()).softmax(-1),)
        # Each difference of two logits is shrunk by its own variance.
        of_differences = variances[..., :, None] + variances[..., None, :] - 2 * f_var
        differences = f_mu[..., :, None] - f_mu[..., None, :]
        shrunk = differences / (1 + math.pi / 8 * of_differences).sqrt()
        p = 1 / shrunk.neg().exp().sum(-1)
        return (p / p.sum(-1, keepdim=True),)

    def mixed(self, members: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Predict by the mean of several distributions."""
        (p,) = zip(*members, strict=True)
        return (torch.stack(p).mean(0),)

    def nll(self, p: tuple[Tensor, ...], y: Tensor) -> Tensor:
        """Compute each target's negative log-likelihood `(N,)`."""
        return nll_loss(p[0].log(), y, reduction="none")


class Bernoullis(Softmax):
    """A label, 0 or 1, for each of the K logits of a row `(N, K)`."""

    fisher = staticmethod(bernoulli_fisher)

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(logits, y, reduction="sum")

    def predictive(self, f_mu: Tensor, f_var: Tensor, link: str) -> tuple[Tensor, ...]:
        variances = f_var.diagonal(dim1=-2, dim2=-1)
        # Of two classes every link is this one.
        p = (f_mu / (1 + math.pi / 8 * variances).sqrt()).sigmoid()
        return (torch.stack([1 - p, p], dim=-1),)

    def nll(self, p: tuple[Tensor, ...], y: Tensor) -> Tensor:
        of_labels = p[0].gather(-1, y.long()[..., None])
        return -of_labels.log().sum((1, 2))


class Gaussian(Softmax):
    """A number, with noise, for each output of a row `(N, C)`."""

    # Another than 1, which divides nothing.
    noise = 0.7

    def fisher(self, logits: Tensor) -> Tensor:
        return torch.eye(logits.shape[-1]).to(logits).expand(len(logits), -1, -1)

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return (logits - y).square().sum() / 2

    def log_likelihood(self, loss: Tensor, n: int) -> Tensor:
        of_noise = self.noise * math.sqrt(2 * math.pi)
        return -loss / self.noise**2 - n * math.log(of_noise)

    def predictive(self, f_mu: Tensor, f_var: Tensor, link: str) -> tuple[Tensor, ...]:
        return f_mu, f_var

    def mixed(self, members: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        means, covariances = map(torch.stack, zip(*members, strict=True))
        mean = means.mean(0)
        apart = means - mean
        # The law of total covariance.
        of_means = (apart[..., :, None] * apart[..., None, :]).mean(0)
        return mean, covariances.mean(0) + of_means

    def nll(self, p: tuple[Tensor, ...], y: Tensor) -> Tensor:
        mean, covariance = p
        of_noise = self.noise**2 * torch.eye(mean.shape[-1]).to(mean)
        return -MultivariateNormal(mean, covariance + of_noise).log_prob(y)


# --- cases ----------------------------------------------------------------------------


def rows_of(batch: Any) -> list[Any]:
    """Take each example of a batch by itself, as a batch of one."""
    if not isinstance(batch, dict):
        X, _ = batch
        return list(X.split(1))
    n_examples = len(next(iter(batch.values())))
    return [part_of(batch, slice(row, row + 1)) for row in range(n_examples)]


def unpadded_rows(batch: Any) -> list[Any]:
    """Take each text of a batch by itself, without its padding."""
    rows = rows_of(batch)
    for row in rows:
        is_real = row["attention_mask"][0].bool()
        for key, column in row.items():
            if column.ndim == 2:
                row[key] = column[:, is_real]
    return rows


@dataclass(frozen=True)
class Case:
    """A model, batches of its examples, and what tells which weights take part."""

    model: nn.Module
    batches: list[Any]
    # Keywords of the posterior.
    keywords: Mapping[str, Any] = field(default_factory=dict)
    # What targets are distributed by.
    target: Softmax = field(default_factory=Softmax)
    # Takes a batch apart, and computes logits `(C,)` or `(rows, C)` of one example.
    split: Callable[[Any], list[Any]] = rows_of
    logits_of: Callable[[nn.Module, Any], Tensor] = logits_of
    # How near the dense calculus comes: norms of some models run in float32.
    tolerance: float = 1e-9
    # The names of the weights that take part have one of these, and not that.
    names: Sequence[str] = ("lora_",)
    but: str = "lora_magnitude"

    def inputs(self, batch: Any) -> Any:
        """Take a batch as predictions are given it: a mapping may have labels."""
        return batch if isinstance(batch, dict) else batch[0]

    def all_inputs(self) -> list[Any]:
        """Take all batches so."""
        return [self.inputs(batch) for batch in self.batches]

    def examples(self) -> list[Any]:
        """Take each example by itself."""
        return [example for batch in self.batches for example in self.split(batch)]

    def labels(self) -> Tensor:
        """Join the targets, one for each row of logits."""
        labels = [labels_of([batch]) for batch in self.batches]
        if labels[0].is_floating_point():
            return torch.cat(labels)
        # Of tokens, those that are labelled.
        return torch.cat([of_batch[of_batch != -100] for of_batch in labels])

    def fitted(self, structure: str = "lowrank_kron", **keywords: Any) -> Any:
        """Fit a posterior with an exact Fisher, at full rank."""
        settings = full_rank(structure, stochastic=False) | dict(self.keywords)
        la = make(self.model, structure, **settings | keywords)
        la.fit(self.batches)
        return la

    def weights(self) -> dict[str, nn.Parameter]:
        """Find the weights that take part, in the order of the parameters."""
        return {
            name: weight
            for name, weight in self.model.named_parameters()
            if self.but not in name and any(part in f".{name}" for part in self.names)
        }

    def matrices(self, weight: nn.Parameter, tensor: Tensor) -> list[Tensor]:
        """Cut a weight's tensors `(..., *shape)` into matrices `(..., m, n)`.

        PEFT holds all experts' factors in one weight: of A one expert's rows after the
        other's, and of B the experts' columns in turn.
        """
        for layer in self.model.modules():
            # By its name, since older versions of PEFT have no such class.
            if type(layer).__name__ == "ParamWrapper":
                n_experts: Any = layer.num_experts
                if any(half.weight is weight for half in layer.lora_A.values()):
                    return list(tensor.chunk(n_experts, dim=-2))
                if any(half.weight is weight for half in layer.lora_B.values()):
                    return [tensor[..., each::n_experts] for each in range(n_experts)]
        shape = weight.shape
        # A vector of magnitudes is a column.
        m = shape.numel() if len(shape) == 1 else shape[0]
        # Dimensions of examples and logits come first, where it is a Jacobian.
        leading = tensor.shape[: tensor.ndim - len(shape)]
        return [tensor.reshape(*leading, m, shape.numel() // m)]

    def dense(self, logits: Tensor, jacobian: Tensor) -> "Dense":
        """Cut Jacobians `(N, C, parameters)` of the weights into their matrices."""
        weights = self.weights().values()
        n_numbers = [weight.numel() for weight in weights]
        Js: list[Tensor] = []
        values: list[Tensor] = []
        of_weights = jacobian.split(n_numbers, dim=-1)
        for weight, J in zip(weights, of_weights, strict=True):
            Js += self.matrices(weight, J.unflatten(-1, weight.shape).double())
            values += self.matrices(weight, weight.detach())
        return Dense(self, logits.double(), Js, values)


# --- dense calculus -------------------------------------------------------------------


@dataclass(frozen=True)
class Dense:
    """What dense calculus finds, each example treated by itself."""

    case: Case
    logits: Tensor  # (N, C)
    Js: list[Tensor]  # (N, C, m, n) of each matrix
    values: list[Tensor]  # (m, n) of each matrix

    @property
    def jacobian(self) -> Tensor:
        """All Jacobians, `(N, C, parameters)`."""
        return torch.cat([J.flatten(2) for J in self.Js], dim=-1)

    @property
    def mean(self) -> Tensor:
        """All values, `(parameters,)`."""
        return torch.cat([value.flatten() for value in self.values])

    @property
    def loss(self) -> Tensor:
        """The summed loss of all targets."""
        return self.case.target.loss(self.logits, self.case.labels())

    def curvature(self, structure: str) -> Tensor:
        """Compute a structure's, but for the host's Kron, as one matrix."""
        H = self.case.target.fisher(self.logits)
        if structure == "lowrank_kron":
            # At full rank, `kfac_approx="gradient"`.
            return torch.block_diag(*[kronecker_block(J, H) for J in self.Js])
        exact = exact_ggn(self.jacobian, H)
        return exact.diagonal().diag() if structure == "diag" else exact

    def posterior(self, H: Tensor, prior_precision: Tensor) -> "DensePosterior":
        """Give each block its prior precision, and numbers their noise."""
        n_weights = torch.tensor([value.numel() for value in self.values])
        of_blocks = prior_precision.double().expand(len(n_weights))
        prior = of_blocks.repeat_interleave(n_weights)
        return DensePosterior(self, H / self.case.target.noise**2, prior)


@dataclass(frozen=True)
class DensePosterior:
    """A posterior whose precision is one matrix."""

    fit: Dense
    H: Tensor  # (parameters, parameters), over the noise's variance
    prior: Tensor  # (parameters,)

    @property
    def f_var(self) -> Tensor:
        """Covariances of the logits, `(N, C, C)`."""
        return glm_covariance(self.fit.jacobian, self.H, self.prior)

    @property
    def evidence(self) -> Tensor:
        """The log marginal likelihood."""
        fit = self.fit
        log_likelihood = fit.case.target.log_likelihood(fit.loss, fit.logits.numel())
        return evidence(self.H, log_likelihood, fit.mean.double(), self.prior)

    def predictive(self, link: str) -> tuple[Tensor, ...]:
        """Predict what targets are distributed by."""
        return self.fit.case.target.predictive(self.fit.logits, self.f_var, link)

    def nll(self, link: str) -> Tensor:
        """Average the targets' negative log-likelihoods."""
        case = self.fit.case
        return case.target.nll(self.predictive(link), case.labels()).mean()


def dense(case: Case) -> Dense:
    """Differentiate each example's logits, alone."""
    model, training = case.model, []
    # Where it evaluates already, this would pack weights of four bits anew.
    if model.training:
        training = [module for module in model.modules() if module.training]
        model.eval()
    weights = [*case.weights().values()]
    found = alone(model, case.logits_of, case.examples(), weights)
    for module in training:
        module.training = True
    return case.dense(*found)


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare matrices, relative to the largest entry of all."""
    # Entries near 0 are sums of large ones that cancel.
    atol = tolerance * expected.abs().max().item()
    assert_close(found.double(), expected.double(), rtol=0, atol=atol)


def assert_dense(la: Any, fit: Dense, H: Tensor) -> None:
    """Compare a posterior's curvature, covariances and evidence with those of H.

    Each block has a prior precision of its own.
    """
    case = fit.case
    tolerance = case.tolerance
    assert la.n_data == sum(len(labels_of([batch])) for batch in case.batches)
    assert torch.equal(la.mean, fit.mean)
    assert_close(la.loss.double(), fit.loss, rtol=tolerance, atol=0)
    assert_near(curvature_of(la), H, tolerance)
    la.prior_precision = priors_of_blocks(la)
    expected = fit.posterior(H, la.prior_precision)
    f_mu, f_var = predicted(la, case.all_inputs())
    assert_near(f_mu, fit.logits, tolerance)
    assert_near(f_var, expected.f_var, tolerance)
    Js = fit.jacobian.to(la.mean)
    assert_near(la.functional_variance(Js), expected.f_var, tolerance)
    evidence = la.log_marginal_likelihood().double()
    assert_close(evidence, expected.evidence, rtol=tolerance, atol=0)


def assert_exact(la: Any, pairs: list[Any]) -> None:
    """Compare a posterior with Jacobians of whole batches, which know of no rows."""
    model = la.model.model
    of_posterior = {id(block.weight) for block in la.blocks}
    names = [
        f".{name}"
        for name, each in model.named_parameters()
        if id(each) in of_posterior
    ]

    case = Case(
        model, pairs, split=lambda pair: [pair[0]], logits_of=batch_logits, names=names
    )
    fit = dense(case)
    _, structure = la._key
    assert_dense(la, fit, fit.curvature(structure))
