"""The broadest posterior whose draws agree with the model on the training data."""

import pytest
import torch
from torch.distributions import MultivariateNormal
from torch.utils.data import DataLoader

from tests.support.models import ragged_batches
from tests.support.posteriors import (
    STRUCTURES,
    count_forward_passes,
    fitted,
    generator,
    plain_regression,
)
from tests.support.ranks import Texts

METHOD = "agreement"


def change(la, batches, n_samples: int = 20_000) -> float:
    """Mean total variation distance of draws from the model, by sampling and one text at a time."""
    torch.manual_seed(1)
    distances = []
    for batch in batches:
        f_mu, f_var = la.predictive_moments({k: v for k, v in batch.items() if k != "labels"})
        for mean, covariance in zip(f_mu, f_var, strict=True):
            jitter = 1e-10 * torch.eye(len(mean)).to(mean)
            draws = MultivariateNormal(mean, covariance + jitter).sample((n_samples,))
            distances.append((draws.softmax(-1) - mean.softmax(-1)).abs().sum(-1).mean() / 2)
    return torch.stack(distances).mean().item()


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("max_change", [0.05, 0.2])
def test_draws_change_the_predictions_by_as_much_as_is_allowed(structure, max_change):
    la = fitted(structure=structure)
    unlabelled = [{k: v for k, v in b.items() if k != "labels"} for b in ragged_batches()]
    history = la.optimize_prior_precision(
        method=METHOD,
        train_loader=unlabelled,
        max_change=max_change,
        n_samples=5_000,
        generator=generator(),
    )
    # The sampling error of both estimates, and 1 % of a prior precision.
    assert change(la, ragged_batches()) == pytest.approx(max_change, rel=0.03)
    assert history.objective[-1].item() == pytest.approx(max_change, rel=0.03)
    order = history.prior_precision.flatten().argsort()
    assert (history.objective[order].diff() < 0).all()
    assert len(history.step) < 20


def test_the_data_pass_once_or_not_at_all():
    la = fitted()
    batches = ragged_batches()
    statistics = la.predictive_statistics(batches, dtype=torch.float64)
    calls = count_forward_passes(la)
    la.optimize_prior_precision(method=METHOD, train_loader=statistics)
    assert not calls
    la.optimize_prior_precision(method=METHOD, train_loader=batches)
    assert len(calls) == len(batches)


def test_what_it_starts_with_is_scaled_as_a_whole():
    la = fitted()
    start = torch.arange(1.0, len(la.blocks) + 1)
    la.optimize_prior_precision(method=METHOD, train_loader=ragged_batches(), init_prior_prec=start)
    factors = la.prior_precision.cpu() / start
    torch.testing.assert_close(factors, factors[:1].expand_as(factors))
    assert change(la, ragged_batches()) == pytest.approx(0.1, rel=0.1)


def test_the_start_does_not_matter():
    la = fitted()
    chosen = []
    for start in (1e-5, 1.0, 1e5):
        options = {"train_loader": ragged_batches(), "generator": generator()}
        la.optimize_prior_precision(method=METHOD, init_prior_prec=start, **options)
        chosen.append(la.prior_precision.item())
    assert chosen == pytest.approx([chosen[1]] * 3, rel=0.02)


def test_many_examples_go_in_parts(monkeypatch):
    la = fitted()
    options = {"method": METHOD, "train_loader": ragged_batches(), "n_samples": 4000}
    whole = la.optimize_prior_precision(generator=generator(), **options).prior_precision[-1]
    monkeypatch.setattr("laplace_lora_ext.tuning.agreement._CHUNK", 1)
    parts = la.optimize_prior_precision(generator=generator(), **options).prior_precision[-1]
    torch.testing.assert_close(whole, parts, rtol=0.05, atol=0)


def test_a_change_out_of_reach_is_said():
    la = fitted()
    with pytest.warns(UserWarning, match="No prior precision within a factor of 1e8"):
        la.optimize_prior_precision(
            method=METHOD, train_loader=ragged_batches(), max_change=0.99, n_samples=10
        )


def test_what_cannot_be_compared_is_refused():
    la = fitted()
    before = la.prior_precision.clone()
    for value in (0, 1, -0.1, float("nan")):
        with pytest.raises(ValueError, match="max_change must be between 0 and 1"):
            la.optimize_prior_precision(
                method=METHOD, train_loader=ragged_batches(), max_change=value
            )
    with pytest.raises(ValueError, match="The loader has no data"):
        la.optimize_prior_precision(method=METHOD, train_loader=[])
    with pytest.raises(ValueError, match="no data"):
        fitted(structure="diag").optimize_prior_precision(method=METHOD, train_loader=[])
    torch.testing.assert_close(la.prior_precision, before)
    regression, X = plain_regression()
    with pytest.raises(ValueError, match="regression has none"):
        regression.optimize_prior_precision(method=METHOD, train_loader=[X])


def many(n: int = 60, batch_size: int = 5) -> DataLoader:
    """Texts that are put together in batches."""
    texts = Texts(n)
    return DataLoader(texts, batch_size=batch_size)


@pytest.mark.parametrize("structure", ["lowrank_kron", "diag"])
def test_of_many_examples_some_are_drawn(structure):
    la, chosen = fitted(structure=structure), []
    options = {"method": METHOD, "n_samples": 500, "train_loader": many(120, 40)}
    whole = la.optimize_prior_precision(**options)
    assert whole.n_examples == 120
    for seed in range(5):
        options["generator"] = generator(seed)
        history = la.optimize_prior_precision(max_examples=60, **options)
        assert history.n_examples == 60
        chosen.append((la.prior_precision / whole.prior_precision[-1]).log().item())
    assert len(set(chosen)) == 5
    # Each is near, and their mean nearer.
    assert max(map(abs, chosen)) < 0.4
    assert abs(sum(chosen) / 5) < 0.2


@pytest.mark.parametrize("listed", [False, True])
def test_no_more_than_what_is_drawn_passes_through_the_model(listed):
    la, seen = fitted(), []
    la.fit(many())
    la.model.register_forward_hook(lambda _, __, logits: seen.append(len(logits)))
    options = {"method": METHOD, "max_examples": 20}
    options["train_loader"] = list(many()) if listed else many()
    history = la.optimize_prior_precision(**options)
    assert sum(seen) == history.n_examples
    # Of batches in a list each has its chance, else examples are drawn.
    assert 5 <= history.n_examples <= 40 if listed else history.n_examples == 20
    assert torch.equal(la.optimize_prior_precision(**options).objective, history.objective)
