"""Prior precisions: each method finds what brute force finds."""

import math
import warnings

import laplace
import pytest
import torch
import torchmetrics
from laplace.utils.metrics import RunningNLLMetric
from torch.utils.data import DataLoader, TensorDataset

from laplace_lora_ext.tuning.predictive_loss import predictive_loss
from tests.test_host_api import plain_regression
from tests.test_predictive_statistics import count_forward_passes, fitted, some_precision
from tests.tiny_models import lora_model, ragged_batches

STRUCTURES = ["scalar", "layerwise"]
GRID = {"log_prior_prec_min": -2, "log_prior_prec_max": 2, "grid_size": 7}


@pytest.fixture
def validation():
    return ragged_batches(seed=7)


def overconfident(**kwargs):
    """A posterior, and texts of which its model is right about three in four."""
    la = fitted(**kwargs)
    classifier = la.model.model.base_model.classifier.modules_to_save["default"]
    classifier.weight.data.mul_(20)
    la.fit(ragged_batches())
    texts = ragged_batches(lengths=(7, 4, 5, 7, 3, 6, 2, 7) * 3, seed=7)
    for index, batch in enumerate(texts):
        right = la.model(batch).argmax(-1)
        batch["labels"] = torch.where(torch.arange(3) == index % 4, batch["labels"], right)
    return la, texts


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def afresh(la, point, batches, **predictions) -> float:
    """The validation loss at one prior precision, by predictions from the inputs."""
    la.prior_precision = point
    metric = RunningNLLMetric()
    for batch in batches:
        metric.update(la(batch, **predictions), batch["labels"])
    return metric.compute().item()


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("link_approx", ["probit", "mc", "mean_field", "bridge", "bridge_norm"])
def test_gridsearch_equals_brute_force(validation, link_approx, dtype, tail):
    la = fitted(dtype=dtype, tail=tail)
    predictions = {"link_approx": link_approx, "n_samples": 30}
    torch.manual_seed(0)
    losses = [afresh(la, point, validation, **predictions) for point in torch.logspace(-2, 2, 7)]
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
    losses = [afresh(la, factor * base, validation, link_approx="probit") for factor in factors]
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


@pytest.mark.parametrize("structure", ["kron", "diag", "full", "lowrank_kron"])
def test_gridsearch_of_sampled_networks_and_other_structures(validation, structure):
    la = laplace.Laplace(lora_model("bert"), "classification", "lora", structure)
    la.fit(ragged_batches())
    predictions = {"pred_type": "nn", "link_approx": "mc", "n_samples": 2}
    torch.manual_seed(0)
    losses = [afresh(la, point, validation, **predictions) for point in torch.logspace(-2, 2, 7)]
    torch.manual_seed(0)
    history = la.optimize_prior_precision(
        "nn", "gridsearch", val_loader=validation, n_samples=2, **GRID
    )
    assert history.objective.tolist() == pytest.approx(losses, rel=1e-5)


def test_a_loss_without_the_variance_says_so():
    la, X = plain_regression()
    loader = DataLoader(TensorDataset(X, X[:, :2]), batch_size=5)
    with pytest.warns(UserWarning, match="predictive variance"):
        la.optimize_prior_precision(method="gridsearch", val_loader=loader, grid_size=3)


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


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(
    "kind", ["mc", "mc of a singular covariance", "probit", "mean field", "gaussian"]
)
def test_gradient_of_the_validation_loss(kind, structure):
    if kind == "gaussian":
        la, X = plain_regression()
        statistics = la.predictive_statistics([(X, X[:, :2])], dtype=torch.float64)
        loss = predictive_loss(la, "mc", 6)
    else:
        la = fitted()
        statistics = la.predictive_statistics(ragged_batches(seed=7), dtype=torch.float64)
        if "singular" in kind:  # one class is always as likely as another
            statistics.projections[:, 1] = statistics.projections[:, 0]
            statistics.inner_products[:] = 0
        loss = predictive_loss(la, "mc" if "mc" in kind else kind.replace(" ", "_"), 6)
    precision = some_precision(la, structure).log().requires_grad_()

    def validation_loss(logarithm):
        moments = statistics.moments(logarithm.exp())
        return loss(moments, statistics.targets, generator()).mean()

    assert torch.autograd.gradcheck(validation_loss, (precision,), atol=1e-5)


