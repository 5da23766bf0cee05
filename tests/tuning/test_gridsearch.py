"""The best of a grid of prior precisions, by brute force."""

import pytest
import torch
import torchmetrics
from laplace.utils.metrics import RunningNLLMetric
from torch.utils.data import DataLoader, TensorDataset

from tests.support.models import ragged_batches
from tests.support.posteriors import (
    GRID,
    STRUCTURES,
    count_forward_passes,
    fitted,
    generator,
    make,
    plain_regression,
    some_precision,
    validation_loss,
)


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("link_approx", ["probit", "mc", "mean_field", "bridge", "bridge_norm"])
def test_gridsearch_equals_brute_force(link_approx, dtype, tail):
    la = fitted(dtype=dtype, tail=tail)
    validation = ragged_batches(seed=7, batch_size=8)
    predictions = {"link_approx": link_approx, "n_samples": 30}
    torch.manual_seed(0)
    losses = [
        validation_loss(la, point, validation, **predictions) for point in torch.logspace(-2, 2, 7)
    ]
    torch.manual_seed(0)
    history = la.optimize_prior_precision(
        method="gridsearch", val_loader=validation, **predictions, **GRID
    )
    assert history.objective.tolist() == pytest.approx(losses, rel=1e-5)
    best = torch.logspace(-2, 2, 7)[losses.index(min(losses))]
    torch.testing.assert_close(la.prior_precision.float(), best[None])
    assert history.prior_precision.shape == (7, 1)


def test_gridsearch_scales_a_layerwise_prior(validation):
    la = fitted(dtype=torch.float64)
    base = some_precision(la, "layerwise")
    history = la.optimize_prior_precision(
        method="gridsearch", val_loader=validation, init_prior_prec=base, **GRID
    )
    factors = torch.logspace(-2, 2, 7)
    torch.testing.assert_close(history.prior_precision, factors[:, None].double() * base)
    losses = [
        validation_loss(la, factor * base, validation, link_approx="probit") for factor in factors
    ]
    assert history.objective.tolist() == pytest.approx(losses)
    scalar = la.optimize_prior_precision(
        method="gridsearch", val_loader=validation, init_prior_prec=5.0, **GRID
    )
    torch.testing.assert_close(scalar.prior_precision[:, 0], factors)  # the host's grid


def test_gridsearch_passes_the_data_once_and_given_statistics_not_at_all(validation):
    la = fitted()
    calls = count_forward_passes(la)
    la.optimize_prior_precision(method="gridsearch", val_loader=validation)
    assert len(calls) == len(validation)
    expected = la.prior_precision
    statistics = la.predictive_statistics(validation)
    calls.clear()
    la.optimize_prior_precision(method="gridsearch", val_loader=statistics)
    torch.testing.assert_close(la.prior_precision, expected)
    la.optimize_prior_precision(method="val_gd", val_loader=statistics, n_steps=5)
    assert not calls


@pytest.mark.parametrize("structure", STRUCTURES)
def test_gridsearch_of_sampled_networks_and_other_structures(validation, structure):
    la = fitted(structure=structure)
    predictions = {"pred_type": "nn", "link_approx": "mc", "n_samples": 2}
    torch.manual_seed(0)
    losses = [
        validation_loss(la, point, validation, **predictions) for point in torch.logspace(-2, 2, 7)
    ]
    torch.manual_seed(0)
    history = la.optimize_prior_precision(
        "nn", "gridsearch", val_loader=validation, n_samples=2, **GRID
    )
    assert history.objective.tolist() == pytest.approx(losses, rel=1e-5)


BATCHES = {
    "pairs": lambda batch: ({k: v for k, v in batch.items() if k != "labels"}, batch["labels"]),
    "short numbers": lambda batch: batch | {"labels": batch["labels"].int()},
}


@pytest.mark.parametrize("structure", ["lowrank_kron", "diag"])
@pytest.mark.parametrize("kind", BATCHES)
def test_batches_that_can_be_fitted_can_be_searched_with(validation, kind, structure):
    la = fitted(structure=structure)
    options = {"method": "gridsearch", "pred_type": "nn", "link_approx": "mc"} | GRID
    histories = []
    for data in (validation, [BATCHES[kind](batch) for batch in validation]):
        torch.manual_seed(0)
        histories.append(la.optimize_prior_precision(val_loader=data, n_samples=3, **options))
    assert torch.equal(histories[1].objective, histories[0].objective)


def test_targets_of_a_regression_may_be_flat():
    la, X = plain_regression(1)
    structure = make(la.model.model, "diag", likelihood="regression")
    y = torch.randn(12, 1, generator=generator(3)).double()
    structure.fit([(X, y)])
    flat, column = (
        structure.optimize_prior_precision(method="gridsearch", val_loader=[(X, targets)], **GRID)
        for targets in (y[:, 0], y)
    )
    assert torch.equal(flat.objective, column.objective)


def test_labels_that_do_not_fit_are_refused_with_their_batch(validation):
    la = fitted(structure="diag")
    validation[1]["labels"] = validation[1]["labels"] + 3
    with pytest.raises(ValueError, match="batch 1: labels must be from 0 to 2, not"):
        la.optimize_prior_precision(method="gridsearch", val_loader=validation)


