"""With many classes, those that matter are compared, others guessed."""

from itertools import permutations, product

import pytest
import torch
from laplace.utils.metrics import RunningNLLMetric
from torch.testing import assert_close

from laplace_lora_ext import LaplaceMixture
from laplace_lora_ext.predictive.contrasts import MOST, Contrasts, completed
from laplace_lora_ext.predictive.distributions import moments_for
from laplace_lora_ext.predictive.links import mean_field
from laplace_lora_ext.predictive.moments import DifferenceMoments
from laplace_lora_ext.predictive.statistics import joined_statistics
from tests.support.models import lora_model, ragged_batches, without_labels
from tests.support.posteriors import (
    GRID,
    fitted,
    generator,
    some_precision,
    validation_loss,
)

N_CLASSES = 14
# Factor of the head's weights, for texts that differ in how sure the model is.
SURE = 80.0


FIXED = {"optimize_scale": False} | GRID


def with_classes(
    n_classes: int = N_CLASSES,
    sure: float = SURE,
    **keywords,
):
    """Fit a posterior of a classifier of many classes, which is sure of some texts."""
    model = lora_model("bert", n_labels=n_classes)
    model.base_model.classifier.modules_to_save["default"].weight.data.mul_(sure)
    return fitted(model=model, batches=batches_of(n_classes), **keywords)


def batches_of(n_classes: int = N_CLASSES, **keywords):
    return ragged_batches(n_classes=n_classes, **keywords)


def classes_that_matter(logits: torch.Tensor) -> list[list[int]]:
    """List the most probable class, then others until 0.001 is left."""
    chosen = []
    for row in logits:
        p = (row / 2).softmax(-1)
        order = row.argsort(descending=True).tolist()
        n_classes = 2
        while n_classes <= MOST and 1 - p[order[:n_classes]].sum() > 1e-3:
            n_classes += 1
        chosen.append(order[:n_classes])
    return chosen


def variance_of(
    f_var: torch.Tensor,
    j: int,
    k: int,
) -> float:
    """Variance of the difference of two logits."""
    return covariance_of_contrasts(f_var, j, j, top=k)


def covariance_of_contrasts(
    f_var: torch.Tensor,
    j: int,
    k: int,
    top: int,
) -> float:
    """Covariance of `f_j - f_top` and `f_k - f_top`."""
    of_j = f_var[j, k] - f_var[j, top]
    of_top = f_var[top, k] - f_var[top, top]
    return (of_j - of_top).item()


# --- which classes --------------------------------------------------------------------


def test_classes_are_compared_until_little_probability_is_left():
    logits = 8 * torch.randn(200, N_CLASSES, generator=generator()).double()
    expected = classes_that_matter(logits)
    lengths = {len(classes) for classes in expected}
    assert {2, 1 + MOST} < lengths
    found = Contrasts().classes(logits)
    assert found.shape == (200, 1 + MOST)
    for row, classes in zip(found.tolist(), expected, strict=True):
        n_missing = 1 + MOST - len(classes)
        assert row == classes + [-1] * n_missing
    sure = [len(classes) <= 4 for classes in expected]
    assert Contrasts().classes(logits[sure]).shape[1] == 4


@pytest.mark.parametrize("n_contrasts", [1, 5, N_CLASSES - 1, 100])
def test_as_many_are_compared_as_are_asked_for(n_contrasts):
    logits = torch.randn(5, N_CLASSES, generator=generator())
    order = logits.argsort(descending=True)
    found = Contrasts(n_contrasts).classes(logits)
    assert torch.equal(found, order[:, : 1 + n_contrasts])


# --- predictions ----------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["lowrank_kron", "diag"])
@pytest.mark.parametrize("link", ["mean_field", "mc"])
def test_all_contrasts_are_exact(link, structure):
    la = with_classes(structure=structure, prior_precision=0.5)
    batch = batches_of()[0]
    options = {"link_approx": link, "n_samples": 50}
    exact = la(la.predictive_moments(batch), generator=generator(), **options)
    found = la(batch, n_contrasts=N_CLASSES - 1, generator=generator(), **options)
    assert_close(found, exact)
    decided = la.predict(
        batch, link, n_contrasts=50, generator=generator(), n_samples=50
    )
    assert_close(decided.probabilities, exact)
    if link == "mean_field":
        proba = torch.from_numpy(la.predict_proba(batch, n_contrasts=50))
        assert_close(proba, exact)
    rough = la(batch, n_contrasts=1, generator=generator(), **options)
    assert (rough - exact).abs().max() > 1e-3


