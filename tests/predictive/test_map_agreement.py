"""The warning that predictions have left the model's own most probable class."""

import warnings

import pytest
import torch

from laplace_lora_ext import Laplace, Moments
from laplace_lora_ext.predictive.map_agreement import MapAgreement
from tests.support.models import lora_model, ragged_batches
from tests.support.posteriors import fitted


@pytest.fixture
def la():
    la = Laplace(
        lora_model("bert"), "classification", subset_of_weights="lora", hessian_structure="kron"
    )
    la.fit(ragged_batches())
    return la


def moments(rows: int, away: int) -> Moments:
    """Logits of which the first `away` lose their class to another, of a large variance."""
    f_mu = torch.tensor([0.1, 0.0, 0.0]).repeat(rows, 1).double()
    f_var = 1e-6 * torch.eye(3).repeat(rows, 1, 1).double()
    f_var[:away, 1, 1] = 1e4
    return Moments(f_mu, f_var)


def predict(la, given, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        la(given, **options)
    return [str(one.message) for one in caught if "prefer another class" in str(one.message)]


def test_it_warns_once_when_more_than_a_few_per_cent_have_left(la):
    torch.manual_seed(0)
    given = moments(100, 100)
    options = {"link_approx": "mc", "n_samples": 50}
    (message,) = predict(la, given, **options)
    assert 'link_approx="mean_field"' in message
    assert "gridsearch" in message
    assert not predict(la, given, **options)
    la.fit(ragged_batches())  # another posterior is another matter
    assert predict(la, given, **options)


def test_agreement_and_few_rows_are_silent(la):
    generator = torch.Generator().manual_seed(0)
    for given in (moments(500, 0), moments(99, 0)):
        for link in ("mc", "probit"):
            assert not predict(la, given, link_approx=link)
        assert not predict(la, given, link_approx="mc", generator=generator)


@pytest.mark.parametrize(
    ("rows", "away", "warned"), [(99, 99, False), (100, 8, False), (100, 9, True)]
)
def test_eight_per_cent_of_a_hundred_are_tolerated(rows, away, warned):
    agreement = MapAgreement()
    agreement.expect(torch.eye(2)[torch.zeros(rows, dtype=torch.long)])
    probabilities = torch.eye(2)[(torch.arange(rows) < away).long()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        agreement.add(probabilities, "mc")
    assert bool(caught) == warned


def test_rows_add_up_over_batches():
    agreement = MapAgreement()
    agreement.expect(torch.eye(2)[[0] * 10])
    wrong = torch.eye(2)[[1] * 10]
    for _ in range(9):
        agreement.add(wrong, "mean_field")
    with pytest.warns(UserWarning, match="100 of 100 predictions.*broad. a larger"):
        agreement.add(wrong, "mean_field")


def test_prior_precisions_that_are_only_tried_count_for_nothing():
    agreement = MapAgreement()
    agreement.expect(torch.eye(2)[[0] * 200])
    wrong = torch.eye(2)[[1] * 200]
    with agreement.paused():
        agreement.add(wrong, "mc")
    with pytest.warns(UserWarning, match="200 of 200"):
        agreement.add(wrong, "mc")


def test_a_grid_search_is_silent():
    model = lora_model("bert", dtype=torch.float32)
    la = Laplace(model, "classification", "lora", "lowrank_kron")
    la.fit(ragged_batches())
    loader = ragged_batches() * 20
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*pin_memory")
        la.optimize_prior_precision(
            method="gridsearch",
            val_loader=loader,
            link_approx="mc",
            log_prior_prec_min=-8,
            log_prior_prec_max=-6,
            grid_size=3,
        )
    assert la._agreement._rows == 0


def test_it_counts_for_the_agreement_with_map():
    la = fitted(prior_precision=1e-6)
    for _ in range(20):
        la(ragged_batches()[0], link_approx="mean_field")
    assert la._agreement._rows == 20 * len(ragged_batches()[0]["labels"])
