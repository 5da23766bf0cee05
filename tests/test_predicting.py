"""What predicts, and its scale of the logits: what goes by it, and what does not."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from laplace_lora_ext import Moments
from tests.support.models import ragged_batches
from tests.support.posteriors import fitted, generator

SCALE = 2.5
# Both sides scale the same logits, in another order: they are apart by rounding alone.
ROUNDING = {"rtol": 1e-12, "atol": 1e-14}


def scaled(moments: Moments) -> Moments:
    """Multiply logits by `SCALE`, and so their covariances by its square."""
    return Moments(SCALE * moments.f_mu, SCALE**2 * moments.f_var)


@pytest.mark.parametrize(
    ("structure", "link"),
    [("lowrank_kron", "probit"), ("diag", "mc"), ("kron", "bridge_norm")],
)
def test_a_link_gets_scaled_logits(link, structure, batch):
    la = fitted(structure=structure)
    moments = la.predictive_moments(batch)

    def predict(x: Any) -> Tensor:
        torch.manual_seed(0)
        return la(x, link_approx=link, n_samples=50)

    expected = predict(scaled(moments))
    la.logit_scale = SCALE
    assert_close(predict(batch), expected, **ROUNDING)
    assert_close(predict(moments), expected, **ROUNDING)
    # Moments stay those of the model's own logits.
    assert torch.equal(la.predictive_moments(batch).f_var, moments.f_var)
    found = la.predict(batch, generator=generator())
    expected = la.predict(moments, generator=generator())
    assert_close(tuple(found), tuple(expected))


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
def test_draws_and_functions_are_of_scaled_logits(la, batch, pred_type, tmp_path):
    options = {"pred_type": pred_type, "n_samples": 4, "diagonal_output": True}
    logits = la.functional_samples(batch, **options, generator=generator())
    of_function = la.function(seed=1, pred_type=pred_type)(batch)
    la.logit_scale = SCALE
    found = la.functional_samples(batch, **options, generator=generator())
    assert_close(found, SCALE * logits)
    probabilities = la.predictive_samples(batch, **options, generator=generator())
    assert_close(probabilities, found.softmax(-1))
    function = la.function(seed=1, pred_type=pred_type)
    assert_close(function(batch), SCALE * of_function)
    # Adapters lack it.
    with pytest.warns(UserWarning, match=r"by logit_scale, 2\.5"):
        la.sample_adapters(1, tmp_path)


def test_learnt_variances_are_scaled_with_the_logits(la, batch):
    exact = la(scaled(la.predictive_moments(batch)), link_approx="mean_field")
    options = {"pred_type": "amortized", "link_approx": "mean_field"}
    texts = ragged_batches()
    la.amortize(texts)
    unscaled = la(batch, **options)
    la.logit_scale = SCALE
    found = la(batch, **options)
    assert not torch.allclose(unscaled, found)
    # Learnt variances are a regression's, and only near those of the posterior.
    assert_close(found, exact, rtol=0.2, atol=0.02)
    # What is learnt is the same, whatever the scale.
    la.amortize(texts)
    assert_close(la(batch, **options), found)
