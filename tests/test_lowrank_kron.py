"""What low-rank factors add to the host's API."""

import pytest
import torch
from torch.testing import assert_close

from laplace_lora_ext.curvature.kron import LowRankFactor
from tests.support.models import ragged_batches, without_labels
from tests.support.posteriors import (
    fitted,
    generator,
    priors_of_blocks,
    sizes,
)


def test_the_sums_that_are_kept_have_twice_as_many_columns_as_the_curvature():
    la = fitted(rank=1)
    n_columns = []
    for block in la.H_facs.blocks:
        factors = (block.output_factor, block.input_factor)
        for factor in factors:
            # The smaller factor of a block is dense.
            if isinstance(factor, LowRankFactor):
                _, n_of_factor = factor.columns.shape
                n_columns.append(n_of_factor)
    n_blocks = len(la.blocks)
    assert n_columns == [2] * n_blocks
    for block in la.H.blocks:
        vectors = block.large.vectors
        _, n_vectors = vectors.shape
        assert n_vectors == 1


# --- statistics -----------------------------------------------------------------------


def test_statistics_of_no_data_are_refused():
    la = fitted()
    with pytest.raises(ValueError, match="no data"):
        la.predictive_statistics([])


def test_statistics_have_the_labels_of_all_batches_or_of_none():
    la = fitted()
    batches = ragged_batches()
    unlabelled = [without_labels(batch) for batch in batches]
    statistics = la.predictive_statistics(unlabelled)
    assert statistics.targets is None
    labelled, *_ = batches
    _, without, *_ = unlabelled
    with pytest.raises(ValueError, match="others have none"):
        la.predictive_statistics([labelled, without])


def test_statistics_of_unknown_classes_are_refused():
    la = fitted()
    first, second, _ = ragged_batches()
    labels = torch.tensor([0, 7, 1])
    wrong = second | {"labels": labels}
    with pytest.raises(ValueError, match="batch 1: labels must be from 0 to 2"):
        la.predictive_statistics([first, wrong])


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
        method="val_gd",
        val_loader=data,
        n_steps=20,
        generator=generator(),
    )


def by_gridsearch(la, data) -> None:
    la.optimize_prior_precision(method="gridsearch", val_loader=data)


@pytest.mark.parametrize(
    "choose",
    [by_agreement, by_descent, by_gridsearch],
)
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


def determined_by_data(la) -> list[float]:
    """Sum the share of each parameter's posterior precision that the data bring."""
    n_weights = sizes(la)
    of_blocks = la.prior_precision.double()
    of_weights = of_blocks.repeat_interleave(torch.tensor(n_weights))
    H = la.H.to_matrix() / la.temperature
    posterior_precision = H + of_weights.diag()
    shares = H @ torch.linalg.inv(posterior_precision)
    diagonal = shares.diagonal()
    sums = []
    for of_block in diagonal.split(n_weights):
        sums.append(of_block.sum().item())
    return sums


def test_a_summary_counts_the_parameters_that_the_data_determine():
    la = fitted("gpt2")
    la.temperature = 0.01
    la.prior_precision = priors_of_blocks(la)
    _, *lines = la.summary().splitlines()
    names = []
    n_params = []
    precisions = []
    n_determined = []
    for line in lines:
        name, n, precision, determined = line.split()
        names.append(name)
        n_params.append(int(n))
        precisions.append(float(precision))
        n_determined.append(float(determined))

    assert names[-1] == "transformer.h.1.mlp.c_proj.lora_B.default.weight"
    assert n_params == sizes(la)
    # As many digits as are printed.
    printed = {
        "rel": 1e-3,
        "abs": 0.05,
    }
    expected = la.prior_precision.tolist()
    assert precisions == pytest.approx(expected, **printed)
    expected = determined_by_data(la)
    assert n_determined == pytest.approx(expected, **printed)
