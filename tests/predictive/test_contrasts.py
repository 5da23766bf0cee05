"""With many classes, those that matter are compared, others guessed."""

import pytest
import torch
from torch.testing import assert_close

from laplace_lora_ext import LaplaceMixture
from laplace_lora_ext.predictive.contrasts import MOST, Contrasts, completed
from laplace_lora_ext.predictive.distributions import moments_for
from laplace_lora_ext.predictive.links import mean_field
from laplace_lora_ext.predictive.moments import DifferenceMoments
from laplace_lora_ext.predictive.statistics import joined_statistics
from tests.support.models import lora_model, ragged_batches, without_labels
from tests.support.posteriors import (
    PRIORS_ALONE,
    fitted,
    generator,
    some_precision,
    validation_loss,
)

# More than the nine that are ever compared, so that some are guessed.
N_CLASSES = 14
ALL_CONTRASTS = N_CLASSES - 1
# Factor of the head's weights, for texts that differ in how sure the model is.
SURE = 80.0
EACH_LOGIT = ("probit", "bridge", "bridge_norm")
"""Links that read each logit by itself, not differences of two."""


def with_classes(
    n_classes: int = N_CLASSES,
    sure: float = SURE,
    **keywords,
):
    """Fit a posterior of a classifier of many classes, which is sure of some texts."""
    model = lora_model("bert", n_labels=n_classes)
    head = model.base_model.classifier.modules_to_save["default"]
    head.weight.data.mul_(sure)
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


def variances_of_differences(f_var: torch.Tensor) -> torch.Tensor:
    """Compute the variance `(C, C)` of each two logits' difference."""
    variances = f_var.diagonal()
    return variances[:, None] + variances - 2 * f_var


def covariances_of_contrasts(
    f_var: torch.Tensor,
    top: int,
) -> torch.Tensor:
    """Compute covariances `(C, C)` of all logits' differences from one of them."""
    with_top = f_var[top]
    return f_var - with_top[:, None] - with_top + with_top[top]


def off_diagonal(matrix: torch.Tensor) -> torch.Tensor:
    """Take all numbers of a matrix but its diagonal."""
    return matrix[~torch.eye(len(matrix)).bool()]


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
    # Texts that all need few contrasts have no columns for more.
    sure = [len(classes) <= 4 for classes in expected]
    assert Contrasts().classes(logits[sure]).shape[1] == 4


@pytest.mark.parametrize("n_contrasts", [1, 5, ALL_CONTRASTS, 100])
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

    def predicted(inputs, **contrasts):
        # "mc" draws the same noise each time.
        return la(
            inputs,
            link_approx=link,
            n_samples=50,
            generator=generator(),
            **contrasts,
        )

    exact = predicted(la.predictive_moments(batch))
    assert_close(predicted(batch, n_contrasts=ALL_CONTRASTS), exact)
    decided = la.predict(
        batch,
        link,
        n_contrasts=50,
        generator=generator(),
        n_samples=50,
    )
    assert_close(decided.probabilities, exact)
    # It takes no generator: its draws of "mc" are others.
    if link == "mean_field":
        proba = la.predict_proba(batch, n_contrasts=50)
        assert_close(torch.from_numpy(proba), exact)
    # Otherwise the equalities above would hold of any contrasts.
    rough = predicted(batch, n_contrasts=1)
    assert (rough - exact).abs().max() > 1e-3


def test_known_contrasts_are_exact_and_others_alike():
    la = with_classes(prior_precision=0.5)
    for batch in batches_of():
        f_mu, exact = la.predictive_moments(batch)
        moments = moments_for(la, batch, "mean_field")
        assert torch.equal(moments.f_mu, f_mu)
        chosen = classes_that_matter(f_mu)
        for f_var, of_all, classes in zip(moments.f_var, exact, chosen, strict=True):
            assert_known_exact_and_others_alike(f_var, of_all, classes)


