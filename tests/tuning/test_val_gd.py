"""Descent on the loss of validation data."""

import pytest
import torch

from laplace_lora_ext.predictive.links import (
    mean_field,
    probit,
    sampled,
)
from tests.support.posteriors import (
    fitted,
    generator,
    overconfident,
    plain_regression,
)


def test_val_gd_of_a_layerwise_prior_beats_the_best_scalar():
    la, validation = overconfident()
    arguments = {
        "method": "val_gd",
        "val_loader": validation,
        "link_approx": "probit",
    }
    scalar = la.optimize_prior_precision(**arguments, batch_size=24)
    layerwise = la.optimize_prior_precision(**arguments, batch_size=24, prior_structure="layerwise")
    assert len(la.prior_precision) == len(la.blocks)
    assert layerwise.objective.min() < scalar.objective.min()
    assert layerwise.prior_precision.shape == (21, len(la.blocks))
    assert layerwise.step.tolist() == list(range(0, 1001, 50))
    from_scalar = la.optimize_prior_precision(
        **arguments,
        init_prior_prec=torch.full((len(la.blocks),), 2.0),
        n_steps=1,
    )
    assert from_scalar.prior_precision[0].tolist() == pytest.approx([2.0] * len(la.blocks))


@pytest.mark.parametrize(
    ("link", "n_samples", "close"),
    [
        ("probit", 1, 1e-6),
        ("mean_field", 1, 1e-6),
        ("mc", 100_000, 0.02),
    ],
)
def test_the_history_is_the_loss_of_the_predictions(validation, link, n_samples, close):
    la = fitted(prior_precision=0.3)
    statistics = la.predictive_statistics(validation, dtype=torch.float64)
    moments, targets = statistics.moments(0.3), statistics.targets
    predicted = la(
        moments,
        link_approx=link,
        n_samples=n_samples,
        generator=generator(1),
    )
    expected = -predicted.log().gather(1, targets[:, None]).mean().item()
    options = {
        "link_approx": link,
        "n_samples": n_samples,
        "n_steps": 1,
        "init_prior_prec": 0.3,
    }
    history = la.optimize_prior_precision(method="val_gd", val_loader=statistics, **options)
    assert history.objective[0].item() == pytest.approx(expected, rel=close)


@pytest.mark.parametrize(
    ("link", "dtype"),
    [
        ("probit", torch.float32),
        ("mean_field", torch.float64),
        ("mc", None),
    ],
)
def test_val_gd_finds_the_best_scalar(link, dtype):
    la, validation = overconfident(dtype=dtype or torch.float32, tail=link != "probit")
    statistics = la.predictive_statistics(validation)

    def measure(point):
        f = {"probit": probit, "mean_field": mean_field}.get(link) or sampled(5_000, generator())
        predicted, targets = (
            [f(*statistics.moments(point))],
            statistics.targets,
        )
        return la.trained_likelihood.nll(predicted, targets, la.sigma_noise).mean().item()

    best = min(measure(point) for point in torch.logspace(-3, 3, 31))
    options = {"n_steps": 1000} if link == "mc" else {"n_steps": 300, "batch_size": 24}
    options |= {
        "link_approx": link,
        "init_prior_prec": 100.0,
        "generator": generator(),
    }
    history = la.optimize_prior_precision(method="val_gd", val_loader=validation, **options)
    assert measure(la.prior_precision) <= best + (0.01 if link == "mc" else 1e-3)
    assert measure(100.0) > best + 0.02  # where it has started from
    if link != "mc":
        assert history.objective.min().item() == pytest.approx(
            measure(la.prior_precision), rel=1e-5
        )


def test_it_is_measured_twenty_times_and_takes_the_best_and_not_the_last():
    la, validation = overconfident()
    options = {
        "link_approx": "probit",
        "n_steps": 45,
        "lr": 200.0,
    }  # steps far too long
    history = la.optimize_prior_precision(method="val_gd", val_loader=validation, **options)
    assert history.step.tolist() == [*range(0, 45, 2), 45]
    tiny = torch.tensor(torch.finfo(torch.float32).tiny).double()
    torch.testing.assert_close(history.prior_precision.min(), tiny, rtol=1e-5, atol=0)  # no farther
    best = history.objective.argmin()
    assert best < len(history.objective) - 1
    torch.testing.assert_close(la.prior_precision, history.prior_precision[best])


def test_steps_become_shorter_along_half_a_cosine():
    la, validation = overconfident()
    options = {
        "link_approx": "probit",
        "n_steps": 20,
        "init_prior_prec": 1e4,
        "batch_size": 24,
    }
    history = la.optimize_prior_precision(method="val_gd", val_loader=validation, **options)
    first, last = history.prior_precision[[0, -1], 0].log().tolist()
    assert first - last == pytest.approx(20 * 0.1 / 2, rel=0.1)  # Adam's steps have the same sign


def test_the_history_of_a_regression_is_the_density_of_its_targets():
    la, X = plain_regression()
    statistics = la.predictive_statistics([(X, X[:, :2])], dtype=torch.float64)
    f_mu, f_var = statistics.moments(1.0)
    noise = 0.25 * torch.eye(2).double()
    density = torch.distributions.MultivariateNormal(f_mu, f_var + noise)
    history = la.optimize_prior_precision(method="val_gd", val_loader=statistics, n_steps=100)
    assert history.objective[0].item() == pytest.approx(-density.log_prob(X[:, :2]).mean().item())
    assert history.objective.min() < history.objective[0]
