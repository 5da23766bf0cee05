"""Numbers that are not finite, layers that are not called, logits without a gradient."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from laplace.curvature.curvlinops import CurvlinopsGGN
from torch import nn

from laplace_lora_ext.likelihoods import Classification
from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import find_blocks
from laplace_lora_ext.passes.checks import inspected
from tests.support.dense import exact_ggn, gradient_curvature, jacobians, softmax_fisher
from tests.support.models import (
    OfMapping,
    Sorting,
    TwoLinear,
    lora_model,
    pairs,
    plain_model,
    ragged_batches,
    with_lora,
)
from tests.support.posteriors import KFAC_APPROX, STRUCTURES, count_forward_passes, make


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_an_activation_that_is_not_finite_names_the_first_layer_that_sees_it(structure, value):
    model = lora_model("bert")
    layer = model.base_model.model.bert.encoder.layer[0]
    layer.attention.self.value.base_layer.weight.data[0, 0] = value
    la = make(model, structure)
    with pytest.raises(
        ValueError, match=r"batch 0: LoRA layer \S*layer\.1\.\S*query\.lora_A\S*: non-finite"
    ):
        la.fit(ragged_batches())


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_every_approximation_names_the_layer_of_an_activation(kfac_approx):
    model = lora_model("gpt2")
    model.base_model.model.transformer.h[1].attn.c_attn.lora_A["default"].weight.data[0] = torch.nan
    la = make(model, class_token_ids=[1, 2], backend_kwargs={"kfac_approx": kfac_approx})
    batches = ragged_batches(n_classes=2)
    with pytest.raises(ValueError, match=r"batch 0: LoRA layer \S*h\.1\.attn\.c_attn\.lora_A"):
        la.fit(batches)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_one_bad_example_in_a_later_batch_names_the_batch_and_the_layer(la, value):
    X, y = pairs()[0]
    bad = X.clone()
    bad[1, 2] = value
    with pytest.raises(ValueError, match=r"batch 2: LoRA layer first\.lora_A\S*: non-finite"):
        la.fit([(X, y), (X, y), (bad, y), (X, y)])


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_an_infinite_activation_behind_finite_logits_is_noticed(kfac_approx):
    """A `tanh` makes it 1."""
    model = with_lora(TwoLinear(), "first")
    la = make(model, backend_kwargs={"kfac_approx": kfac_approx})
    model.first.lora_A["default"].weight.data.zero_()[0, 0] = 1e308
    X, y = pairs()[0]
    X[:, 0] = 5
    assert torch.isfinite(model(X)).all()
    with pytest.raises(ValueError, match=r"batch 0: LoRA layer first\.lora_B\S+: non-finite"):
        la.fit([(X, y)])


@pytest.mark.parametrize("structure", STRUCTURES)
def test_logits_that_are_not_finite_behind_finite_layers_are_refused(structure):
    model = lora_model("bert")
    model.classifier.modules_to_save["default"].bias.data[0] = torch.nan
    with pytest.raises(ValueError, match="batch 0: non-finite logits"):
        make(model, structure).fit(ragged_batches())


class RootOfZero(nn.Module):
    """Its logits are finite, and their derivative is not: 0 times the root's slope at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TwoLinear()
        self.is_broken = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.inner(x)
        return logits + (logits * 0).square().sqrt() if self.is_broken else logits


def root_of_zero(structure: str = "lowrank_kron", **kwargs: Any):
    return make(with_lora(RootOfZero(), "first", "second"), structure, **kwargs)


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_every_approximation_names_the_layer_of_a_gradient_that_is_not_finite(kfac_approx):
    la = root_of_zero(backend_kwargs={"kfac_approx": kfac_approx})
    X, y = pairs()[0]
    with pytest.raises(
        ValueError, match=r"batch 0: LoRA layer inner\.second\.lora_B\S*: non-finite"
    ):
        la.fit([(X, y)])


@pytest.mark.parametrize("kfac_approx", KFAC_APPROX)
def test_a_gradient_that_is_not_finite_later_on_names_its_layer(kfac_approx):
    la = root_of_zero(backend_kwargs={"kfac_approx": kfac_approx})
    model, (X, y) = la.model.model, pairs()[0]

    def batches():
        for model.is_broken in (False, True):
            yield X, y

    named = r"LoRA layer inner\.second\.lora_B\S*: non-finite"
    with pytest.raises(ValueError, match=rf"batch 1: {named}"):
        la.fit(batches())
    model.is_broken = False
    la.fit([(X, y)])
    model.is_broken = True
    with pytest.raises(ValueError, match=r"^LoRA layer inner\.\S*: non-finite gradients"):
        la(X)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_no_structure_takes_a_gradient_that_is_not_finite(structure):
    la = root_of_zero(structure)
    with pytest.raises(ValueError, match=r"batch 0: .*non-finite"):
        la.fit([pairs()[0]])


