"""Statistics of the paper against dense Kronecker blocks and stock Kron."""

from collections.abc import Mapping
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import laplace_lora_ext
from tests.support.cases import Case, assert_dense, dense
from tests.support.dense import derivatives_of, full_rank, power
from tests.support.matrices import LINEAR, PARTS
from tests.support.models import lora_model, ragged_batches
from tests.support.posteriors import fitted, make, stock
from tests.support.tasks import OF_TARGETS

# Many entries of a Kronecker product are near 0, sums of larger ones that cancel.
assert_exact = partial(assert_close, rtol=1e-9, atol=1e-9)
# At this rank only the Kronecker form approximates.
EXPAND = full_rank(kfac_approx="expand")


def lora_layers(model: nn.Module) -> list[nn.Module]:
    """Find the layers that hold a LoRA weight."""
    modules = model.named_modules()
    return [m for name, m in modules if "lora_" in name and isinstance(m, nn.Linear)]


def inputs_and_gradients(
    case: Case, example: Mapping[str, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Return each LoRA layer's inputs `(T, n)` and gradients in its outputs.

    The gradients are those of one example's logits, `(C, T, m)`.
    """
    layers = lora_layers(case.model)
    read: dict[nn.Module, Tensor] = {}
    shifts: dict[nn.Module, Tensor] = {}

    # The derivative in a layer's output is that in a shift of it, at 0.
    def shifted(layer, args, output):
        (batch,) = args
        read[layer] = batch[0].detach()
        shifts[layer] = torch.zeros_like(output, requires_grad=True)
        return output + shifts[layer]

    handles = [layer.register_forward_hook(shifted) for layer in layers]
    logits = case.logits_of(case.model, example)
    for handle in handles:
        handle.remove()
    gradients = derivatives_of(logits, [shifts[layer] for layer in layers])
    return [
        (read[layer], of_layer[:, 0])
        for layer, of_layer in zip(layers, gradients, strict=True)
    ]


def expand_curvature(case: Case) -> Tensor:
    """Compute dense Kronecker blocks of `kfac_approx="expand"` as one matrix.

    Each is `(Σ g gᵀ) ⊗ (Σ a aᵀ) / T` over all T positions that are no padding, with
    inputs a and gradients g of each of the Fisher's columns.
    """
    n_blocks = len(lora_layers(case.model))
    F_out: list = [0.0] * n_blocks
    F_in: list = [0.0] * n_blocks
    n_positions = 0
    for example in case.examples():
        is_valid = example["attention_mask"][0].bool()
        n_positions += int(is_valid.sum())
        logits = case.logits_of(case.model, example).detach()
        # H = root rootᵀ, another factor (C, C) than the library's.
        root = power(case.target.fisher(logits[None])[0], 0.5)
        of_layers = inputs_and_gradients(case, example)
        for index, (inputs, gradients) in enumerate(of_layers):
            a = inputs[is_valid]
            g = torch.einsum("cs,ctm->stm", root, gradients[:, is_valid])
            F_out[index] += torch.einsum("stm,stk->mk", g, g)
            F_in[index] += a.T @ a
    blocks = map(torch.kron, F_out, F_in)
    return torch.block_diag(*blocks) / n_positions


@pytest.mark.parametrize(
    "build", [OF_TARGETS["numbers"].case, LINEAR["LoRA of a decoder, padded left"]]
)
def test_covariance_and_evidence_of_expand_equal_dense_formulas(build):
    case = build()
    case.model.eval()
    assert_dense(case.fitted(**EXPAND), dense(case), expand_curvature(case))


def test_padding_and_batches_change_nothing_and_two_runs_are_one():
    model = lora_model("gpt2")
    once = fitted("gpt2", model=model, **EXPAND)
    padded = ragged_batches(batch_size=4, padding_side="left", padded_to=20)
    twice = fitted("gpt2", padded[:1], model=model, **EXPAND)
    twice.fit(padded[1:], override=False)
    for _ in range(2):
        assert twice.n_data == once.n_data
        assert_exact(twice.H.to_matrix(), once.H.to_matrix())
        assert_exact(twice.log_marginal_likelihood(), once.log_marginal_likelihood())
        # Nothing of both is left.
        twice.fit(padded)


def test_expand_on_one_unpadded_batch_equals_stock_kron():
    model = lora_model("bert")
    # In one batch of texts of one length there is no padding that the host would count,
    # nor a mean over batches of other lengths.
    batches = ragged_batches(lengths=[6] * 5, batch_size=5, padded_to=6)
    ours = fitted(batches=batches, model=model, modules_to_save=True, **EXPAND)
    theirs = stock(model, "bert", batches, PARTS)
    found = ours.posterior_precision.to_matrix()
    assert_exact(found, theirs.posterior_precision.to_matrix())
    assert_exact(ours.log_marginal_likelihood(), theirs.log_marginal_likelihood())
    (batch,) = batches
    # The host's links that need no draws.
    for link_approx in ("probit", "bridge", "bridge_norm"):
        found = ours(batch, link_approx=link_approx)
        assert_exact(found, theirs(batch, link_approx=link_approx))


def test_paper_settings_are_those_of_the_paper():
    # Wider than the ten columns that the paper keeps.
    model = lora_model("bert", hidden_size=16)
    batches = ragged_batches()
    la = make(model, backend_kwargs=laplace_lora_ext.PAPER_SETTINGS)
    la.fit(batches)
    for block in la.H.blocks:
        assert block.large.shape == (10,)
        assert block.tail == 0
    # KFAC-expand counts positions, "gradient" the energy of gradients.
    n_positions = sum(batch["attention_mask"].sum() for batch in batches)
    for block in la.H_facs:
        assert block.normalizer == n_positions