def test_known_contrasts_are_exact_and_others_alike():
    la = with_classes(prior_precision=0.5)
    for batch in batches_of():
        f_mu, exact = la.predictive_moments(batch)
        moments = moments_for(la, batch, "mean_field")
        assert torch.equal(moments.f_mu, f_mu)
        chosen = classes_that_matter(f_mu)
        for f_var, of_all, classes in zip(moments.f_var, exact, chosen, strict=True):
            top, *known = classes
            others = [c for c in range(N_CLASSES) if c not in classes]
            for j, k in product(classes, classes):
                expected = variance_of(of_all, j, k)
                assert variance_of(f_var, j, k) == pytest.approx(expected, abs=1e-9)
            variances = [variance_of(of_all, j, top) for j in known]
            mean = sum(variances) / len(variances)
            shared = [
                covariance_of_contrasts(of_all, j, k, top)
                for j, k in permutations(known, 2)
            ]
            # Of one contrast nobody knows what it shares with others.
            mean_shared = mean / 2
            if shared:
                mean_shared = sum(shared) / len(shared)
            assert 0 < mean_shared < mean
            for j in others:
                assert variance_of(f_var, j, top) == pytest.approx(mean)
            for j, k in permutations(others, 2):
                assert f_var[j, k].item() == pytest.approx(mean_shared)


def test_a_prediction_does_not_depend_on_the_other_texts_of_a_batch():
    la = with_classes(prior_precision=0.5)
    (batch,) = batches_of(batch_size=8)
    chosen = classes_that_matter(la.model(batch))
    lengths = set(map(len, chosen))
    assert len(lengths) > 2
    together = la(batch, link_approx="mean_field")
    alone = [la(each, link_approx="mean_field") for each in batches_of(batch_size=1)]
    assert_close(together, torch.cat(alone))


@pytest.mark.parametrize("n_known", [1, 2, 5])
def test_what_is_completed_is_a_covariance(n_known):
    root = torch.randn(50, n_known, 6, generator=generator()).double()
    order = torch.rand(50, N_CLASSES, generator=generator(1)).argsort(1)
    classes = order[:, : 1 + n_known]
    V = completed(root @ root.mT, classes, N_CLASSES)
    assert torch.linalg.eigvalsh(V).min() > -1e-9
    zeros = torch.zeros(50, n_known, n_known)
    nothing = completed(zeros, classes, N_CLASSES)
    assert not nothing.any()


# --- statistics and searches ----------------------------------------------------------


@pytest.mark.parametrize("n_contrasts", [None, 3])
@pytest.mark.parametrize("prior", ["scalar", "layerwise"])
def test_statistics_of_contrasts_predict_as_a_batch_does(prior, n_contrasts):
    la = with_classes()
    batches = batches_of()
    statistics = la.predictive_statistics(
        batches, dtype=torch.float64, n_contrasts=n_contrasts
    )
    la.prior_precision = some_precision(la, prior)
    moments = statistics.moments(la.prior_precision)
    found = la(moments, link_approx="mean_field")
    expected = [
        la(each, link_approx="mean_field", n_contrasts=n_contrasts) for each in batches
    ]
    assert_close(found, torch.cat(expected))

    index = torch.tensor([5, 0])
    part = statistics[index]
    of_part = part.moments(la.prior_precision)
    assert_close(of_part.f_var, moments.f_var[index])
    labels = torch.cat([each["labels"] for each in batches])
    assert torch.equal(part.targets, labels[index])
    halves = joined_statistics([statistics[:4], statistics[4:]])
    of_halves = halves.moments(la.prior_precision)
    assert_close(of_halves.f_var, moments.f_var)
    inputs = [without_labels(each) for each in batches]
    unlabelled = la.predictive_statistics(inputs, n_contrasts=n_contrasts)
    assert unlabelled.targets is None
    assert torch.equal(unlabelled.classes, statistics.classes)


def test_statistics_take_as_many_numbers_as_there_are_contrasts():
    la = with_classes(60, sure=1.0)
    statistics = la.predictive_statistics(batches_of(60))
    E = len(la.H.spectrum.leading)
    F = len(la.H.spectrum.remaining)
    assert statistics.projections.shape == (8, MOST, E)
    assert statistics.inner_products.shape == (8, F, MOST, MOST)
    assert statistics.classes.shape == (8, 1 + MOST)
    fewer = la.predictive_statistics(batches_of(60), n_contrasts=2)
    assert fewer.projections.shape == (8, 2, E)


@pytest.mark.parametrize("n_classes", [3, 9])
def test_few_classes_are_all_known(n_classes):
    la = with_classes(n_classes, prior_precision=0.5)
    batch = batches_of(n_classes)[0]
    statistics = la.predictive_statistics([batch], dtype=torch.float64)
    assert statistics.classes is None
    exact = la.predictive_moments(batch)
    assert_close(statistics.moments(0.5).f_var, exact.f_var)
    expected = mean_field(*exact).exp()
    assert_close(la(batch, link_approx="mean_field"), expected)


