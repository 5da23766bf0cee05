"""Numbers that are not finite, layers that are bypassed, logits without a gradient."""

from __future__ import annotations

from collections.abc import Iterator
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
from tests.support.models import (
    TwoLinear,
    lora_model,
    pairs,
    plain_model,
    ragged_batches,
    sequences,
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.inner(x)
        return logits + (logits * 0).square().sqrt()


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


@pytest.mark.parametrize("structure", STRUCTURES)
def test_bypassed_layers_are_noticed_on_the_first_batch(structure):
    la = make(with_lora(Fused(), "layer"), structure)
    seen = []

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for index in range(3):
            seen.append(index)
            yield pairs()[0]

    with pytest.raises(RuntimeError, match=r"2 of 2 LoRA layers were bypassed.*layer\.lora_A"):
        la.fit(batches())
    assert seen == [0]


class HalfFused(Fused):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.before(x))


def test_a_single_bypassed_layer_is_noticed():
    la = make(with_lora(HalfFused(), "layer", "before"))
    with pytest.raises(RuntimeError, match=r"2 of 4 LoRA layers were bypassed.*layer\.lora_A"):
        la.fit([pairs()[0]])


def test_logits_without_a_gradient_are_refused():
    model = with_lora(TwoLinear(n_outputs=3), "first", "second")
    model.register_forward_hook(lambda module, args, output: output.detach())
    with pytest.raises(RuntimeError, match="no gradient to the LoRA layers"):
        make(model).fit([(sequences()[0][:, 0], torch.arange(4) % 3)])


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


def test_every_pass_must_run_every_layer(adapted):
    model, blocks = adapted
    X, done = pairs()[0][0], []

    def passes():
        for adapters in (["default"], []):
            model.model.first.set_adapter(adapters)
            model(X)
            done.append(adapters)

    with (
        pytest.raises(RuntimeError, match="2 of 4 LoRA layers were bypassed"),
        inspected(model, blocks, X, anything_goes),
    ):
        passes()
    assert done == [["default"]]


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
