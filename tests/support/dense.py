"""Curvature, Jacobians and posteriors by means that share no code with the library.

Everything is dense: exact Jacobians by `torch.func.jacrev`, the Fisher at the logits
from its formula, and matrices of all weights that are inverted as they stand.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.testing import assert_close

from tests.support.models import CLASS_TOKEN_IDS

EXACT = {"rtol": 1e-9, "atol": 1e-12}
"""How close float64 comes."""

# --- models ---------------------------------------------------------------------------


def unpadded(
    batch: Mapping[str, torch.Tensor],
    row: int,
) -> dict[str, torch.Tensor]:
    """Take one example without its padding."""
    is_real = batch["attention_mask"][row].bool()
    tokens = batch["input_ids"][row][is_real]
    return {"input_ids": tokens[None]}


def as_padded(
    batch: Mapping[str, torch.Tensor],
    row: int,
) -> dict[str, torch.Tensor]:
    """Take one example with its padding and mask."""
    return {key: batch[key][row : row + 1] for key in ("input_ids", "attention_mask")}


def logits_of(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """Read `(C,)` logits of one example off the model's plain output."""
    return _logits(model(**inputs))[0]


def lora_layers(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Find the layers that hold a LoRA weight, with their names."""
    with_a_weight = (nn.Linear, nn.Conv1d, nn.Conv2d)
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, with_a_weight) and "lora_" in name
    ]


def lora_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Find LoRA weights of layers and convolutions, in parameters' order."""
    of_layers = {id(layer.weight) for _, layer in lora_layers(model)}
    return {
        name: weight.detach()
        for name, weight in model.named_parameters()
        if id(weight) in of_layers
    }


def matrix_places(model: nn.Module) -> list[torch.Tensor]:
    """Number LoRA weights in order, and cut them into matrices `(m, n)`.

    PEFT holds all experts' factors in one weight: of A one expert's rows after the
    other's, and of B the experts' columns in turn.
    """
    n_experts: dict[int, int] = {}
    for layer in model.modules():
        if type(layer).__name__ == "ParamWrapper":
            for half in (*layer.lora_A.values(), *layer.lora_B.values()):
                n_experts[id(half.weight)] = layer.num_experts
    parameters = dict(model.named_parameters())
    matrices: list[torch.Tensor] = []
    start = 0
    for name, weight in lora_weights(model).items():
        places = torch.arange(start, start + weight.numel()).reshape(len(weight), -1)
        start += weight.numel()
        n = n_experts.get(id(parameters[name]), 1)
        if "lora_A" in name:
            matrices += places.chunk(n)
        else:
            matrices += [places[:, expert::n] for expert in range(n)]
    return matrices


def jacobians(
    model: nn.Module,
    inputs: Any,
) -> torch.Tensor:
    """Differentiate the logits in the LoRA weights, `(B, C, parameters)`.

    Of a mapping only one example, without padding on its right, is treated.
    """
    weights = lora_weights(model)

    def forward(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        if isinstance(inputs, Mapping):
            output = torch.func.functional_call(model, weights, (), dict(inputs))
        else:
            output = torch.func.functional_call(model, weights, (inputs,))
        return _logits(output)

    derivatives = torch.func.jacrev(forward)(weights)
    return torch.cat(
        [d.flatten(2) for d in derivatives.values()],
        dim=2,
    )


def jacobian(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """Differentiate the logits of one example, `(C, parameters)`."""
    return jacobians(model, inputs)[0]


def alone(
    model: nn.Module,
    logits_of: Callable[[nn.Module, Any], torch.Tensor],
    examples: Sequence[Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute logits and Jacobians `(N, C, parameters)`, example by example.

    It does so without vmap, which kernels may lack.
    """
    weights = [
        p.requires_grad_() for name, p in model.named_parameters() if "lora_" in name
    ]

    def row_of(logit: torch.Tensor) -> torch.Tensor:
        gradients = torch.autograd.grad(
            logit,
            weights,
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        return torch.cat([gradient.flatten() for gradient in gradients])

    logits = []
    Js = []
    for example in examples:
        of_example = logits_of(model, example)
        Js.append(torch.stack([row_of(logit) for logit in of_example]))
        logits.append(of_example.detach())
    return torch.stack(logits), torch.stack(Js)


def _logits(output: Any) -> torch.Tensor:
    logits = getattr(output, "logits", output)
    if logits.ndim == 2:
        return logits
    # A language model answers after the last token.
    return logits[:, -1, CLASS_TOKEN_IDS]


# --- curvature ------------------------------------------------------------------------


def softmax_fisher(logits: torch.Tensor) -> torch.Tensor:
    """Compute `diag(p) - p pᵀ` of `(..., C)` logits in float64."""
    n_classes = logits.shape[-1]
    log_p = logits.double().log_softmax(-1)
    p = log_p.exp()
    itself = torch.eye(n_classes).bool()
    # 1 - p cancels where p is near 1: the sum of the other classes' probabilities does
    # not.
    log_others = log_p[..., None, :].expand(*log_p.shape, n_classes)
    log_others = log_others.masked_fill(itself, -torch.inf).logsumexp(-1)
    variances = p * log_others.exp()
    products = p[..., :, None] * p[..., None, :]
    return torch.diag_embed(variances) - products.masked_fill(itself, 0)


def exact_ggn(
    Js: torch.Tensor,
    H: torch.Tensor,
) -> torch.Tensor:
    """Sum `J_bᵀ H_b J_b` over Jacobians and Fishers at the logits."""
    return torch.einsum("bcp,bcd,bdq->pq", Js, H, Js)


def kronecker_block(
    J: torch.Tensor,
    H: torch.Tensor,
) -> torch.Tensor:
    """Compute a block of `kfac_approx="gradient"` from a matrix's `(N, C, m, n)`."""
    weighted = torch.einsum("bcd,bdij->bcij", H, J)
    # Both factors sum over examples and over pairs of logits, weighted by the Fisher.
    F_out = torch.einsum("bcij,bckj->ik", J, weighted)
    F_in = torch.einsum("bcij,bcik->jk", J, weighted)
    block = torch.kron(F_out, F_in)
    trace = F_out.trace()
    # A layer that the logits don't depend on has a block of zeros.
    return block / trace if trace > 0 else block


def gradient_blocks(
    model: nn.Module,
    Js: torch.Tensor,
    H: torch.Tensor,
) -> list[torch.Tensor]:
    """Compute Kronecker blocks of `kfac_approx="gradient"` from Jacobians."""
    return [kronecker_block(Js[..., places], H) for places in matrix_places(model)]


def gradient_curvature(
    model: nn.Module,
    Js: torch.Tensor,
    H: torch.Tensor,
) -> torch.Tensor:
    """Compute `gradient_blocks` as one matrix."""
    return torch.block_diag(*gradient_blocks(model, Js, H))


def power(
    matrix: torch.Tensor,
    exponent: float,
) -> torch.Tensor:
    """Raise a symmetric positive semi-definite matrix to a power."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ values.clamp_min(0).pow(exponent).diag() @ vectors.T


def block_diagonal_covariance(
    blocks: Sequence[torch.Tensor],
    Js: torch.Tensor,
) -> torch.Tensor:
    """Compute covariances `(N, C, C)` from Jacobians, at prior precision 1."""
    parts = Js.split(
        [len(block) for block in blocks],
        dim=-1,
    )
    covariance = torch.zeros(())
    for block, J in zip(blocks, parts, strict=True):
        precision = block + torch.eye(len(block)).to(block)
        covariance = covariance + J @ torch.linalg.solve(precision, J.mT)
    return covariance


# --- posteriors -----------------------------------------------------------------------


def evidence(H, log_likelihood, mean, prior_precision) -> torch.Tensor:
    """Compute the log marginal likelihood at prior precisions `(parameters,)`."""
    P = H + prior_precision.diag()
    log_det_ratio = torch.linalg.slogdet(P).logabsdet - prior_precision.log().sum()
    scatter = (prior_precision * mean**2).sum()
    return log_likelihood - 0.5 * (log_det_ratio + scatter)


def assert_exact(
    la: Any,
    model: nn.Module,
    inputs: Sequence[Any],
    fisher_of: Callable[[torch.Tensor], torch.Tensor] = softmax_fisher,
) -> None:
    """Compare curvature, means and covariances, at prior precision 1.

    The inputs are those that it was fitted to. Its structure is any but the host's
    Kron, and it may be over some of the model's LoRA weights alone. `fisher_of` logits
    is the likelihood's.
    """
    takes_part = _takes_part(la, model)
    Js = torch.cat([jacobians(model, X) for X in inputs])
    f_mu = torch.cat([model(X) for X in inputs]).detach()
    fisher = fisher_of(f_mu)
    if hasattr(la.H, "to_matrix"):
        found = la.H.to_matrix()
        of_all = gradient_curvature(model, Js, fisher)
    elif la.H.ndim == 1:
        found = la.H.diag()
        of_all = exact_ggn(Js, fisher).diagonal().diag()
    else:
        found = la.H
        of_all = exact_ggn(Js, fisher)
    H = of_all[takes_part][:, takes_part]
    J = Js[..., takes_part]
    precision = H + torch.eye(len(H)).to(H)
    covariance = J @ torch.linalg.inv(precision) @ J.mT

    moments = [la.predictive_moments(X) for X in inputs]
    means = torch.cat([of_batch.f_mu for of_batch in moments])
    covariances = torch.cat([of_batch.f_var for of_batch in moments])
    assert_close(found, H, **EXACT)
    assert_close(means, f_mu, **EXACT)
    assert_close(covariances, covariance, **EXACT)


def _takes_part(
    la: Any,
    model: nn.Module,
) -> torch.Tensor:
    """Tell of each LoRA number whether the posterior is over it."""
    of_posterior = {id(block.weight) for block in la.blocks}
    parameters = dict(model.named_parameters())
    parts = [
        torch.full((weight.numel(),), id(parameters[name]) in of_posterior)
        for name, weight in lora_weights(model).items()
    ]
    return torch.cat(parts)