def test_validation_losses_are_those_of_the_predictions(validation):
    la = fitted(dtype=torch.float32, prior_precision=0.3)
    statistics = la.predictive_statistics(validation)
    moments, targets = statistics.moments(0.3), statistics.targets
    for link in ("probit", "mean_field"):
        loss = predictive_loss(la, link, 1)
        expected = -la(moments, link_approx=link).log().gather(1, targets[:, None])[:, 0]
        torch.testing.assert_close(loss(moments, targets, None), expected)
    mc = -la(moments, link_approx="mc", n_samples=100_000).log()
    expected = mc.gather(1, targets[:, None])[:, 0]
    sampled = predictive_loss(la, "mc", 100_000)(moments, targets, generator())
    torch.testing.assert_close(sampled, expected, rtol=0.02, atol=0.02)

    la, X = plain_regression()
    y = X[:, :2]
    moments = la.predictive_statistics([X], dtype=torch.float64).moments(1.0)
    P = torch.linalg.inv(moments.f_var + 0.25 * torch.eye(2).double())
    error = (y - moments.f_mu)[:, None]
    log_density = -0.5 * (error @ P @ error.mT).flatten() + 0.5 * (P / (2 * torch.pi)).logdet()
    torch.testing.assert_close(predictive_loss(la, "mc", 1)(moments, y, None), -log_density)


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_val_gd_finds_the_best_scalar(dtype, tail):
    la, validation = overconfident(dtype=dtype, tail=tail)
    grid = torch.logspace(-3, 3, 61)
    losses = [afresh(la, point, validation, link_approx="probit") for point in grid]
    best = grid[losses.index(min(losses))].item()
    assert grid[0] < best < grid[-1]
    history = la.optimize_prior_precision(
        method="val_gd", val_loader=validation, link_approx="probit", n_steps=300, batch_size=24
    )
    assert history.objective.min().item() <= min(losses) + 1e-5
    assert la.prior_precision.log().item() == pytest.approx(math.log(best), abs=0.15)
    here = afresh(la, la.prior_precision, validation, link_approx="probit")
    assert history.objective.min().item() == pytest.approx(here, rel=1e-5)


def test_val_gd_with_samples_ends_near_the_best_scalar():
    la, validation = overconfident()
    statistics = la.predictive_statistics(validation)
    loss = predictive_loss(la, "mc", 20_000)

    def measure(point):
        return loss(statistics.moments(point), statistics.targets, generator()).mean().item()

    best = min(measure(point) for point in torch.logspace(-3, 3, 31))
    la.optimize_prior_precision(
        method="val_gd", val_loader=validation, init_prior_prec=100.0, generator=generator()
    )
    assert measure(la.prior_precision) <= best + 0.01
    assert measure(100.0) > best + 0.02  # where it has started from


def test_val_gd_of_a_layerwise_prior_beats_the_best_scalar():
    la, validation = overconfident()
    arguments = {"method": "val_gd", "val_loader": validation, "link_approx": "probit"}
    scalar = la.optimize_prior_precision(**arguments, batch_size=24)
    layerwise = la.optimize_prior_precision(**arguments, batch_size=24, prior_structure="layerwise")
    assert len(la.prior_precision) == len(la.blocks)
    assert layerwise.objective.min() < scalar.objective.min()
    assert layerwise.prior_precision.shape == (21, len(la.blocks))
    assert layerwise.step.tolist() == list(range(0, 1001, 50))
    from_scalar = la.optimize_prior_precision(
        **arguments, init_prior_prec=torch.full((len(la.blocks),), 2.0), n_steps=1
    )
    assert from_scalar.prior_precision[0].tolist() == pytest.approx([2.0] * len(la.blocks))


