"""What low-rank factors add to the host's API."""

import pytest
import torch
from torch.testing import assert_close

from laplace_lora_ext.curvature.kron import LowRankFactor
from tests.support.models import ragged_batches, without_labels
from tests.support.posteriors import fitted, generator, priors_of_blocks, sizes


def test_the_sums_that_are_kept_have_twice_as_many_columns_as_the_curvature():
    la = fitted(rank=1)
    for sums, block in zip(la.H_facs.blocks, la.H.blocks, strict=True):
        # The smaller factor of a block is dense.
        (large,) = (
            factor
            for factor in (sums.output_factor, sums.input_factor)
            if isinstance(factor, LowRankFactor)
        )
        assert large.columns.shape[1] == 2
        assert block.large.vectors.shape[1] == 1


# --- statistics -----------------------------------------------------------------------


def test_statistics_of_no_data_or_of_other_labels_are_refused():
    la = fitted()
    with pytest.raises(ValueError, match="no data"):
        la.predictive_statistics([])
    batches = ragged_batches()
    unlabelled = [without_labels(batch) for batch in batches]
    assert la.predictive_statistics(unlabelled).targets is None
    with pytest.raises(ValueError, match="others have none"):
        la.predictive_statistics([batches[0], unlabelled[1]])
    wrong = batches[1] | {"labels": torch.tensor([0, 7, 1])}
    with pytest.raises(ValueError, match="batch 1: labels must be from 0 to 2"):
        la.predictive_statistics([batches[0], wrong])


def test_statistics_that_are_not_finite_are_refused():
    la = fitted()
    first_block, *_ = la.blocks
    weight = first_block.owner.base_layer.weight
    # A number that is not among those that are compared with the fit's.
    weight.data[0, 1] = torch.nan
    with pytest.raises(ValueError, match=r"batch 0: .*non-finite"):
        la.predictive_statistics(ragged_batches())


def test_statistics_of_another_fit_are_refused():
    la = fitted()
    statistics = la.predictive_statistics(ragged_batches())
    other_texts = ragged_batches(seed=9)
    la.fit(other_texts)
    with pytest.raises(ValueError, match="another fit"):
        by_gridsearch(la, statistics)


def by_agreement(la, data) -> None:
    la.optimize_prior_precision(method="agreement", train_loader=data)


def by_descent(la, data) -> None:
    la.optimize_prior_precision(
        method="val_gd", val_loader=data, n_steps=20, generator=generator()
    )


def by_gridsearch(la, data) -> None:
    la.optimize_prior_precision(method="gridsearch", val_loader=data)


@pytest.mark.parametrize("choose", [by_agreement, by_descent, by_gridsearch])
def test_statistics_of_another_temperature_choose_as_the_data_do(choose):
    la = fitted()
    statistics = la.predictive_statistics(ragged_batches())
    la.temperature = 0.01
    choose(la, ragged_batches())
    by_data = la.prior_precision
    choose(la, statistics)
    # Statistics are kept in float32.
    assert_close(la.prior_precision, by_data, rtol=1e-6, atol=0)


# --- summary --------------------------------------------------------------------------


def test_a_summary_counts_the_parameters_that_the_data_determine():
    la = fitted("gpt2")
    la.temperature = 0.01
    la.prior_precision = priors_of_blocks(la)
    _, *lines = la.summary().splitlines()
    names, *figures = zip(*(line.split() for line in lines), strict=True)
    n_params, precisions, n_determined = ([*map(float, each)] for each in figures)
    assert names[-1] == "transformer.h.1.mlp.c_proj.lora_B.default.weight"
    assert n_params == sizes(la)
    # The share of each parameter's posterior precision that the data bring.
    prior = la.prior_precision.double().repeat_interleave(torch.tensor(sizes(la)))
    H = la.H.to_matrix() / la.temperature
    shares = (H @ torch.linalg.inv(H + prior.diag())).diagonal()
    expected = [of_block.sum().item() for of_block in shares.split(sizes(la))]
    # As many digits as are printed.
    printed = {"rel": 1e-3, "abs": 0.05}
    assert precisions == pytest.approx(la.prior_precision.tolist(), **printed)
    assert n_determined == pytest.approx(expected, **printed)
