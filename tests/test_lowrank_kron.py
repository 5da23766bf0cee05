"""What low-rank factors add to the host's API."""

import pytest
import torch

from laplace_lora_ext.curvature.factors import LowRankFactor
from tests.support.models import ragged_batches
from tests.support.posteriors import fitted, generator, sizes


def test_the_sums_that_are_kept_have_twice_as_many_columns_as_the_curvature():
    la = fitted(rank=1)
    blocks = la.H_facs.blocks
    factors = [factor for block in blocks for factor in (block.output_factor, block.input_factor)]
    large = [factor for factor in factors if isinstance(factor, LowRankFactor)]
    assert [factor.columns.shape[1] for factor in large] == [2] * len(blocks)
    assert [block.large.vectors.shape[1] for block in la.H.blocks] == [1] * len(blocks)


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
    data = {
        "batches": ragged_batches(),
        "statistics": la.predictive_statistics(ragged_batches()),
    }
    la.temperature = 0.01
    name = "train_loader" if method == "agreement" else "val_loader"
    chosen = {}
    for kind, given in data.items():
        options = {"n_steps": 20, "generator": generator()} if method == "val_gd" else {}
        la.optimize_prior_precision(method=method, **{name: given}, **options)
        chosen[kind] = la.prior_precision
    torch.testing.assert_close(chosen["statistics"], chosen["batches"], rtol=1e-6, atol=0)


def test_a_summary_counts_the_parameters_that_the_data_determine():
    la = fitted("gpt2")
    la.temperature, la.prior_precision = (
        0.01,
        torch.linspace(0.5, 3.0, len(la.blocks)),
    )
    rows = [line.split() for line in la.summary().splitlines()[1:]]
    precision = la.prior_precision.double().repeat_interleave(torch.tensor(sizes(la)))
    H = 100 * la.H.to_matrix()
    shares = (H @ torch.linalg.inv(H + precision.diag())).diagonal().split(sizes(la))
    assert [int(row[1]) for row in rows] == sizes(la)
    torch.testing.assert_close(
        torch.tensor([[float(row[2]), float(row[3])] for row in rows]),
        torch.stack(
            [
                la.prior_precision,
                torch.stack([s.sum() for s in shares]),
            ],
            1,
        ).float(),
        rtol=1e-3,
        atol=0.05,
    )
    assert rows[-1][0] == "transformer.h.1.mlp.c_proj.lora_B.default.weight"
