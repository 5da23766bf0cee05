"""Curvature, Jacobians and posteriors by means that share no code with the library.

Everything is dense: exact Jacobians by `torch.func.jacrev`, inputs and per-position output
gradients by perturbing a layer's output, the Fisher at the logits from its formula, and matrices
of all weights that are inverted as they stand.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from laplace_lora_ext.curvature.factors import DenseFactor, Factor
from laplace_lora_ext.curvature.matrix import LowRankKron
from tests.support.models import CLASS_TOKEN_IDS

EXACT = {"rtol": 1e-9, "atol": 1e-12}
"""How close float64 comes."""

# --- models --------------------------------------------------------------------------------------


def unpadded(batch: Mapping[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    """One example without its padding."""
    real = batch["attention_mask"][row].bool()
    return {"input_ids": batch["input_ids"][row][real][None]}


def as_padded(batch: Mapping[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    """One example with its padding and mask."""
    return {key: batch[key][row : row + 1] for key in ("input_ids", "attention_mask")}


def logits_of(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """`(C,)` logits of one example, from the model's plain output."""
    return _logits(model(**inputs))[0]


def lora_layers(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)) and "lora_" in name
    ]


def lora_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Those of linear layers and convolutions, in the order of the parameters."""
    of_layers = {id(layer.weight) for _, layer in lora_layers(model)}
    return {
        name: weight.detach()
        for name, weight in model.named_parameters()
        if id(weight) in of_layers
    }


def jacobians(model: nn.Module, inputs: Any) -> torch.Tensor:
    """`(B, C, parameters)` derivatives of the logits in the LoRA weights.

    Of a mapping only one example, without padding on its right, is treated.
    """
    weights = lora_weights(model)
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else ((inputs,), {})

    def forward(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return _logits(torch.func.functional_call(model, weights, args, kwargs))

    derivatives = torch.func.jacrev(forward)(weights)
    return torch.cat([d.flatten(2) for d in derivatives.values()], dim=2)


def jacobian(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """`(C, parameters)` of one example."""
    return jacobians(model, inputs)[0]


def alone(
    model: nn.Module, logits_of: Callable[[nn.Module, Any], torch.Tensor], examples: Sequence[Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `(N, C)` and Jacobians `(N, C, parameters)`, without vmap, which kernels may lack."""
    weights = [p.requires_grad_() for name, p in model.named_parameters() if "lora_" in name]
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    logits = []
    Js = []
    for example in examples:
        of_example = logits_of(model, example)
        rows = [torch.autograd.grad(logit, weights, **options) for logit in of_example]
        logits.append(of_example.detach())
        Js.append(torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]))
    return torch.stack(logits), torch.stack(Js)