def test_a_prediction_names_the_layer_of_an_activation_that_is_not_finite(la):
    X, y = pairs()[0]
    la.fit([(X, y)])
    with pytest.raises(ValueError, match=r"LoRA layer first\.lora_A\S*: non-finite"):
        la(X * torch.nan)


class Fused(nn.Module):
    """Reads the LoRA weights and does not run the layers, as a fused kernel does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        A, B = self.layer.lora_A["default"].weight, self.layer.lora_B["default"].weight
        return self.layer.base_layer(x) + x @ A.T @ B.T


@pytest.mark.parametrize("structure", ["lowrank_kron", "diag", "full"])
def test_layers_that_a_fused_kernel_stands_in_for_are_noticed(structure):
    la = make(with_lora(Fused(), "layer"), structure)
    with pytest.raises(
        RuntimeError,
        match=r"No batch used 2 of 2 LoRA weights.*layer\.lora_A.*as it was before",
    ):
        la.fit(pairs() * 3)
    assert la.n_data == 0


class HalfFused(Fused):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.before(x))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_layer_that_no_batch_calls_is_named_and_the_previous_fit_kept(structure):
    model = with_lora(HalfFused(), "layer", "before")
    la = make(model, structure)
    with pytest.raises(
        RuntimeError, match=r"batch .*use.* 2 of 4 LoRA weights.*layer\.lora_A.*with target_modules"
    ):
        la.fit(pairs())
    assert la.n_data == 0
    alone = make(model, structure, target_modules=["before"])
    alone.fit(pairs())
    assert alone.n_data == 4


class TextsAndImages(nn.Module):
    """Runs the layers of what a batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.texts = nn.Linear(5, 3)
        self.images = nn.Linear(4, 3)

    def forward(self, batch: Mapping) -> torch.Tensor:
        logits = batch["input_ids"].double()
        for part in ("texts", "images"):
            if part in batch:
                logits = logits + getattr(self, part)(batch[part]).tanh()
        return logits


