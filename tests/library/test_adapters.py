"""Kinds of adapters beside plain LoRA: curvature and covariances against dense Jacobians."""

from __future__ import annotations

import pytest
import torch
from laplace.curvature.curvlinops import CurvlinopsGGN
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from torch import nn

import laplace_lora_ext
from tests.support.dense import (
    exact_ggn,
    gradient_blocks,
    gradient_curvature,
    jacobians,
    lora_layers,
    softmax_fisher,
)
from tests.support.models import (
    TwoLinear,
    base_model,
    lora_model,
    pairs,
    plain_model,
    ragged_batches,
    with_lora,
)
from tests.support.posteriors import STRUCTURES, fitted, make


def assert_covariances_are_dense(la, batches, Js: torch.Tensor, H: torch.Tensor) -> None:
    """Under a prior precision of 1, from Jacobians and a curvature of all weights."""
    covariance = Js @ torch.linalg.inv(H + torch.eye(len(H)).double()) @ Js.mT
    f_var = torch.cat([la.predictive_moments(X).f_var for X, _ in batches])
    torch.testing.assert_close(f_var, covariance, rtol=1e-9, atol=1e-12)


def with_dora() -> nn.Module:
    """Its magnitudes are not the norms that they begin with."""
    model = with_lora(TwoLinear(), "first", "second", use_dora=True)
    for name, parameter in model.named_parameters():
        if "magnitude" in name:
            parameter.data.mul_(torch.linspace(0.5, 2, len(parameter)).double())
    return model


@pytest.mark.parametrize("n", [5, 4])
def test_dora_has_the_jacobians_that_autograd_has(n):
    """With five examples, the identity that `lora_A` is called with has as many rows."""
    model, batches = with_dora(), pairs(2, n)
    la = make(model, backend_kwargs={"rank": 100})
    la.fit(batches)
    Js = torch.cat([jacobians(model, X) for X, _ in batches])
    f_mu = torch.cat([model(X) for X, _ in batches]).detach()
    H = gradient_curvature(model, Js, softmax_fisher(f_mu))
    torch.testing.assert_close(la.H.to_matrix(), H, rtol=1e-9, atol=1e-12)
    assert_covariances_are_dense(la, batches, Js, H)


def test_doras_identity_is_no_input_of_expand():
    model, (X, y) = with_dora(), pairs(1, 5)[0]
    la = make(model, backend_kwargs={"rank": 100, "kfac_approx": "expand"})
    la.fit([(X, y)])
    assert [block.normalizer for block in la.H_facs.blocks] == [5] * 4
    of_first_A = la.H_facs.blocks[0]
    torch.testing.assert_close(of_first_A.input_factor.trace, X.square().sum())


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_dora_in_the_hosts_structures(structure):
    model, batches = with_dora(), pairs(2)
    with pytest.raises(NotImplementedError, match=r"backends don't support DoRA.*first\.lora_A"):
        make(model, structure, backend=CurvlinopsGGN)
    if structure == "kron":
        return
    la = make(model, structure)
    la.fit(batches)
    Js = torch.cat([jacobians(model, X) for X, _ in batches])
    f_mu = torch.cat([model(X) for X, _ in batches]).detach()
    H = exact_ggn(Js, softmax_fisher(f_mu))
    torch.testing.assert_close(la.H, H if structure == "full" else H.diagonal())