def test_a_loss_without_the_variance_says_so():
    la, X = plain_regression()
    loader = DataLoader(TensorDataset(X, X[:, :2]), batch_size=5)
    with pytest.warns(UserWarning, match="predictive variance"):
        la.optimize_prior_precision(
            method="gridsearch",
            val_loader=loader,
            grid_size=3,
            loss=torchmetrics.MeanSquaredError(num_outputs=2),
        )


def test_the_default_type_changes_nothing(validation):
    la = fitted()
    statistics = la.predictive_statistics(validation)

    def search():
        return la.optimize_prior_precision(method="gridsearch", val_loader=statistics, grid_size=9)

    expected = search()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = search()
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(vars(found), vars(expected), rtol=0, atol=0)


def test_a_point_at_which_there_is_no_covariance_is_not_chosen(validation):
    la = fitted()

    def loss(predictions, targets):
        if la.prior_precision < 1:
            raise torch.linalg.LinAlgError
        return la.prior_precision.sum()

    history = la.optimize_prior_precision(
        method="gridsearch", val_loader=validation, loss=loss, grid_size=9
    )
    assert torch.equal(history.objective.isinf(), history.prior_precision.flatten() < 1)
    assert la.prior_precision == 1


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_regression_is_chosen_by_the_density_of_its_targets(structure):
    la, X = plain_regression()
    posterior = make(la.model.model, structure, likelihood="regression", sigma_noise=0.5)
    y = torch.randn(12, 2, generator=generator(3)).double()
    posterior.fit([(X, y)])
    history = posterior.optimize_prior_precision(
        method="gridsearch", val_loader=[(X[:5], y[:5]), (X[5:], y[5:])], grid_size=7
    )
    for point, objective in zip(history.prior_precision, history.objective, strict=True):
        posterior.prior_precision = point
        f_mu, f_var = posterior(X)
        noise = 0.25 * torch.eye(2).double()
        density = torch.distributions.MultivariateNormal(f_mu, f_var + noise)
        assert objective.item() == pytest.approx(-density.log_prob(y).mean().item(), rel=1e-6)
    assert len(set(history.objective.tolist())) == 7


def test_a_loss_that_is_finite_nowhere_or_no_number_is_refused(validation):
    la = fitted()
    for value, message in ((torch.inf, "no point of the grid"), (torch.nan, "not a number")):
        with pytest.raises(ValueError, match=message):
            la.optimize_prior_precision(
                method="gridsearch",
                val_loader=validation,
                loss=lambda *_, value=value: torch.tensor(value),
            )
        torch.testing.assert_close(la.prior_precision, torch.ones(1).double())


def test_a_users_metric_is_reset_before_every_point(validation):
    class Counting(torchmetrics.Metric):
        def __init__(self):
            super().__init__()
            self.add_state("seen", default=torch.tensor(0.0))

        def update(self, probs, targets):
            self.seen += len(targets)

        def compute(self):
            return self.seen

    la = fitted()
    metric = Counting()
    metric.update(torch.zeros(5, 3), torch.zeros(5))
    with pytest.warns(UserWarning, match="same at every point"):
        history = la.optimize_prior_precision(
            method="gridsearch", val_loader=validation, loss=metric, grid_size=3
        )
    assert history.objective.tolist() == [8, 8, 8]


@pytest.mark.parametrize("loss", [None, "metric", "function"])
def test_gridsearch_scores_each_point_by_itself(loss):
    la, batches = fitted(), ragged_batches()
    losses = {
        None: None,
        "metric": RunningNLLMetric(),
        "function": lambda probs, y: torch.nn.functional.nll_loss(probs.log(), y),
    }
    grid = torch.logspace(-2, 2, 5)
    scores = []
    for point in grid:
        la.prior_precision = point
        metric = RunningNLLMetric()
        for batch in batches:
            metric.update(la(batch, link_approx="probit"), batch["labels"])
        scores.append(metric.compute().item())
    la.optimize_prior_precision(
        method="gridsearch",
        val_loader=batches,
        loss=losses[loss],
        log_prior_prec_min=-2,
        log_prior_prec_max=2,
        grid_size=5,
    )
    torch.testing.assert_close(la.prior_precision.float(), grid[[scores.index(min(scores))]])


def test_metrics_with_a_variance():
    """A metric that takes mean, variance and target is given all three, as by the host."""
    la, X = plain_regression()

    class Calibration(torchmetrics.Metric):
        def __init__(self):
            super().__init__()
            self.add_state("total", default=torch.tensor(0.0).double())

        def update(self, mean, variance, target):
            self.total += (variance.diagonal(dim1=1, dim2=2) - (mean - target) ** 2).abs().sum()

        def compute(self):
            return self.total

    y = torch.randn(12, 2).double()
    loader = DataLoader(TensorDataset(X, y), batch_size=5)
    la.optimize_prior_precision(
        method="gridsearch", val_loader=loader, loss=Calibration(), grid_size=3
    )
    assert len(la.prior_precision) == 1