def assert_known_exact_and_others_alike(
    f_var: torch.Tensor,
    exact: torch.Tensor,
    classes: list[int],
) -> None:
    """Compare a text's covariance `(C, C)` with the exact one."""
    found = variances_of_differences(f_var)[classes][:, classes]
    expected = variances_of_differences(exact)[classes][:, classes]
    assert_close(found, expected, rtol=0, atol=1e-9)

    top, *known = classes
    of_known = covariances_of_contrasts(exact, top)[known][:, known]
    variance = of_known.diagonal().mean()
    # Of one contrast nobody knows what it shares with others.
    shared = variance / 2
    if len(known) > 1:
        shared = off_diagonal(of_known).mean()
    assert 0 < shared < variance

    others = [c for c in range(N_CLASSES) if c not in classes]
    of_others = covariances_of_contrasts(f_var, top).diagonal()[others]
    assert_close(of_others, variance.expand_as(of_others), rtol=1e-6, atol=0)
    # The row of the most probable class is 0: these are covariances of contrasts.
    between_others = off_diagonal(f_var[others][:, others])
    assert_close(between_others, shared.expand_as(between_others), rtol=1e-6, atol=0)


def test_a_prediction_does_not_depend_on_the_other_texts_of_a_batch():
    la = with_classes(prior_precision=0.5)
    (batch,) = batches_of(batch_size=8)
    chosen = classes_that_matter(la.model(batch))
    lengths = {len(classes) for classes in chosen}
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
    # Where nothing varies, a mean of what is known would be 0 / 0.
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
        batches,
        dtype=torch.float64,
        n_contrasts=n_contrasts,
    )
    la.prior_precision = some_precision(la, prior)
    moments = statistics.moments(la.prior_precision)
    found = la(moments, link_approx="mean_field")
    expected = [
        la(batch, link_approx="mean_field", n_contrasts=n_contrasts)
        for batch in batches
    ]
    assert_close(found, torch.cat(expected))

    index = torch.tensor([5, 0])
    part = statistics[index]
    of_part = part.moments(la.prior_precision)
    assert_close(of_part.f_var, moments.f_var[index])
    labels = torch.cat([batch["labels"] for batch in batches])
    assert torch.equal(part.targets, labels[index])

    halves = joined_statistics([statistics[:4], statistics[4:]])
    of_halves = halves.moments(la.prior_precision)
    assert_close(of_halves.f_var, moments.f_var)

    inputs = [without_labels(batch) for batch in batches]
    unlabelled = la.predictive_statistics(inputs, n_contrasts=n_contrasts)
    assert unlabelled.targets is None
    assert torch.equal(unlabelled.classes, statistics.classes)


def test_statistics_take_as_many_numbers_as_there_are_contrasts():
    # So unsure a model needs the most contrasts.
    la = with_classes(n_classes=60, sure=1.0)
    batches = batches_of(60)
    E = len(la.H.spectrum.leading)
    F = len(la.H.spectrum.remaining)
    statistics = la.predictive_statistics(batches)
    assert statistics.projections.shape == (8, MOST, E)
    assert statistics.inner_products.shape == (8, F, MOST, MOST)
    assert statistics.classes.shape == (8, 1 + MOST)
    fewer = la.predictive_statistics(batches, n_contrasts=2)
    assert fewer.projections.shape == (8, 2, E)


@pytest.mark.parametrize("n_classes", [3, 9])
def test_few_classes_are_all_known(n_classes):
    la = with_classes(n_classes, prior_precision=0.5)
    batch = batches_of(n_classes)[0]
    statistics = la.predictive_statistics([batch], dtype=torch.float64)
    assert statistics.classes is None
    exact = la.predictive_moments(batch)
    assert_close(statistics.moments(0.5).f_var, exact.f_var)
    expected = mean_field(exact.f_mu, exact.f_var).exp()
    assert_close(la(batch, link_approx="mean_field"), expected)


def test_all_contrasts_make_statistics_that_serve_every_link():
    la = with_classes(prior_precision=0.5)
    batch = batches_of()[0]
    statistics = la.predictive_statistics(
        [batch],
        dtype=torch.float64,
        n_contrasts=ALL_CONTRASTS,
    )
    moments = statistics.moments(0.5)
    exact = la.predictive_moments(batch)
    assert_close(moments.f_var, exact.f_var)
    found = la(moments, link_approx="probit")
    assert_close(found, la(batch, link_approx="probit"))


def searched(la, method: str, val_loader, link: str) -> torch.Tensor:
    """Search with a method, and return the losses."""
    if method == "val_gd":
        options = {"n_steps": 20, "generator": generator()}
    else:
        options = PRIORS_ALONE
    history = la.optimize_prior_precision(
        method=method,
        val_loader=val_loader,
        link_approx=link,
        **options,
    )
    return history.objective


