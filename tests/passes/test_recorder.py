"""Jacobians of the logits against torch's own, and parts of batches."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_lora_ext.models.logits_model import LogitsModel
from laplace_lora_ext.models.lora_layers import find_blocks
from laplace_lora_ext.passes.recorder import Recorder
from tests.support.cases import assert_exact
from tests.support.dense import EXACT, full_rank, jacobians
from tests.support.models import (
    Detour,
    Sorting,
    TwoLinear,
    first_batch,
    pairs,
    with_lora,
)
from tests.support.posteriors import (
    STRUCTURES,
    count_forward_passes,
    fitted,
    make,
    normal,
)


@pytest.mark.parametrize("structure", ["lowrank_kron", "diag", "full"])
def test_a_layer_that_the_logits_do_not_depend_on_has_no_curvature(structure):
    model = with_lora(Detour(), "used", "unused")
    ((X, y),) = pairs()
    la, of_used_layer = (
        make(model, structure, target_modules=layers, **full_rank(structure))
        for layers in (None, ["used"])
    )
    for each in (la, of_used_layer):
        each.fit([(X, y)])
    assert_close(la(X), of_used_layer(X), **EXACT)
    # The other layer's blocks add log 1.
    found = la.log_det_posterior_precision
    assert_close(found, of_used_layer.log_det_posterior_precision, **EXACT)
    assert_exact(la, model, [X])


def test_a_layer_that_no_gradient_can_reach_is_left_out_or_refused():
    model = with_lora(Sorting(), "used", "unused")
    ((X, y),) = pairs()
    with pytest.raises(RuntimeError, match=r"used 2 of 4.*unused.*target_modules"):
        make(model).fit([(X, y)])
    la = make(model, target_modules=["used"], **full_rank())
    la.fit([(X, y)])
    assert_exact(la, model, [X])


class SharedRows(nn.Module):
    """A layer projects the inputs, and an embedding that all examples share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.embedding = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.layer(self.embedding)).tanh()


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    ("kind", "layers"), [(SharedRows, ["layer"]), (Detour, ["used", "unused"])]
)
def test_combinations_of_the_logits_have_the_same_combinations_of_jacobians(
    kind, layers, number
):
    model = with_lora(kind(), *layers)
    ((X, _),) = pairs()
    weights = normal(number, len(X), 3, seed=5)
    recorder = Recorder(LogitsModel(model), find_blocks(model))
    found, _ = recorder.jacobians(X, lambda logits: weights)
    expected = torch.einsum("sbc,bcp->bsp", weights, jacobians(model, X))
    assert_close(found, expected, **EXACT)


class Predicting(torch.autograd.Function):
    """A function of the user's own, whose forward pass predicts."""

    @staticmethod
    def forward(ctx, x: Tensor, la) -> Tensor:
        return la(x)


def test_a_prediction_within_a_function_of_the_users_own_is_no_checkpoint():
    ((X, y),) = pairs()
    la = make(with_lora(SharedRows(), "layer"))
    la.fit([(X, y)])
    assert_close(Predicting.apply(X, la), la(X))


# --- batches in parts -----------------------------------------------------------------

# Of seven tokens each, for each of three outputs.
ROWS_OF_TWO_TEXTS = 2 * 7 * 3


def allow_at_once(monkeypatch, n_rows: int) -> None:
    """Let so many rows through a layer at once: tokens of all texts, for each logit."""
    monkeypatch.setattr("laplace_lora_ext.passes.recorder._ON_CPU", n_rows)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_parts_bring_the_same_numbers(kind, monkeypatch):
    la = fitted(kind)
    batch = first_batch(batch_size=8)

    def facts() -> dict[str, Any]:
        statistics = la.predictive_statistics([batch], dtype=torch.float64)
        return {
            "moments": tuple(la.predictive_moments(batch)),
            "of statistics": tuple(statistics.moments(0.1)),
            "targets": statistics.targets,
        }

    whole = facts()
    calls = count_forward_passes(la)
    la.predictive_moments(batch, joint=True)
    allow_at_once(monkeypatch, ROWS_OF_TWO_TEXTS)
    assert_close(facts(), whole, **EXACT)
    # Four parts of moments, and of statistics; once all texts are compared with their
    # parts.
    assert len(calls) == 1 + 2 * 4 + 1
    # Covariances between examples come of the whole batch.
    la.predictive_moments(batch, joint=True)
    assert len(calls) == 1 + 2 * 4 + 1 + 1
    # Wrong labels are named by the batch, and not by the part.
    wrong = batch | {"labels": batch["labels"] + 5}
    with pytest.raises(ValueError, match="batch 0: labels must be from 0 to 2"):
        la.predictive_statistics([wrong])


class Standardised(TwoLinear):
    """It standardises what it reads, which no gradient of an adapter's rows shows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x - x.mean(0)) / x.std(0))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_logits_that_depend_on_the_batch_are_not_divided(structure, monkeypatch):
    ((X, y),) = pairs(n=8)
    model = with_lora(Standardised(), "first", "second")
    la = make(model, structure)
    la.fit([(X, y)])
    whole = la.predictive_moments(X)
    assert_close(whole.f_mu, model(X).detach(), **EXACT)
    function = la.function(seed=0)(X)
    # Of two examples, for each of three outputs.
    allow_at_once(monkeypatch, 2 * 3)
    calls = count_forward_passes(la)
    for n_calls in (6, 1, 1):  # four parts, the comparison, and all of them
        calls.clear()
        assert_close(tuple(la.predictive_moments(X)), tuple(whole), **EXACT)
        assert len(calls) == n_calls
    assert_close(la.function(seed=0)(X), function, **EXACT)
    if structure == "lowrank_kron":
        statistics = la.predictive_statistics([(X, y)], dtype=torch.float64)
        assert_close(statistics.f_mu, whole.f_mu, **EXACT)
