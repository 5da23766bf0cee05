"""One pass over a training set."""

import torch

from tests.support.models import ragged_batches
from tests.support.posteriors import fitted, linearized, sizes


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
