"""Curvature, Jacobians and posteriors by means that share no code with the library.

Everything is dense: exact Jacobians by `torch.func.jacrev`, the Fisher at the logits
from its formula, and matrices of all weights that are inverted as they stand.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.models import CLASS_TOKEN_IDS, without_labels

EXACT = {"rtol": 1e-9, "atol": 1e-12}
"""How close float64 comes."""

# --- batches and models ---------------------------------------------------------------


def labels_of(batches: Sequence[Any]) -> Tensor:
    """Join the labels of batches, mappings or `(X, y)`."""
    return torch.cat(
        [
            batch["labels"] if isinstance(batch, Mapping) else batch[1]
            for batch in batches
        ]
    )


def batch_logits(model: nn.Module, inputs: Any) -> Tensor:
    """Read `(B, C)` logits off the model's plain output."""
    if isinstance(inputs, Mapping):
        output = model(**without_labels(inputs))
    else:
        output = model(inputs)
    logits = getattr(output, "logits", output)
    if logits.ndim == 2:
        return logits
    # A language model answers after the last token.
    if "attention_mask" not in inputs:
        return logits[:, -1, CLASS_TOKEN_IDS]
    # With padding on the left too, that is the one furthest to the right.
    mask = inputs["attention_mask"]
    last = (mask * torch.arange(mask.shape[1])).argmax(-1)
    return logits[torch.arange(len(mask)), last][:, CLASS_TOKEN_IDS]


def logits_of(model: nn.Module, inputs: Any) -> Tensor:
    """Read `(C,)` logits of one example off the model's plain output."""
    return batch_logits(model, inputs)[0]


def jacobians(model: nn.Module, inputs: Any) -> Tensor:
    """Differentiate the logits in all LoRA weights, `(B, C, parameters)`."""
    weights = [weight for name, weight in model.named_parameters() if "lora_" in name]
    _, J = alone(model, batch_logits, [inputs], weights)
    return J


def alone(
    model: nn.Module,
    logits_of: Callable[[nn.Module, Any], Tensor],
    examples: Sequence[Any],
    weights: Sequence[nn.Parameter],
) -> tuple[Tensor, Tensor]:
    """Compute logits `(N, C)` and Jacobians `(N, C, parameters)`, by each example.

    An example has logits `(C,)`, or several rows of them. The Jacobians are made by
    plain autograd: kernels may lack vmap.
    """
    flags = [weight.requires_grad for weight in weights]
    for weight in weights:
        weight.requires_grad_()
    logits: list[Tensor] = []
    Js: list[Tensor] = []
    for example in examples:
        rows = torch.atleast_2d(logits_of(model, example))
        if not len(rows):  # a text without a labelled token
            continue
        if not rows.requires_grad:  # no layer has made them
            rows = rows + 0 * weights[0].sum()
        for logit in rows.flatten():
            of_weights = torch.autograd.grad(
                logit,
                weights,
                retain_graph=True,
                # A text may call for none of an adapter: its gradients are then zeros.
                allow_unused=True,
                materialize_grads=True,
            )
            Js.append(torch.cat([gradient.flatten() for gradient in of_weights]))
        logits.append(rows.detach())
    for weight, requires_grad in zip(weights, flags, strict=True):
        weight.requires_grad_(requires_grad)
    f = torch.cat(logits)
    return f, torch.stack(Js).unflatten(0, f.shape)


# --- curvature ------------------------------------------------------------------------


def softmax_fisher(logits: Tensor) -> Tensor:
    """Compute `diag(p) - p pᵀ` of `(..., C)` logits in float64."""
    p = logits.double().softmax(-1)
    products = p[..., :, None] * p[..., None, :]
    of_others = products.masked_fill(torch.eye(p.shape[-1]).bool(), 0)
    # 1 - p cancels where p is near 1: the sum of the others' probabilities does not.
    return torch.diag_embed(of_others.sum(-1)) - of_others


def bernoulli_fisher(logits: Tensor) -> Tensor:
    """Compute `diag(p (1 - p))` of `(..., K)` logits in float64."""
    f = logits.double()
    # 1 - p cancels where p is near 1: the sigmoid of -f does not.
    return torch.diag_embed(f.sigmoid() * torch.sigmoid(-f))


def exact_ggn(Js: Tensor, H: Tensor) -> Tensor:
    """Sum `J_bᵀ H_b J_b` over Jacobians and Fishers at the logits."""
    return torch.einsum("bcp,bcd,bdq->pq", Js, H, Js)


def kronecker_block(J: Tensor, H: Tensor) -> Tensor:
    """Compute a block of `kfac_approx="gradient"` from a matrix's `(N, C, m, n)`."""
    weighted = torch.einsum("bcd,bdij->bcij", H, J)
    # Both factors sum over examples and over pairs of logits, weighted by the Fisher.
    F_out = torch.einsum("bcij,bckj->ik", J, weighted)
    F_in = torch.einsum("bcij,bcik->jk", J, weighted)
    block = torch.kron(F_out, F_in)
    trace = F_out.trace()
    # A layer that the logits don't depend on has a block of zeros.
    return block / trace if trace > 0 else block


def power(matrix: Tensor, exponent: float) -> Tensor:
    """Raise a symmetric positive semi-definite matrix to a power."""
    values, vectors = torch.linalg.eigh(matrix)
    # An eigenvalue of 0 comes out as a rounding error of either sign.
    return vectors @ values.clamp_min(0).pow(exponent).diag() @ vectors.T


# --- posteriors -----------------------------------------------------------------------


def full_rank(structure: str = "lowrank_kron", **settings: Any) -> dict[str, Any]:
    """Ask for factors that leave nothing out, where a structure has a rank at all."""
    if structure != "lowrank_kron":
        return {}
    # More columns than any factor of the small models has.
    settings = {"rank": 1000} | settings
    return {"backend_kwargs": settings}


def curvature_of(la: Any) -> Tensor:
    """Make one matrix of a fitted curvature, whatever its structure."""
    if hasattr(la.H, "to_matrix"):
        return la.H.to_matrix()
    if la.H.ndim == 1:
        return la.H.diag()
    return la.H


def evidence(
    H: Tensor, log_likelihood: Tensor, mean: Tensor, prior_precision: Tensor
) -> Tensor:
    """Compute the log marginal likelihood at prior precisions `(parameters,)`.

    That is `log p(D | mean) - ½ (log det P - log det P₀ + meanᵀ P₀ mean)`, with the
    prior's precision P₀ and the posterior's P.
    """
    P = H + prior_precision.diag()
    log_det_of_prior = prior_precision.log().sum()
    log_det_ratio = torch.linalg.slogdet(P).logabsdet - log_det_of_prior
    scatter = mean @ (prior_precision * mean)
    return log_likelihood - 0.5 * (log_det_ratio + scatter)


def glm_covariance(Js: Tensor, H: Tensor, prior_precision: Tensor) -> Tensor:
    """Compute covariances of logits `(N, C, C)` at prior precisions `(parameters,)`."""
    posterior_precision = H + prior_precision.diag()
    spread = torch.linalg.solve(posterior_precision, Js.mT)
    return Js @ spread


def predicted(la: Any, batches: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Predict means `(N, C)` and covariances `(N, C, C)` of all batches' logits."""
    moments = [la.predictive_moments(batch) for batch in batches]
    f_var = torch.cat([each.f_var for each in moments])
    return torch.cat([each.f_mu for each in moments]), f_var
