"""Eigenvalues of all blocks at once, shifted by a prior precision."""

from __future__ import annotations

import pytest
import torch

from laplace_lora_ext.curvature.spectrum import Spectrum
from tests.support.posteriors import PRIORS, fitted, some_precision

SPECTRUM = Spectrum(
    leading=torch.tensor([5.0, 4.0, 3.0]).double(),
    leading_block=torch.tensor([0, 0, 1]),
    remaining=torch.tensor([0.5, 0.25]).double(),
    remaining_block=torch.tensor([0, 1]),
    multiplicity=torch.tensor([2.0, 6.0]).double(),
    n_blocks=2,
)


def test_each_eigenvalue_is_shifted_by_the_prior_precision_of_its_block():
    leading, remaining = SPECTRUM.shifted(2.0, torch.tensor([10.0, 100.0]).double())
    assert leading.tolist() == [20, 18, 106]
    assert remaining.tolist() == [11, 100.5]
    leading, remaining = SPECTRUM.shifted(2.0, torch.tensor(1.0))
    assert leading.tolist() == [11, 9, 7]
    assert remaining.dtype == torch.float32


def test_the_determinant_counts_directions_that_are_left_out():
    deltas = torch.tensor([10.0, 100.0])
    eigenvalues = [20, 18, 106, 11, 11] + [100.5] * 6
    expected = torch.tensor(eigenvalues).double().log().sum()
    torch.testing.assert_close(SPECTRUM.logdet(2.0, deltas), expected)


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("rank", [0, 3, 100])
def test_the_determinant_of_a_posterior_is_that_of_its_matrix(rank, prior, tail):
    la = fitted(rank=rank, tail=tail, temperature=0.7)
    la.prior_precision = some_precision(la, prior)
    expected = torch.linalg.slogdet(la.posterior_precision.to_matrix()).logabsdet
    torch.testing.assert_close(la.log_det_posterior_precision, expected)
