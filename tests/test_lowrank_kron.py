"""What low-rank factors add to the host's API."""

import pytest
import torch
from torch.testing import assert_close

from laplace_lora_ext.curvature.factors import LowRankFactor
from tests.support.models import ragged_batches, without_labels
from tests.support.posteriors import fitted, generator, sizes


def test_the_sums_that_are_kept_have_twice_as_many_columns_as_the_curvature():
    la = fitted(rank=1)
    n_columns = []
    for block in la.H_facs.blocks:
        for factor in (block.output_factor, block.input_factor):
            if isinstance(factor, LowRankFactor):
                n_columns.append(factor.columns.shape[1])
    n_blocks = len(la.blocks)
    assert n_columns == [2] * n_blocks
    n_vectors = [block.large.vectors.shape[1] for block in la.H.blocks]
    assert n_vectors == [1] * n_blocks


# --- statistics -----------------------------------------------------------------------


def test_statistics_of_no_data_are_refused():
    with pytest.raises(ValueError, match="no data"):
        fitted().predictive_statistics([])


def test_statistics_have_the_labels_of_all_batches_or_of_none():
    la = fitted()
    batches = ragged_batches()
    unlabelled = [without_labels(batch) for batch in batches]
    assert la.predictive_statistics(unlabelled).targets is None
    with pytest.raises(ValueError, match="others have none"):
        la.predictive_statistics([batches[0], unlabelled[1]])


def test_statistics_of_unknown_classes_are_refused():
    first, second, _ = ragged_batches()
    wrong = second | {"labels": torch.tensor([0, 7, 1])}
    with pytest.raises(ValueError, match=r"batch 1: labels must be from 0 to 2"):
        fitted().predictive_statistics([first, wrong])


def test_statistics_that_are_not_finite_are_refused():
    la = fitted()
    base_layer = la.blocks[0].owner.base_layer
    base_layer.weight.data[0, 1] = torch.nan  # past what is compared with the fit
    with pytest.raises(ValueError, match=r"batch 0: .*non-finite"):
        la.predictive_statistics(ragged_batches())


def test_statistics_of_another_fit_are_refused():
    la = fitted()
    statistics = la.predictive_statistics(ragged_batches())
    la.fit(ragged_batches(seed=9))
    with pytest.raises(ValueError, match="another fit"):
        la.optimize_prior_precision(method="gridsearch", val_loader=statistics)


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


def determined_by_data(la) -> list[float]:
    """Sum the share of each parameter's posterior precision that the data bring."""
    n_weights = torch.tensor(sizes(la))
    prior = la.prior_precision.double().repeat_interleave(n_weights).diag()
    H = la.H.to_matrix() / la.temperature
    shares = (H @ torch.linalg.inv(H + prior)).diagonal()
    return [of_block.sum().item() for of_block in shares.split(sizes(la))]


def test_a_summary_counts_the_parameters_that_the_data_determine():
    la = fitted("gpt2")
    la.temperature = 0.01
    la.prior_precision = torch.linspace(0.5, 3.0, len(la.blocks))
    names = []
    n_params = []
    precisions = []
    n_determined = []
    _, *lines = la.summary().splitlines()
    for line in lines:
        name, n_of_block, precision, determined = line.split()
        names.append(name)
        n_params.append(int(n_of_block))
        precisions.append(float(precision))
        n_determined.append(float(determined))

    assert names[-1] == "transformer.h.1.mlp.c_proj.lora_B.default.weight"
    assert n_params == sizes(la)
    # As many digits as are printed.
    printed = {"rel": 1e-3, "abs": 0.05}
    assert precisions == pytest.approx(la.prior_precision.tolist(), **printed)
    assert n_determined == pytest.approx(determined_by_data(la), **printed)