def test_val_gd_honours_seeds(validation):
    la = fitted()

    def run(**kwargs):
        la.optimize_prior_precision(
            method="val_gd", val_loader=validation, n_steps=20, n_samples=3, **kwargs
        )
        return la.prior_precision

    assert torch.equal(run(generator=generator()), run(generator=generator()))
    assert not torch.equal(run(generator=generator()), run(generator=generator(1)))
    torch.manual_seed(0)
    first = run()
    torch.manual_seed(0)
    assert torch.equal(first, run())


def test_val_gd_for_regression_and_its_start_is_never_worsened():
    la, X = plain_regression()
    loader = DataLoader(TensorDataset(X, torch.zeros(12, 2).double()), batch_size=5)
    history = la.optimize_prior_precision(method="val_gd", val_loader=loader, n_steps=100)
    assert history.objective.min() < history.objective[0]
    best = history.prior_precision[history.objective.argmin()]
    torch.testing.assert_close(la.prior_precision, best)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_evidence_converges(dtype, tail, structure):
    """Its slope is 0 where the search ends, and no point of a grid is higher."""
    la = fitted(dtype=dtype, tail=tail)
    history = la.optimize_prior_precision(prior_structure=structure, n_steps=3000)
    assert 11 < len(history.objective) < 3000
    precision = torch.as_tensor(la.prior_precision).clone().requires_grad_()
    la.log_marginal_likelihood(precision).backward()
    assert (precision.grad * precision).abs().max() < 0.05  # nats in a factor of e
    la.prior_precision = precision.detach()
    final = la.log_marginal_likelihood().item()
    assert history.objective[-1].item() == pytest.approx(final, abs=1e-6)
    assert history.objective.max().item() <= final + 1e-2
    size = 1 if structure == "scalar" else len(la.blocks)
    assert history.prior_precision.shape == (len(history.step), size)
    torch.testing.assert_close(history.prior_precision[-1].to(dtype), la.prior_precision)
    if structure == "scalar":
        grid = torch.logspace(-4, 4, 81)
        assert max(la.log_marginal_likelihood(point).item() for point in grid) <= final + 1e-3


def test_all_steps_are_taken_without_a_tolerance():
    la = fitted()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history = la.optimize_prior_precision(n_steps=250, tolerance=0)
    assert history.step.tolist() == list(range(250))


def test_a_cap_that_came_too_early_is_said():
    la = fitted()
    with pytest.warns(UserWarning, match="has not converged in 15 steps"):
        la.optimize_prior_precision(n_steps=15)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_an_evidence_without_a_maximum_is_said(structure):
    la = fitted()
    la.prior_mean = la.mean
    with pytest.warns(UserWarning, match="no maximum"):
        la.optimize_prior_precision(prior_structure=structure)
    assert torch.isfinite(la.prior_precision).all()


def test_one_block_that_runs_away_is_named():
    la = fitted()
    before = la.mean.split(la._sizes)
    la.prior_mean = torch.cat([before[0], *(torch.zeros_like(part) for part in before[1:])])
    with pytest.warns(UserWarning, match=r"for 1 of 8.*layer\.0\.attention\.self\.query\.lora_A"):
        la.optimize_prior_precision(prior_structure="layerwise", n_steps=400)


def test_prior_precisions_stay_within_the_representable_range():
    la = fitted()
    la.prior_mean = la.mean
    with pytest.warns(UserWarning, match="no maximum"):
        la.optimize_prior_precision(n_steps=2000, tolerance=0, lr=1.0)
    assert torch.isfinite(la.prior_precision).all()
    assert la.prior_precision.item() <= torch.finfo(torch.float32).max * 1.01