def inputs_and_gradients(
    model: nn.Module, inputs: Mapping[str, torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each LoRA layer, inputs `(T, n)` and derivatives of the logits `(C, T, m)`."""
    layers = [layer for _, layer in lora_layers(model)]
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def record(layer, args, output):
        seen[id(layer)] = (args[0].detach()[0], output.detach()[0])

    handles = [layer.register_forward_hook(record) for layer in layers]
    logits_of(model, inputs)
    for handle in handles:
        handle.remove()

    def forward(shifts):
        handles = [
            layer.register_forward_hook(lambda _, __, output, shift=shift: output + shift)
            for layer, shift in zip(layers, shifts, strict=True)
        ]
        logits = logits_of(model, inputs)
        for handle in handles:
            handle.remove()
        return logits

    shifts = [torch.zeros_like(seen[id(layer)][1]) for layer in layers]
    gradients = torch.autograd.functional.jacobian(lambda *s: forward(s), tuple(shifts))
    return [(seen[id(layer)][0], g) for layer, g in zip(layers, gradients, strict=True)]


def _logits(output: Any) -> torch.Tensor:
    logits = getattr(output, "logits", output)
    return logits if logits.ndim == 2 else logits[:, -1, CLASS_TOKEN_IDS]


# --- curvature -----------------------------------------------------------------------------------


def softmax_fisher(logits: torch.Tensor) -> torch.Tensor:
    """`diag(p) - p pᵀ` of `(..., C)` logits, in float64, with p (1 - p) free of cancellation."""
    n_classes = logits.shape[-1]
    log_p = logits.double().log_softmax(-1)
    p = log_p.exp()
    itself = torch.eye(n_classes).bool()
    log_others = log_p[..., None, :].expand(*log_p.shape, n_classes)
    log_others = log_others.masked_fill(itself, -torch.inf).logsumexp(-1)
    return torch.diag_embed(p * log_others.exp()) - torch.where(
        itself, 0, p[..., :, None] * p[..., None, :]
    )


def exact_ggn(Js: torch.Tensor, H: torch.Tensor) -> torch.Tensor:
    """`Σ_b J_bᵀ H_b J_b` of Jacobians `(B, C, parameters)` and Fishers at the logits."""
    return torch.einsum("bcp,bcd,bdq->pq", Js, H, Js)


def gradient_blocks(model: nn.Module, Js: torch.Tensor, H: torch.Tensor) -> list[torch.Tensor]:
    """Kronecker blocks of `kfac_approx="gradient"`, from Jacobians."""
    shapes = [weight.flatten(1).shape for weight in lora_weights(model).values()]
    blocks = []
    for shape, J in zip(shapes, Js.split([s.numel() for s in shapes], dim=-1), strict=True):
        J = J.contiguous().unflatten(-1, shape)
        weighted = torch.einsum("bcd,bdij->bcij", H, J)
        F_out = torch.einsum("bcij,bckj->ik", J, weighted)
        F_in = torch.einsum("bcij,bcik->jk", J, weighted)
        trace = F_out.trace()
        blocks.append(torch.kron(F_out, F_in) / (trace if trace > 0 else 1))
    return blocks


def gradient_curvature(model: nn.Module, Js: torch.Tensor, H: torch.Tensor) -> torch.Tensor:
    """`gradient_blocks` as one matrix."""
    return torch.block_diag(*gradient_blocks(model, Js, H))


def blocks(model, examples, kfac_approx: str) -> list[torch.Tensor]:
    """Dense Kronecker blocks; examples are `(inputs, valid)` pairs, `valid` a (T,) mask."""
    if kfac_approx == "gradient":
        Js = torch.stack([jacobian(model, inputs) for inputs, _ in examples])
        logits = torch.stack([logits_of(model, inputs).detach() for inputs, _ in examples])
        return gradient_blocks(model, Js, softmax_fisher(logits))
    sums: list[list] = [[0.0, 0.0, 0.0] for _ in lora_layers(model)]
    for inputs, valid in examples:
        H = softmax_fisher(logits_of(model, inputs).detach())
        values, vectors = torch.linalg.eigh(H)
        root = vectors * values.clamp_min(0).sqrt()  # (C, C), another factor than the library's
        for total, (a, g) in zip(sums, inputs_and_gradients(model, inputs), strict=True):
            a = a[valid]
            g = torch.einsum("cs,ctm->stm", root, g)[:, valid]
            total[0] = total[0] + torch.einsum("stm,stk->mk", g, g)
            total[1] = total[1] + a.T @ a
            total[2] = total[2] + len(a)
    return [torch.kron(F_out, F_in) / normalizer for F_out, F_in, normalizer in sums]


def factor_matrix(factor: Factor) -> torch.Tensor:
    """A factor from its columns and trace, by none of the operations that it offers."""
    if isinstance(factor, DenseFactor):
        return factor.matrix
    values, vectors = torch.linalg.eigh(factor.columns @ factor.columns.T)
    kept = min(factor.rank, factor.columns.shape[1], factor.size)
    values = values[factor.size - kept :]
    vectors = vectors[:, factor.size - kept :]
    matrix = vectors @ values.diag() @ vectors.T
    if factor.tail and kept < factor.size:
        rest = torch.eye(factor.size).double() - vectors @ vectors.T
        matrix = matrix + (factor.trace - values.sum()) / (factor.size - kept) * rest
    return matrix


def matrix_of(kron: LowRankKron) -> torch.Tensor:
    """A sum form as one matrix."""
    return torch.block_diag(
        *(
            torch.kron(factor_matrix(b.output_factor), factor_matrix(b.input_factor)) / b.normalizer
            for b in kron.blocks
        )
    )


def power(matrix: torch.Tensor, exponent: float) -> torch.Tensor:
    """Of a symmetric positive semi-definite matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ values.clamp_min(0).pow(exponent).diag() @ vectors.T


def block_diagonal_covariance(blocks: Sequence[torch.Tensor], Js: torch.Tensor) -> torch.Tensor:
    """`(N, C, C)` of logits with Jacobians `(N, C, parameters)`, at a prior precision of 1."""
    parts = Js.split([len(block) for block in blocks], dim=-1)
    return sum(
        J @ torch.linalg.solve(block + torch.eye(len(block)).to(block), J.mT)
        for block, J in zip(blocks, parts, strict=True)
    )


# --- posteriors ----------------------------------------------------------------------------------


def evidence(H, log_likelihood, mean, prior_precision) -> torch.Tensor:
    """Log marginal likelihood of a dense curvature and prior precisions `(parameters,)`."""
    P = H + prior_precision.diag()
    log_det_ratio = torch.linalg.slogdet(P).logabsdet - prior_precision.log().sum()
    return log_likelihood - 0.5 * (log_det_ratio + (prior_precision * mean**2).sum())


def assert_exact(la: Any, model: nn.Module, inputs: Sequence[Any]) -> None:
    """A posterior's curvature, means and covariances of what it was fitted to, at a precision of 1.

    Of any structure but the host's Kron, perhaps over some of the model's LoRA weights alone.
    """
    taking_part = {id(block.weight) for block in la.blocks}
    named = dict(model.named_parameters())
    keep = torch.cat(
        [
            torch.full((weight.numel(),), id(named[name]) in taking_part)
            for name, weight in lora_weights(model).items()
        ]
    )
    Js = torch.cat([jacobians(model, X) for X in inputs])
    f_mu = torch.cat([model(X) for X in inputs]).detach()
    found = la.H
    fisher = softmax_fisher(f_mu)
    H = exact_ggn(Js, fisher)[keep][:, keep]
    if hasattr(found, "to_matrix"):
        found = found.to_matrix()
        H = gradient_curvature(model, Js, fisher)[keep][:, keep]
    elif found.ndim == 1:
        found = found.diag()
        H = H.diagonal().diag()
    covariance = Js[..., keep] @ torch.linalg.inv(H + torch.eye(len(H)).to(H)) @ Js[..., keep].mT
    moments = [la.predictive_moments(X) for X in inputs]
    means, covariances = (torch.cat(parts) for parts in zip(*moments, strict=True))
    for one, expected in ((found, H), (means, f_mu), (covariances, covariance)):
        torch.testing.assert_close(one, expected, **EXACT)