def batch_of(*parts: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(len(parts))
    inputs = {
        "texts": torch.randn(4, 5, generator=generator).double(),
        "images": torch.randn(4, 4, generator=generator).double(),
        "input_ids": torch.zeros(4, 3, dtype=torch.long),
    }
    return {part: inputs[part] for part in (*parts, "input_ids")}, torch.arange(4) % 3


PARTS = [("texts", "images"), ("texts",), (), ("images",)]


@pytest.mark.parametrize("structure", ["lowrank_kron", "diag", "full"])
def test_layers_that_a_batch_does_not_call_get_no_curvature_from_it(structure):
    keywords = {"backend_kwargs": {"rank": 100}} if structure == "lowrank_kron" else {}
    model = with_lora(TextsAndImages(), "texts", "images")
    batches = [batch_of(*parts) for parts in PARTS]
    la = make(model, structure, **keywords)
    la.fit(batches)
    inputs = [X for X, _ in batches]
    Js = torch.cat([jacobians(OfMapping(model), X) for X in inputs])
    f_mu = torch.cat([model(X) for X in inputs]).detach()
    H = exact_ggn(Js, softmax_fisher(f_mu))
    fitted = la.H
    if structure == "lowrank_kron":
        H, fitted = gradient_curvature(model, Js, softmax_fisher(f_mu)), la.H.to_matrix()
    elif structure == "diag":
        H, fitted = H.diagonal().diag(), la.H.diag()
    torch.testing.assert_close(fitted, H)
    covariance = Js @ torch.linalg.inv(H + torch.eye(len(H)).double()) @ Js.mT
    moments = torch.cat([la.predictive_moments(X).f_var for X in inputs])
    torch.testing.assert_close(moments, covariance)
    assert not moments[8:12].any()  # the batch that calls no layer at all


@pytest.mark.parametrize("kfac_approx", ["expand", "reduce"])
def test_every_approximation_takes_batches_that_do_not_call_all_layers(kfac_approx):
    model = with_lora(TextsAndImages(), "texts", "images")
    la, of_texts = (
        make(model, backend_kwargs={"rank": 100, "kfac_approx": kfac_approx}, **keywords)
        for keywords in ({}, {"target_modules": ["texts"]})
    )
    la.fit([batch_of(*parts) for parts in PARTS])
    of_texts.fit([batch_of(*parts) for parts in PARTS if "texts" in parts])
    n_texts = of_texts.n_params
    torch.testing.assert_close(
        la.H.to_matrix()[:n_texts, :n_texts], of_texts.H.to_matrix(), rtol=1e-9, atol=1e-12
    )


def test_more_data_need_not_call_all_layers():
    la = make(with_lora(TextsAndImages(), "texts", "images"))
    la.fit([batch_of("texts", "images")])
    la.fit([batch_of("texts")], override=False)
    assert la.n_data == 8


def test_the_hosts_kron_says_that_it_needs_all_layers_in_every_batch():
    la = make(with_lora(TextsAndImages(), "texts", "images"), "kron")
    with pytest.raises(
        RuntimeError,
        match=r'batch does not use 2 of 4 .*such as images\.lora_A.*target_modules.*"lowrank_',
    ):
        la.fit([batch_of("texts", "images"), batch_of("texts")])


def test_the_hosts_kron_says_that_it_needs_gradients_of_all_layers():
    la = make(with_lora(Sorting(), "used", "unused"), "kron")
    with pytest.raises(RuntimeError, match=r"does not use 2 of 4 .*such as unused\.lora_A"):
        la.fit(pairs())


def detached() -> nn.Module:
    model = with_lora(TwoLinear(n_outputs=3), "first", "second")
    model.register_forward_hook(lambda module, args, output: output.detach())
    return model


def without_gradients() -> nn.Module:
    return with_lora(Sorting(with_gradients=False), "used", "unused")


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("model", [detached, without_gradients])
def test_logits_without_a_gradient_are_refused(structure, model):
    with pytest.raises(RuntimeError, match="No gradient of the logits reaches the LoRA layers"):
        make(model(), structure).fit(pairs())


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_a_fit_by_the_hosts_backend_passes_no_more_often_than_the_backend(structure):
    batches = ragged_batches()
    la = make(lora_model("bert"), structure, backend=CurvlinopsGGN)
    calls = count_forward_passes(la)
    with la.model.prepared([block.weight for block in la.blocks]):
        for batch in batches:
            getattr(la.backend, structure)(batch, batch["labels"], N=8)
    of_the_host = len(calls)
    la.fit(batches)
    assert 0 < len(calls) - of_the_host <= of_the_host


def hooks_of(model: nn.Module) -> list[dict]:
    return [
        dict(hooks)
        for module in model.modules()
        for name, hooks in vars(module).items()
        if "_hooks" in name and isinstance(hooks, dict)
    ]


@pytest.fixture
def adapted():
    model = LogitsModel(plain_model())
    model.register_forward_hook(lambda *_: None)  # a user's own
    return model, find_blocks(model.model)


def anything_goes(logits: torch.Tensor) -> None:
    """Check no targets."""


def test_a_pass_of_somebody_else_is_checked_from_within(adapted):
    model, blocks = adapted
    (X, _), before, shapes = pairs()[0], hooks_of(model), []
    with inspected(model, blocks, X, lambda logits: shapes.append(logits.shape)):
        for _ in range(2):
            model(X)
    assert shapes == [(4, 3)] * 2
    assert hooks_of(model) == before
    with (
        pytest.raises(ValueError, match=r"^LoRA layer first\.lora_A\S+: non-finite activations$"),
        inspected(model, blocks, X, anything_goes),
    ):
        model(X * torch.nan)
    assert hooks_of(model) == before


def test_logits_that_do_not_fit_their_targets_are_refused(adapted):
    model, blocks = adapted
    X, y = pairs()[0]
    with (
        pytest.raises(ValueError, match="labels must be from 0 to 2"),
        inspected(model, blocks, X, partial(Classification().check_targets, y + 1)),
    ):
        model(X)


def test_a_failing_pass_of_somebody_else_leaves_no_hooks_and_its_own_error(adapted):
    model, blocks = adapted
    (X, _), before, error = pairs()[0], hooks_of(model), RuntimeError("somebody else's")

    def passes():
        model.model.second.register_forward_hook(lambda *_: None)
        model(X)
        raise error

    with pytest.raises(RuntimeError) as raised, inspected(model, blocks, X, anything_goes):
        passes()
    assert raised.value is error
    assert hooks_of(model) == before


def test_where_a_pass_of_somebody_else_fails_the_reason_is_named(adapted):
    """The host's code meets numbers that are not finite before any logits are there."""
    model, blocks = adapted
    X, before = pairs()[0][0] * torch.nan, hooks_of(model)

    def passes():
        model.model.second.register_forward_hook(lambda *_: None)
        raise torch.linalg.LinAlgError("did not converge")

    with (
        pytest.raises(ValueError, match=r"LoRA layer first\.lora_A\S+: non-finite") as raised,
        inspected(model, blocks, X, anything_goes),
    ):
        passes()
    assert isinstance(raised.value.__context__, torch.linalg.LinAlgError)
    assert hooks_of(model) == before