@pytest.mark.parametrize("method", ["gridsearch", "val_gd"])
@pytest.mark.parametrize("link", ["mean_field", "mc", "probit"])
@pytest.mark.filterwarnings("ignore:The best prior precision of the grid")
def test_searches_take_statistics_of_what_their_link_reads(link, method):
    la = with_classes()
    batches = batches_of(seed=5)
    # Both searches draw the same noise for "mc".
    torch.manual_seed(0)
    losses = searched(la, method, batches, link)

    n_contrasts = ALL_CONTRASTS if link == "probit" else None
    statistics = la.predictive_statistics(batches, n_contrasts=n_contrasts)
    # What has all contrasts names no classes.
    assert (statistics.classes is None) == (link == "probit")
    torch.manual_seed(0)
    of_statistics = searched(la, method, statistics, link)
    assert_close(losses, of_statistics, rtol=1e-5, atol=1e-5)


def test_a_searchs_losses_are_those_of_predictions():
    la = with_classes()
    batches = batches_of(seed=5)
    losses = searched(la, "gridsearch", batches, "mean_field")
    direct = []
    for prior_precision in torch.logspace(-2, 2, 7):
        loss = validation_loss(la, prior_precision, batches, link_approx="mean_field")
        direct.append(loss)
    expected = torch.tensor(direct).double()
    # The search's statistics are in float32.
    assert_close(losses, expected, rtol=1e-4, atol=1e-4)


# --- links that read each logit -------------------------------------------------------


def test_a_link_that_reads_each_logit_refuses_differences():
    la = with_classes()
    statistics = la.predictive_statistics(batches_of(seed=5))
    moments = statistics.moments(1.0)
    assert isinstance(moments, DifferenceMoments)
    for part in (*moments.split(3), moments.to(torch.float64)):
        assert isinstance(part, DifferenceMoments)
        for link in EACH_LOGIT:
            with pytest.raises(ValueError, match="n_contrasts=13"):
                la(part, link_approx=link)
        for read in (la.predictive_moments, la.functional_samples):
            with pytest.raises(ValueError, match="n_contrasts=13"):
                read(part)
        with pytest.raises(ValueError, match="n_contrasts=13"):
            la(part, link_approx="mc", diagonal_output=True)


@pytest.mark.parametrize("method", ["gridsearch", "val_gd"])
def test_a_search_by_a_link_that_reads_each_logit_refuses_differences(method):
    la = with_classes()
    statistics = la.predictive_statistics(batches_of(seed=5))
    message = r"'probit' reads each by itself.*n_contrasts=13"
    with pytest.raises(ValueError, match=message):
        searched(la, method, statistics, "probit")


def test_no_contrasts_are_refused():
    la = with_classes()
    with pytest.raises(ValueError, match="n_contrasts must be at least 1"):
        la(batches_of()[0], link_approx="mean_field", n_contrasts=0)


# --- agreement and mixtures -----------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The best prior precision of the grid")
def test_agreement_takes_contrasts():
    la = with_classes()
    batches = batches_of()

    def agreed(data):
        la.optimize_prior_precision(method="agreement", train_loader=data)
        return la.prior_precision.clone()

    chosen = agreed(batches)
    statistics = la.predictive_statistics(batches)
    assert_close(agreed(statistics), chosen)
    exact = la.predictive_statistics(batches, n_contrasts=N_CLASSES)
    # Guessed covariances move the choice, if little.
    assert_close(agreed(exact), chosen, rtol=0.1, atol=0.0)


@pytest.mark.filterwarnings("ignore:The best prior precision of the grid")
def test_mixtures_take_contrasts():
    mixture = LaplaceMixture([with_classes(), with_classes(prior_precision=3.0)])
    held = batches_of(seed=5)
    statistics = mixture.predictive_statistics(held, dtype=torch.float64)
    found = mixture(statistics.moments(2.0), link_approx="mean_field")
    mixture.prior_precision = 2.0
    expected = [mixture(batch, link_approx="mean_field") for batch in held]
    assert_close(found, torch.cat(expected))

    history = mixture.optimize_prior_precision(val_loader=held, **PRIORS_ALONE)
    tried = history.prior_precision[1]
    nll = validation_loss(mixture, tried, held, link_approx="mean_field")
    assert history.objective[1].item() == pytest.approx(nll, rel=1e-4)

    prediction = mixture.predict(held[0], n_contrasts=2)
    assert prediction.probabilities.shape == (3, N_CLASSES)