def test_all_contrasts_make_statistics_that_serve_every_link():
    la = with_classes(prior_precision=0.5)
    batch = batches_of()[0]
    statistics = la.predictive_statistics(
        [batch], dtype=torch.float64, n_contrasts=N_CLASSES - 1
    )
    moments = statistics.moments(0.5)
    assert_close(moments.f_var, la.predictive_moments(batch).f_var)
    found = la(moments, link_approx="probit")
    assert_close(found, la(batch, link_approx="probit"))


def searched(la, method, val_loader, **options):
    """Search with a method, and return the losses."""
    if method == "val_gd":
        options |= {"n_steps": 20, "generator": generator()}
    else:
        options |= FIXED
    history = la.optimize_prior_precision(
        method=method, val_loader=val_loader, **options
    )
    return history.objective


@pytest.mark.parametrize("method", ["gridsearch", "val_gd"])
@pytest.mark.parametrize("link", ["mean_field", "mc", "probit"])
@pytest.mark.filterwarnings("ignore:The best prior precision of the grid")
def test_searches_take_statistics_of_what_their_link_reads(link, method):
    la = with_classes()
    batches = batches_of(seed=5)
    torch.manual_seed(0)
    losses = searched(la, method, batches, link_approx=link)
    all_known = None if link != "probit" else N_CLASSES - 1
    statistics = la.predictive_statistics(batches, n_contrasts=all_known)
    assert (statistics.classes is None) == (link == "probit")
    torch.manual_seed(0)
    of_statistics = searched(la, method, statistics, link_approx=link)
    assert_close(losses, of_statistics, rtol=1e-5, atol=1e-5)
    if link == "mean_field" and method == "gridsearch":
        grid = torch.logspace(-2, 2, 7)
        direct = [
            validation_loss(la, point, batches, link_approx=link) for point in grid
        ]
        direct = torch.tensor(direct).double()
        assert_close(losses, direct, rtol=1e-4, atol=1e-4)


def test_a_link_that_reads_each_logit_refuses_differences():
    la = with_classes()
    batches = batches_of(seed=5)
    statistics = la.predictive_statistics(batches)
    moments = statistics.moments(1.0)
    assert isinstance(moments, DifferenceMoments)
    for part in (*moments.split(3), moments.to(torch.float64)):
        assert isinstance(part, DifferenceMoments)
        for link in ("probit", "bridge", "bridge_norm"):
            with pytest.raises(ValueError, match="n_contrasts=13"):
                la(part, link_approx=link)
        for read in (la.predictive_moments, la.functional_samples):
            with pytest.raises(ValueError, match="n_contrasts=13"):
                read(part)
        with pytest.raises(ValueError, match="n_contrasts=13"):
            la(part, link_approx="mc", diagonal_output=True)
    for method in ("gridsearch", "val_gd"):
        with pytest.raises(
            ValueError, match=r"'probit' reads each by itself.*n_contrasts=13"
        ):
            searched(la, method, statistics, link_approx="probit")
    with pytest.raises(ValueError, match="n_contrasts must be at least 1"):
        la(batches[0], link_approx="mean_field", n_contrasts=0)


@pytest.mark.filterwarnings("ignore:The best prior precision of the grid")
def test_agreement_and_mixtures_take_contrasts():
    la = with_classes()
    batches = batches_of()
    la.optimize_prior_precision(method="agreement", train_loader=batches)
    chosen = la.prior_precision.clone()
    statistics = la.predictive_statistics(batches)
    la.optimize_prior_precision(method="agreement", train_loader=statistics)
    assert_close(la.prior_precision, chosen)
    exact = la.predictive_statistics(batches, n_contrasts=N_CLASSES)
    la.optimize_prior_precision(method="agreement", train_loader=exact)
    assert_close(la.prior_precision, chosen, rtol=0.1, atol=0.0)

    mixture = LaplaceMixture([la, with_classes(prior_precision=3.0)])
    held = batches_of(seed=5)
    statistics = mixture.predictive_statistics(held, dtype=torch.float64)
    found = mixture(statistics.moments(2.0), link_approx="mean_field")
    mixture.prior_precision = 2.0
    expected = [mixture(each, link_approx="mean_field") for each in held]
    assert_close(found, torch.cat(expected))
    history = mixture.optimize_prior_precision(val_loader=held, **FIXED)
    metric = RunningNLLMetric()
    mixture.prior_precision = history.prior_precision[1]
    for each in held:
        metric.update(mixture(each, link_approx="mean_field"), each["labels"])
    nll = metric.compute().item()
    assert history.objective[1].item() == pytest.approx(nll, rel=1e-4)
    prediction = mixture.predict(held[0], n_contrasts=2)
    assert prediction.probabilities.shape == (3, N_CLASSES)
