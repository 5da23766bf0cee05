"""One pass over a training set."""

import pytest
import torch

from tests.support.models import ragged_batches
from tests.support.posteriors import fitted, linearized, posterior_and_dense, sizes


def test_the_large_side_is_sketched_and_the_small_one_kept():
    la = fitted()
    rank, columns = 2, 3
    model = linearized(la, ragged_batches(), n_features=rank * columns * len(la.blocks))
    sketched = model._features.split(rank * columns, dim=-1)
    whole = linearized(la, ragged_batches())._features.split(sizes(la), dim=-1)
    assert len(sketched) == len(whole)
    for features, jacobians in zip(sketched, whole, strict=True):
        jacobians = jacobians.unflatten(-1, (rank, -1)).flatten(0, 2)
        features = features.unflatten(-1, (rank, columns)).flatten(0, 2)
        matrix = torch.linalg.lstsq(jacobians, features).solution
        torch.testing.assert_close(jacobians @ matrix, features)


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
