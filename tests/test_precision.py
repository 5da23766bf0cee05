"""Half precision and autocast: what stays in float32 or better."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.support.models import head_of, lora_model, ragged_batches
from tests.support.posteriors import (
    OURS_AND_A_HOSTS,
    PRIORS_ALONE,
    STRUCTURES,
    fitted,
    generator,
)
from tests.support.snapshots import tensors_of


def posterior(kind: str = "bert", **keywords: Any):
    """Fit to a model, by default in float32."""
    # So broad that the curvature and not the prior decides.
    settings = {"dtype": torch.float32, "rank": 10, "prior_precision": 1e-3}
    return fitted(kind, **settings | keywords)


def autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def assert_full_precision(la: Any) -> None:
    """Check that all is in float32 or better, log-determinants in float64."""
    kept = [la.mean, la.prior_precision, la.H, getattr(la, "H_facs", None)]
    tensors = [t for t in tensors_of(kept, set()) if t.is_floating_point()]
    # That tensors are found at all.
    assert len(tensors) > 2
    assert {t.dtype for t in tensors} <= {torch.float32, torch.float64}
    # What each batch adds to is summed in float64.
    if hasattr(la.H, "blocks"):
        for block in la.H_facs:
            assert block.normalizer.dtype == torch.float64
    # Sums over all weights, whose differences tell priors apart.
    of_determinants = (la.log_det_prior_precision, la.log_det_posterior_precision)
    for number in (*of_determinants, la.log_det_ratio, la.scatter, la.loss):
        assert number.dtype == torch.float64


def relative_error(actual: Tensor, expected: Tensor) -> float:
    # In float64, so that the comparison itself rounds nothing.
    difference = actual.double() - expected.double()
    return (difference.norm() / expected.double().norm()).item()


@pytest.mark.parametrize("structure", OURS_AND_A_HOSTS)
def test_predictions_of_a_half_precision_model_are_in_float32(batch, structure):
    la = posterior(model=lora_model("bert", torch.bfloat16), structure=structure)
    assert_full_precision(la)
    numbers = [*la.predictive_moments(batch), la.sample(2)]
    for link in ("probit", "mc", "bridge", "bridge_norm"):
        numbers.append(la(batch, link_approx=link, n_samples=10))
    numbers.append(la(batch, pred_type="nn", link_approx="mc", n_samples=3))
    la.recorder.taps.examples_apart = True
    numbers += la.predictive_moments(batch)
    assert {number.dtype for number in numbers} == {torch.float32}
    # More digits than bfloat16 has, which would make 1.2344 of it.
    many_digits = torch.tensor([1.2345])
    la.prior_precision = many_digits
    assert_close(la.prior_precision, many_digits)
    expected = la.n_params * many_digits.double().log().sum()
    assert_close(la.log_det_prior_precision, expected, rtol=1e-7, atol=0)


def test_confident_samples_keep_their_curvature_in_half_precision():
    """At a margin of 40 nats a seed scaled too early is 0 in float16."""

    def traces(dtype: torch.dtype) -> Tensor:
        """Fit a model that is sure of one class; return each block's trace."""
        model = lora_model("bert", dtype)
        head_of(model).bias.data[1] = 40.0
        la = posterior(model=model)
        return torch.stack([block.trace for block in la.H_facs])

    expected = traces(torch.float32)
    # Otherwise there would be nothing to keep.
    assert (expected > 0).all()
    # A seed that was 0 would be an error of 1.
    assert relative_error(traces(torch.float16), expected) < 0.2


@pytest.mark.parametrize(
    ("kind", "structure"),
    [("gpt2", "lowrank_kron"), ("bert", "kron"), ("bert", "diag"), ("bert", "full")],
)
def test_a_fit_under_autocast_is_near_that_in_float32(batch, kind, structure):
    expected = posterior(kind, structure=structure).predictive_moments(batch).f_var
    with autocast():
        la = posterior(kind, structure=structure)
        assert_full_precision(la)
        found = la.predictive_moments(batch).f_var
        # What was computed in between has left autocast on.
        one = torch.ones(1, 1)
        assert (one @ one).dtype == torch.bfloat16
    # The model's passes are rounded: twice what was measured over these models.
    assert 0 < relative_error(found, expected) < 0.11


@pytest.mark.parametrize(
    ("structure", "examples_apart"),
    [*((structure, False) for structure in STRUCTURES), ("lowrank_kron", True)],
)
def test_all_but_the_models_own_passes_is_computed_as_without_autocast(
    structure, examples_apart
):
    model = lora_model("bert", torch.float32)
    model.forward = torch.autocast("cpu", enabled=False)(model.forward)
    la = posterior(model=model, structure=structure)
    la.recorder.taps.examples_apart = examples_apart
    batches = ragged_batches()
    batch, *_ = batches
    # Where the variance tells.
    grid = PRIORS_ALONE | {"log_prior_prec_min": -5}
    search = la.optimize_prior_precision

    def results() -> list[Tensor]:
        if structure != "kron":  # curvlinops multiplies within the model's passes
            la.fit(batches)
        # Searches have set both.
        la.prior_precision = 1e-3
        la.logit_scale = 1.0
        moments = la.predictive_moments(batch)
        found = [
            moments.f_var,
            la.sample(3, generator()),
            la.function(seed=0)(batch),
            la.functional_samples(moments, generator=generator()),
            la.log_marginal_likelihood(),
            search(method="gridsearch", val_loader=batches, **grid).objective,
        ]
        for link in ("mean_field", "probit", "mc"):
            found.append(la(batch, link_approx=link, generator=generator()))
        found.append(la(batch, "nn", "mc", n_samples=3, generator=generator()))
        if structure == "lowrank_kron":
            statistics = la.predictive_statistics(batches)
            found.append(statistics.moments(0.1).f_var)
            found += [
                search(method="agreement", train_loader=statistics).objective,
                search(method="val_gd", val_loader=statistics, n_steps=9).objective,
            ]
            la.amortize(batches)
            found.append(la(batch, pred_type="amortized"))
        return found

    expected = results()
    with autocast():
        found = results()
    assert_close(found, expected, rtol=0, atol=0)