def with_frozen_a(model: nn.Module) -> nn.Module:
    """As LoRA-FA trains."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    return model


def of_b(model: nn.Module, values: torch.Tensor) -> torch.Tensor:
    """`(..., parameters)` of `lora_B` weights, from those of all LoRA weights."""
    layers = lora_layers(model)
    parts = values.split([layer.weight.numel() for _, layer in layers], dim=-1)
    chosen = [part for (name, _), part in zip(layers, parts, strict=True) if "lora_B" in name]
    return torch.cat(chosen, dim=-1)


@pytest.mark.parametrize("structure", ["lowrank_kron", "diag", "full"])
def test_with_lora_fa_b_takes_part_alone(structure):
    model, batches = with_frozen_a(plain_model()), pairs(2)
    keywords = {"backend_kwargs": {"rank": 100}} if structure == "lowrank_kron" else {}
    with pytest.warns(UserWarning, match=r"LoRA-FA.*takes part: first\.lora_B.*, second\.lora_B"):
        la = make(model, structure, **keywords)
    la.fit(batches)
    Js = torch.cat([jacobians(model, X) for X, _ in batches])
    f_mu = torch.cat([model(X) for X, _ in batches]).detach()
    H = of_b(model, of_b(model, exact_ggn(Js, softmax_fisher(f_mu))).mT)
    if structure == "lowrank_kron":
        blocks = gradient_blocks(model, Js, softmax_fisher(f_mu))
        H = torch.block_diag(*blocks[1::2])
    elif structure == "diag":
        H = H.diagonal().diag()
    fitted = la.H.diag() if structure == "diag" else la.H
    torch.testing.assert_close(
        la.H.to_matrix() if structure == "lowrank_kron" else fitted, H, rtol=1e-9, atol=1e-12
    )
    Js = of_b(model, Js)
    assert_covariances_are_dense(la, batches, Js, H)


@pytest.mark.parametrize("kfac_approx", ["expand", "reduce"])
def test_statistics_of_b_are_those_that_it_has_beside_a(kfac_approx):
    settings = {"rank": 100, "kfac_approx": kfac_approx}
    both = make(plain_model(), backend_kwargs=settings)
    alone = make(with_frozen_a(plain_model()), backend_kwargs=settings)
    for la in (both, alone):
        la.fit(pairs(2))
    expected = [block.to_matrix(torch.zeros(()), 1) for block in both.H.blocks[1::2]]
    torch.testing.assert_close(alone.H.to_matrix(), torch.block_diag(*expected))


def test_the_hosts_kron_over_b_alone():
    model = with_frozen_a(lora_model("bert"))
    both, alone = fitted(structure="kron"), fitted(structure="kron", model=model)
    for pair, found in zip(both.H_facs.kfacs[1::2], alone.H_facs.kfacs, strict=True):
        for factor, other in zip(pair, found, strict=True):
            torch.testing.assert_close(other, factor)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_posterior_over_b_alone_is_saved_drawn_from_and_guarded(structure, tmp_path):
    trained = with_frozen_a(lora_model("bert"))
    la, (batch, *_) = fitted(structure=structure, model=trained), ragged_batches()
    la.save_pretrained(tmp_path)
    trained.save_pretrained(tmp_path)
    torch.manual_seed(0)
    loaded = PeftModel.from_pretrained(base_model("bert").double(), tmp_path)  # for inference
    again = laplace_lora_ext.from_pretrained(loaded, tmp_path)
    assert [b.name for b in again.blocks] == [b.name for b in la.blocks]
    assert not any(p.requires_grad for n, p in loaded.named_parameters() if "lora_" in n)
    torch.testing.assert_close(again(batch), la(batch))
    settings = {"backend_kwargs": {"rank": 3}} if structure == "lowrank_kron" else {}
    of_both = make(loaded, structure, **settings)
    with pytest.raises(ValueError, match=r"lora_A\.weight .*was None at the fit"):
        of_both.load_state_dict(la.state_dict())
    (folder,) = la.sample_adapters(1, tmp_path / "draws")
    drawn = load_file(folder / "adapter_model.safetensors")
    written = load_file(tmp_path / "adapter_model.safetensors")
    changed = {name for name in written if not torch.equal(drawn[name], written[name])}
    assert changed == {name for name in written if "lora_B" in name}
    with torch.no_grad():
        la.blocks[0].owner.lora_A["default"].weight.add_(1e-3)
    with pytest.raises(RuntimeError, match=r"query\.lora_A\.weight differs from that of the fit"):
        la(batch)


def test_an_optimizer_of_lora_fa_freezes_a():
    optimizers = pytest.importorskip("peft.optimizers")
    if not hasattr(optimizers, "create_lorafa_optimizer"):
        pytest.skip("this PEFT has no LoRA-FA")
    model = lora_model("bert")
    optimizers.create_lorafa_optimizer(model, r=2, lora_alpha=4, lr=1e-3)
    assert {block.matrix for block in make(model).blocks} == {"lora_B"}


def test_examples_of_one_batch_may_have_adapters_of_their_own():
    """What PEFT's `adapter_names` says of each; the posterior is over one of the adapters."""
    model = lora_model("bert").eval()
    config = LoraConfig(task_type="SEQ_CLS", r=3, target_modules=["query"])
    model.add_adapter("second", config)
    model.set_adapter("default")
    (batch, *_) = ragged_batches()
    batch["adapter_names"] = ["default", "second", "__base__"]
    rows = [
        {key: value[row : row + 1] for key, value in batch.items()}
        for row in range(len(batch["labels"]))
    ]
    together, apart = (fitted(model=model, batches=data, rank=100) for data in ([batch], rows))
    torch.testing.assert_close(together.H.to_matrix(), apart.H.to_matrix())
    f_mu, f_var = together.predictive_moments(batch)
    alone = [apart.predictive_moments(row) for row in rows]
    torch.testing.assert_close(f_mu, torch.cat([one.f_mu for one in alone]))
    torch.testing.assert_close(f_var, torch.cat([one.f_var for one in alone]))
    assert not f_var[1:].any()
    assert f_var[0].any()
