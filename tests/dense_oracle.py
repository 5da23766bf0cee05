"""Curvature and Jacobians by means that share no code with the library.

Everything is computed one example at a time: exact Jacobians by `torch.func.jacrev`, inputs and
per-position output gradients by perturbing a layer's output, and the Fisher at the logits from
its formula.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from tests.tiny_models import CLASS_TOKEN_IDS


def unpadded(batch: Mapping[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    """One example without its padding."""
    real = batch["attention_mask"][row].bool()
    return {"input_ids": batch["input_ids"][row][real][None]}


def as_padded(batch: Mapping[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    """One example with its padding and mask."""
    return {key: batch[key][row : row + 1] for key in ("input_ids", "attention_mask")}


def logits_of(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """`(C,)` logits of one example, from the model's plain output."""
    logits = model(**inputs).logits[0]
    return logits if logits.ndim == 1 else logits[-1, CLASS_TOKEN_IDS]


def lora_layers(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and (".lora_A." in name or ".lora_B." in name)
    ]


def jacobian(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """`(C, parameters)` derivatives of the logits in the LoRA weights."""
    weights = {f"{name}.weight": layer.weight.detach() for name, layer in lora_layers(model)}

    def forward(weights):
        output = torch.func.functional_call(model, weights, (), dict(inputs)).logits[0]
        return output if output.ndim == 1 else output[-1, CLASS_TOKEN_IDS]

    derivatives = torch.func.jacrev(forward)(weights)
    return torch.cat([d.flatten(1) for d in derivatives.values()], dim=1)


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


def softmax_fisher(logits: torch.Tensor) -> torch.Tensor:
    p = logits.softmax(-1)
    return p.diag() - torch.outer(p, p)


def blocks(model, examples, kfac_approx: str) -> list[torch.Tensor]:
    """Dense Kronecker blocks; examples are `(inputs, valid)` pairs, `valid` a (T,) mask."""
    sums: list[list] = [[0.0, 0.0, 0.0] for _ in lora_layers(model)]
    for inputs, valid in examples:
        H = softmax_fisher(logits_of(model, inputs).detach())
        values, vectors = torch.linalg.eigh(H)
        root = vectors * values.clamp_min(0).sqrt()  # (C, C), another factor than the library's
        for total, (a, g) in zip(sums, inputs_and_gradients(model, inputs), strict=True):
            g = torch.einsum("cs,ctm->stm", root, g)
            if kfac_approx == "gradient":
                G = torch.einsum("stm,tn->smn", g, a)
                total[0] = total[0] + torch.einsum("smn,skn->mk", G, G)
                total[1] = total[1] + torch.einsum("smn,smk->nk", G, G)
                total[2] = total[2] + G.square().sum()
                continue
            a, g = a[valid], g[:, valid]
            if kfac_approx == "reduce":
                a, g = a.mean(0, keepdim=True), g.sum(1, keepdim=True)
            total[0] = total[0] + torch.einsum("stm,stk->mk", g, g)
            total[1] = total[1] + a.T @ a
            total[2] = total[2] + len(a)
    return [torch.kron(F_out, F_in) / normalizer for F_out, F_in, normalizer in sums]


def evidence(H, log_likelihood, mean, prior_precision) -> torch.Tensor:
    """Log marginal likelihood of a dense curvature and prior precisions `(parameters,)`."""
    P = H + prior_precision.diag()
    log_det_ratio = torch.linalg.slogdet(P).logabsdet - prior_precision.log().sum()
    return log_likelihood - 0.5 * (log_det_ratio + (prior_precision * mean**2).sum())
