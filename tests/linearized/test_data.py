"""One pass over a training set."""

import pytest
import torch

from laplace_lora_ext.predictive.statistics import from_triangle
from tests.support.models import ragged_batches
from tests.support.posteriors import (
    STRUCTURES,
    fitted,
    linearized,
    posterior_and_dense,
    sizes,
)


def features_of(model):
    return torch.cat([part for _, part in model._features.parts()])


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("n_features", [None, 70])
def test_inner_products_of_an_example_with_itself_are_exact(n_features, structure):
    la = fitted(structure=structure)
    model = linearized(la, ragged_batches(), n_features=n_features)
    whole = linearized(fitted(), ragged_batches())
    assert model._features.n_features < whole._features.n_features == la.n_params
    parts = features_of(model).split(torch.bincount(model._block).tolist(), dim=-1)
    own = from_triangle(model._own, model._f_mu.shape[1])
    jacobians = features_of(whole).split(sizes(la), dim=-1)
    for index, (features, jacobian) in enumerate(zip(parts, jacobians, strict=True)):
        products = features @ features.mT + own[:, index]
        torch.testing.assert_close(products, jacobian @ jacobian.mT)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_the_linearised_model_is_that_of_dense_jacobians(kind):
    la, dense = posterior_and_dense(kind)
    la.prior_mean = 0.3
    model = linearized(la, ragged_batches())
    assert len(model) == len(dense.y)
    assert torch.equal(model.targets, dense.y)
    assert model.n_blocks == len(la.blocks)
    assert model.loss == pytest.approx(la.loss.item())
    moved = dense.J @ (la.mean - 0.3)
    logits = dense.offset + dense.J @ la.mean
    # Held at the prior mean, nothing but the offset is left.
    f_mu, _ = model.leave_one_out(torch.tensor([1e12]).double())
    torch.testing.assert_close(f_mu, logits - moved, rtol=1e-5, atol=1e-5)


def test_a_number_of_features_below_1_is_refused():
    with pytest.raises(ValueError, match="n_features must be at least 1, not 0"):
        fitted().linearize(ragged_batches(), n_features=0)


def test_a_progress_bar_where_it_is_asked_for(capfd):
    la = fitted()
    la.linearize(ragged_batches(), 10)
    assert capfd.readouterr().err == ""
    la.linearize(ragged_batches(), 10, progress_bar=True)
    assert "Linearizing" in capfd.readouterr().err
