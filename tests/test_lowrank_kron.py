"""What low-rank factors add to the host's API."""

import pytest
import torch

from laplace_lora_ext.curvature.factors import LowRankFactor
from tests.support.models import ragged_batches
from tests.support.posteriors import fitted, generator, sizes


def test_the_sums_that_are_kept_have_twice_as_many_columns_as_the_curvature():
    la = fitted(rank=1)
    kept = []
    for block in la.H_facs.blocks:
        for factor in (block.output_factor, block.input_factor):
            if isinstance(factor, LowRankFactor):
                kept.append(factor.columns.shape[1])
    n_blocks = len(la.blocks)
    assert kept == [2] * n_blocks
    assert [block.large.vectors.shape[1] for block in la.H.blocks] == [1] * n_blocks


def test_bad_data_are_refused():
    la = fitted()
    batches = ragged_batches()
    with pytest.raises(ValueError, match="no data"):
        la.predictive_statistics([])
    without = [{k: v for k, v in batch.items() if k != "labels"} for batch in batches]
    assert la.predictive_statistics(without).targets is None
    with pytest.raises(ValueError, match="others have none"):
        la.predictive_statistics([batches[0], without[1]])
    wrong = batches[1] | {"labels": torch.tensor([0, 7, 1])}
    with pytest.raises(ValueError, match=r"batch 1: labels must be from 0 to 2"):
        la.predictive_statistics([batches[0], wrong])
    la.blocks[0].owner.base_layer.weight.data[0, 1] = torch.nan  # past what is compared
    with pytest.raises(ValueError, match=r"batch 0: .*non-finite"):
        la.predictive_statistics(batches)


def test_statistics_of_another_fit_are_refused():
    la = fitted()
    statistics = la.predictive_statistics(ragged_batches())
    la.fit(ragged_batches(seed=9))
    with pytest.raises(ValueError, match="another fit"):
        la.optimize_prior_precision(method="gridsearch", val_loader=statistics)


@pytest.mark.parametrize("method", ["agreement", "val_gd", "gridsearch"])
def test_statistics_of_another_temperature_choose_as_the_data_do(
    method,
):
    la = fitted()
    statistics = la.predictive_statistics(ragged_batches())
    la.temperature = 0.01
    data = "train_loader" if method == "agreement" else "val_loader"

    def chosen(given):
        options = {data: given}
        if method == "val_gd":
            options |= {"n_steps": 20, "generator": generator()}
        la.optimize_prior_precision(method=method, **options)
        return la.prior_precision

    of_data = chosen(ragged_batches())
    torch.testing.assert_close(chosen(statistics), of_data, rtol=1e-6, atol=0)


def test_a_summary_counts_the_parameters_that_the_data_determine():
    la = fitted("gpt2")
    la.temperature = 0.01
    la.prior_precision = torch.linspace(0.5, 3.0, len(la.blocks))
    _, *lines = la.summary().splitlines()
    rows = [line.split() for line in lines]
    names, n_params, precisions, n_determined = (
        list(column) for column in zip(*rows, strict=True)
    )

    # Of each parameter, the share of its posterior precision that the data bring.
    of_blocks = la.prior_precision.double()
    prior = of_blocks.repeat_interleave(torch.tensor(sizes(la))).diag()
    H = la.H.to_matrix() / la.temperature
    shares = (H @ torch.linalg.inv(H + prior)).diagonal()
    expected = [of_block.sum().item() for of_block in shares.split(sizes(la))]

    assert [int(n) for n in n_params] == sizes(la)
    found = [float(precision) for precision in precisions]
    assert found == pytest.approx(of_blocks.tolist(), rel=1e-3, abs=0.05)
    found = [float(n) for n in n_determined]
    assert found == pytest.approx(expected, rel=1e-3, abs=0.05)
    assert names[-1] == "transformer.h.1.mlp.c_proj.lora_B.default.weight"
