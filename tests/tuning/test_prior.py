"""The prior in the evidence, and trying other prior precisions."""

import pytest
import torch

from tests.support.posteriors import fitted, plain_regression


@pytest.mark.parametrize("structure", ["scalar", "layerwise", "diagonal"])
def test_a_prior_is_the_gaussian_with_these_precisions(structure):
    la = fitted(structure="diag")  # it takes any prior
    sizes = torch.tensor([block.weight.numel() for block in la.blocks])
    number = {"scalar": 1, "layerwise": len(sizes), "diagonal": la.n_params}[structure]
    precision = torch.linspace(0.5, 3.0, number, dtype=torch.float64)
    repeats = {"scalar": la.n_params, "layerwise": sizes, "diagonal": 1}[structure]
    la.prior_precision, la.prior_mean = precision, 0.1
    of_weights = precision.repeat_interleave(torch.as_tensor(repeats))
    torch.testing.assert_close(la.log_det_prior_precision, of_weights.log().sum())
    torch.testing.assert_close(la.scatter, of_weights @ (la.mean - 0.1).square())


def test_the_noise_of_a_regression_is_restored_too():
    la, X = plain_regression()
    before = la(X)

    def fail():
        with la.trying():
            la.prior_precision, la.sigma_noise = 9.0, 3.0
            la(X)
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        fail()
    assert la.prior_precision.tolist() == [1.0]
    assert float(la.sigma_noise) == 0.5
    for now, then in zip(la(X), before, strict=True):
        assert torch.equal(now, then)
