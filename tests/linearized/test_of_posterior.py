"""The linearised model of a posterior: what it takes from the posterior."""

import torch

from tests.support.models import ragged_batches
from tests.support.posteriors import fitted


def test_the_offset_is_at_the_prior_mean():
    """Half of the way to it moves the logits half as far."""
    offsets = []
    for share in (0.0, 0.5, 1.0):
        la = fitted()
        la.prior_mean = share * la.mean
        offsets.append(la.linearize(ragged_batches())._mode._offset)
    torch.testing.assert_close(offsets[1], (offsets[0] + offsets[2]) / 2)
    with la.model.prepared():
        logits = torch.cat([la.model(batch) for batch in ragged_batches()])
    torch.testing.assert_close(offsets[2], logits.detach().double())
    assert (offsets[2] - offsets[0]).abs().max() > 1e-3