def test_the_noise_of_a_regression_is_tuned_with_the_prior():
    la, _ = plain_regression()
    before = la.log_marginal_likelihood().item()
    la.optimize_prior_precision(optimize_sigma_noise=True, n_steps=3000)
    prior, sigma = (
        torch.as_tensor(value).clone().requires_grad_()
        for value in (la.prior_precision, la.sigma_noise)
    )
    evidence = la.log_marginal_likelihood(prior, sigma)
    evidence.backward()
    assert evidence.item() > before
    assert abs(prior.grad * prior).item() < 0.05
    assert abs(sigma.grad * sigma).item() < 0.05


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_other_structures_are_tuned_by_the_evidence_too(structure):
    la = laplace.Laplace(lora_model("bert"), "classification", "lora", structure)
    la.fit(ragged_batches())
    history = la.optimize_prior_precision()
    assert history.objective[-1] > history.objective[0]
    if structure == "diag":
        history = la.optimize_prior_precision(prior_structure="diag", tolerance=0, n_steps=30)
        assert history.prior_precision.shape == (30, la.n_params)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "newton"}, "none of"),
        ({"method": "gridsearch"}, "pass val_loader"),
        ({"method": "val_gd"}, "pass val_loader"),
        ({"method": "val_gd", "val_loader": []}, "no data"),
        ({"method": "gridsearch", "val_loader": []}, "no data"),
        ({"method": "gridsearch", "val_loader": [], "pred_type": "nn"}, "no data"),
        ({"method": "val_gd", "val_loader": "batches", "link_approx": "bridge"}, "links"),
        ({"method": "val_gd", "val_loader": "batches", "pred_type": "nn"}, "no option pred_type"),
        ({"method": "gridsearch", "val_loader": "batches", "pooling": 1.0}, "no option pooling"),
        ({"method": "val_gd", "val_loader": "unlabelled"}, "need labels"),
        ({"method": "gridsearch", "val_loader": "unlabelled"}, "need labels"),
        ({"method": "val_gd", "val_loader": "batches", "init_prior_prec": -1.0}, "above 0"),
        ({"method": "val_gd", "val_loader": "nan"}, "batch 1: .*non-finite"),
        ({"method": "gridsearch", "val_loader": "nan"}, "batch 1: .*non-finite"),
        ({"optimize_sigma_noise": True}, "for regression"),
        ({"init_prior_prec": 0.0}, "above 0"),
        ({"prior_structure": "diag"}, "scalar or per-layer"),
    ],
)
def test_bad_arguments_leave_the_prior_precision_alone(validation, arguments, message):
    la = fitted(prior_precision=0.4)
    embedding = la.model.model.get_input_embeddings()
    unlabelled = [{k: v for k, v in batch.items() if k != "labels"} for batch in validation]
    loaders = {"batches": validation, "nan": validation, "unlabelled": unlabelled}
    loader = arguments.get("val_loader")
    if loader == "nan":
        validation[0]["input_ids"].clamp_(max=58)
        validation[1]["input_ids"][:] = 59
        embedding.weight.data[59] = torch.nan
    if isinstance(loader, str):
        arguments = arguments | {"val_loader": loaders[loader]}
    with pytest.raises(ValueError, match=message):
        la.optimize_prior_precision(**arguments)
    torch.testing.assert_close(la.prior_precision, torch.tensor([0.4]).double())


def test_val_gd_is_for_low_rank_factors(validation):
    la = laplace.Laplace(lora_model("bert"), "classification", "lora", "diag")
    la.fit(ragged_batches())
    with pytest.raises(NotImplementedError, match='use "gridsearch"'):
        la.optimize_prior_precision(method="val_gd", val_loader=validation)


def test_nothing_is_said_that_was_not_asked_for(validation, capfd):
    la = fitted()
    capfd.readouterr()
    grid = {"method": "gridsearch", "val_loader": validation, "grid_size": 2}
    descent = {"method": "val_gd", "val_loader": validation, "n_steps": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.optimize_prior_precision(**grid)
        la.optimize_prior_precision(**descent)
    assert capfd.readouterr() == ("", "")
    la.optimize_prior_precision(progress_bar=True, **grid)
    la.optimize_prior_precision(progress_bar=True, verbose=True, **descent)
    la.optimize_prior_precision(n_steps=2, tolerance=0, progress_bar=True)
    out, err = capfd.readouterr()
    assert "Optimized prior precision" in out
    for title in ("Predictive statistics", "Grid search", "validation loss", "evidence"):
        assert title in err


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
