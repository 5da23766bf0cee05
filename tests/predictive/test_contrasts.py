"""With many classes, those that matter are compared, others guessed."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from laplace_lora_ext import LaplaceMixture
from laplace_lora_ext.predictive.contrasts import MOST, Contrasts, completed
from laplace_lora_ext.predictive.distributions import moments_for
from laplace_lora_ext.predictive.links import mean_field
from laplace_lora_ext.predictive.moments import DifferenceMoments
from laplace_lora_ext.predictive.statistics import joined_statistics
from tests.support.dense import labels_of
from tests.support.models import lora_model, ragged_batches, without_labels
from tests.support.posteriors import (
    PRIORS_ALONE,
    fitted,
    generator,
    normal,
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

Batch = dict[str, torch.Tensor]


def with_classes(
    n_classes: int = N_CLASSES,
    sure: float = SURE,
    **keywords: Any,
):
    """Fit a posterior of a classifier of many classes, which is sure of some texts."""
    model = lora_model("bert", n_labels=n_classes)
    head = model.base_model.classifier.modules_to_save["default"]
    head.weight.data.mul_(sure)
    batches = batches_of(n_classes)
    return fitted(model=model, batches=batches, **keywords)


def batches_of(
    n_classes: int = N_CLASSES,
    **keywords: Any,
) -> list[Batch]:
    """Make batches with labels of so many classes."""
    return ragged_batches(n_classes=n_classes, **keywords)


@pytest.fixture
def la():
    """A posterior of fourteen classes, at a prior precision that leaves it unsure."""
    return with_classes(prior_precision=0.5)


@pytest.fixture
def batch() -> Batch:
    """The first batch of those that posteriors are fitted to."""
    return batches_of()[0]


def by_mean_field(
    la: Any,
    batches: Sequence[Any],
    **contrasts: Any,
) -> torch.Tensor:
    """Predict batch by batch."""
    p = [la(batch, link_approx="mean_field", **contrasts) for batch in batches]
    return torch.cat(p)


def classes_that_matter(logits: torch.Tensor) -> list[list[int]]:
    """List the most probable class, then others until 0.001 is left."""
    chosen = []
    for row in logits:
        # A temperature of 2 stands for how much a link may flatten.
        p = (row / 2).softmax(-1)
        order = row.argsort(descending=True)
        left = 1 - p[order].cumsum(0)
        n_classes = 2
        while n_classes <= MOST and left[n_classes - 1] > 1e-3:
            n_classes += 1
        classes = order[:n_classes]
        chosen.append(classes.tolist())
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
    on_diagonal = torch.eye(len(matrix)).bool()
    return matrix[~on_diagonal]


def assert_all_near(
    found: torch.Tensor,
    expected: torch.Tensor,
) -> None:
    """Compare all numbers with one."""
    assert_close(found, expected.expand_as(found), rtol=1e-6, atol=0)


# --- which classes --------------------------------------------------------------------


def logits_of_texts(
    n: int,
    scale: float = 1.0,
) -> torch.Tensor:
    return scale * normal(n, N_CLASSES)


def test_classes_are_compared_until_little_probability_is_left():
    # So large that some texts need one contrast, and some as many as there may be.
    logits = logits_of_texts(200, scale=8)
    expected = classes_that_matter(logits)
    lengths = {len(classes) for classes in expected}
    assert {2, 1 + MOST} < lengths

    found = Contrasts().classes(logits)
    assert found.shape == (200, 1 + MOST)
    for row, classes in zip(found.tolist(), expected, strict=True):
        n_missing = 1 + MOST - len(classes)
        assert row == classes + [-1] * n_missing


def test_texts_that_all_need_few_contrasts_have_no_columns_for_more():
    logits = logits_of_texts(200, scale=8)
    n_classes = [len(classes) for classes in classes_that_matter(logits)]
    need_few = torch.tensor(n_classes) <= 4
    found = Contrasts().classes(logits[need_few])
    assert found.shape[1] == 4


@pytest.mark.parametrize("n_contrasts", [1, 5, ALL_CONTRASTS, 100])
def test_as_many_are_compared_as_are_asked_for(n_contrasts):
    logits = logits_of_texts(5)
    order = logits.argsort(descending=True)
    expected = order[:, : 1 + n_contrasts]
    found = Contrasts(n_contrasts).classes(logits)
    assert torch.equal(found, expected)


# --- predictions ----------------------------------------------------------------------


@pytest.fixture(params=["lowrank_kron", "diag"])
def of_structure(request: pytest.FixtureRequest):
    """A posterior of fourteen classes of structures that treat contrasts unlike."""
    return with_classes(structure=request.param, prior_precision=0.5)


def predicted(
    la: Any,
    inputs: Any,
    link: str,
    **contrasts: Any,
) -> torch.Tensor:
    """Predict with the same noise for "mc" each time."""
    return la(
        inputs,
        link_approx=link,
        n_samples=50,
        generator=generator(),
        **contrasts,
    )


@pytest.mark.parametrize("link", ["mean_field", "mc"])
def test_all_contrasts_are_exact(of_structure, batch, link):
    moments = of_structure.predictive_moments(batch)
    exact = predicted(of_structure, moments, link)
    found = predicted(of_structure, batch, link, n_contrasts=ALL_CONTRASTS)
    assert_close(found, exact)
    # Otherwise the equality would hold of any contrasts.
    rough = predicted(of_structure, batch, link, n_contrasts=1)
    error = (rough - exact).abs().max()
    assert error > 1e-3


@pytest.mark.parametrize("link", ["mean_field", "mc"])
def test_decisions_by_all_contrasts_are_exact(of_structure, batch, link):
    moments = of_structure.predictive_moments(batch)
    exact = predicted(of_structure, moments, link)
    decided = of_structure.predict(
        batch,
        link,
        n_contrasts=50,
        generator=generator(),
        n_samples=50,
    )
    assert_close(decided.probabilities, exact)


def test_probabilities_by_all_contrasts_are_exact(of_structure, batch):
    moments = of_structure.predictive_moments(batch)
    # Not of "mc": `predict_proba` takes no generator, so that its draws are others.
    exact = predicted(of_structure, moments, "mean_field")
    proba = of_structure.predict_proba(batch, n_contrasts=50)
    assert_close(torch.from_numpy(proba), exact)


def test_known_contrasts_are_exact_and_others_alike(la):
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
    found = variances_of_differences(f_var)
    expected = variances_of_differences(exact)
    assert_close(
        found[classes][:, classes],
        expected[classes][:, classes],
        rtol=0,
        atol=1e-9,
    )

    top, *known = classes
    of_contrasts = covariances_of_contrasts(exact, top)
    of_known = of_contrasts[known][:, known]
    variance = of_known.diagonal().mean()
    # Of one contrast nobody knows what it shares with others.
    shared = variance / 2
    if len(known) > 1:
        shared = off_diagonal(of_known).mean()
    assert 0 < shared < variance

    others = [c for c in range(N_CLASSES) if c not in classes]
    variances = covariances_of_contrasts(f_var, top).diagonal()
    assert_all_near(variances[others], variance)
    # The row of the most probable class is 0: these are covariances of contrasts.
    of_others = f_var[others][:, others]
    assert_all_near(off_diagonal(of_others), shared)


def test_a_prediction_does_not_depend_on_the_other_texts_of_a_batch(la):
    (all_texts,) = batches_of(batch_size=8)
    each_text = batches_of(batch_size=1)
    # Texts need more contrasts beside each other than some of them do alone.
    chosen = classes_that_matter(la.model(all_texts))
    lengths = {len(classes) for classes in chosen}
    assert len(lengths) > 2
    together = by_mean_field(la, [all_texts])
    alone = by_mean_field(la, each_text)
    assert_close(together, alone)


def drawn_classes(
    n: int,
    n_known: int,
) -> torch.Tensor:
    """Draw a most probable class and others that are compared with it."""
    drawn = torch.rand(n, N_CLASSES, generator=generator(1))
    order = drawn.argsort(1)
    return order[:, : 1 + n_known]


@pytest.fixture(params=[1, 2, 5], ids="{} known".format)
def n_known(request: pytest.FixtureRequest) -> int:
    """The number of contrasts whose covariance is known."""
    return request.param


def test_what_is_completed_is_a_covariance(n_known):
    root = normal(50, n_known, 6)
    of_known = root @ root.mT
    V = completed(of_known, drawn_classes(50, n_known), N_CLASSES)
    smallest = torch.linalg.eigvalsh(V).min()
    assert smallest > -1e-9


def test_where_nothing_varies_nothing_is_completed(n_known):
    # A mean of what is known, relative to its variance, would be 0 / 0.
    zeros = torch.zeros(50, n_known, n_known)
    V = completed(zeros, drawn_classes(50, n_known), N_CLASSES)
    assert not V.any()


# --- statistics and searches ----------------------------------------------------------


@pytest.fixture(params=[None, 3], ids=["as needed", "three"])
def n_contrasts(request: pytest.FixtureRequest) -> int | None:
    return request.param


def statistics_of(
    la: Any,
    batches: Sequence[Batch],
    n_contrasts: int | None,
):
    """Compute statistics in float64, as predictions of batches are."""
    return la.predictive_statistics(
        batches,
        dtype=torch.float64,
        n_contrasts=n_contrasts,
    )


@pytest.mark.parametrize("prior", ["scalar", "layerwise"])
def test_statistics_of_contrasts_predict_as_a_batch_does(prior, n_contrasts):
    la = with_classes()
    batches = batches_of()
    statistics = statistics_of(la, batches, n_contrasts)
    la.prior_precision = some_precision(la, prior)
    moments = statistics.moments(la.prior_precision)
    found = la(moments, link_approx="mean_field")
    expected = by_mean_field(la, batches, n_contrasts=n_contrasts)
    assert_close(found, expected)


@pytest.mark.parametrize("prior", ["scalar", "layerwise"])
def test_statistics_of_contrasts_can_be_divided_and_joined(la, prior, n_contrasts):
    statistics = statistics_of(la, batches_of(), n_contrasts)
    prior_precision = some_precision(la, prior)
    _, f_var = statistics.moments(prior_precision)
    index = torch.tensor([5, 0])
    _, of_part = statistics[index].moments(prior_precision)
    assert_close(of_part, f_var[index])

    halves = joined_statistics([statistics[:4], statistics[4:]])
    _, of_halves = halves.moments(prior_precision)
    assert_close(of_halves, f_var)


def test_a_part_of_statistics_has_its_labels(la, n_contrasts):
    batches = batches_of()
    statistics = statistics_of(la, batches, n_contrasts)
    index = torch.tensor([5, 0])
    part = statistics[index]
    expected = labels_of(batches)[index]
    assert torch.equal(part.targets, expected)


def test_statistics_need_no_labels(la, n_contrasts):
    batches = batches_of()
    labelled = statistics_of(la, batches, n_contrasts)
    inputs = [without_labels(batch) for batch in batches]
    unlabelled = statistics_of(la, inputs, n_contrasts)
    assert unlabelled.targets is None
    assert torch.equal(unlabelled.classes, labelled.classes)


def test_statistics_take_as_many_numbers_as_there_are_contrasts():
    # So unsure a model needs the most contrasts.
    la = with_classes(n_classes=60, sure=1.0)
    statistics = la.predictive_statistics(batches_of(60))
    spectrum = la.H.spectrum
    n_leading = len(spectrum.leading)
    n_remaining = len(spectrum.remaining)
    assert statistics.projections.shape == (8, MOST, n_leading)
    assert statistics.inner_products.shape == (8, n_remaining, MOST, MOST)
    assert statistics.classes.shape == (8, 1 + MOST)


def test_statistics_of_fewer_contrasts_take_fewer_numbers():
    la = with_classes(n_classes=60, sure=1.0)
    statistics = la.predictive_statistics(batches_of(60), n_contrasts=2)
    n_leading = len(la.H.spectrum.leading)
    assert statistics.projections.shape == (8, 2, n_leading)


@pytest.mark.parametrize("n_classes", [3, 9])
def test_few_classes_are_all_known(n_classes):
    la = with_classes(n_classes, prior_precision=0.5)
    batch = batches_of(n_classes)[0]
    statistics = statistics_of(la, [batch], n_contrasts=None)
    assert statistics.classes is None
    f_mu, f_var = la.predictive_moments(batch)
    _, found = statistics.moments(0.5)
    assert_close(found, f_var)
    expected = mean_field(f_mu, f_var).exp()
    assert_close(la(batch, link_approx="mean_field"), expected)


def test_all_contrasts_make_statistics_that_serve_every_link(la, batch):
    statistics = statistics_of(la, [batch], ALL_CONTRASTS)
    moments = statistics.moments(0.5)
    exact = la.predictive_moments(batch)
    assert_close(moments.f_var, exact.f_var)
    found = la(moments, link_approx="probit")
    expected = la(batch, link_approx="probit")
    assert_close(found, expected)


# --- searches -------------------------------------------------------------------------


def searched(
    la: Any,
    method: str,
    val_loader: Any,
    link: str,
) -> torch.Tensor:
    """Search with a method, and return the losses."""
    options: dict[str, Any] = PRIORS_ALONE
    if method == "val_gd":
        options = {
            "n_steps": 20,
            "generator": generator(),
        }
    # "mc" of a grid draws its noise from the global generator.
    torch.manual_seed(0)
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
    losses = searched(la, method, batches, link)
    reads_each_logit = link in EACH_LOGIT
    n_contrasts = ALL_CONTRASTS if reads_each_logit else None
    statistics = la.predictive_statistics(batches, n_contrasts=n_contrasts)
    # What has all contrasts names no classes.
    assert (statistics.classes is None) == reads_each_logit
    of_statistics = searched(la, method, statistics, link)
    # Statistics are in float32 unless told otherwise.
    assert_close(losses, of_statistics, rtol=1e-5, atol=1e-5)


def test_a_searchs_losses_are_those_of_predictions():
    la = with_classes()
    batches = batches_of(seed=5)
    losses = searched(la, "gridsearch", batches, "mean_field")
    direct = []
    # The grid of `PRIORS_ALONE`.
    for prior_precision in torch.logspace(-2, 2, 7):
        loss = validation_loss(la, prior_precision, batches, link_approx="mean_field")
        direct.append(loss)
    expected = torch.tensor(direct).double()
    # The search's statistics are in float32.
    assert_close(losses, expected, rtol=1e-4, atol=1e-4)


# --- links that read each logit -------------------------------------------------------


@pytest.fixture
def of_differences(la) -> DifferenceMoments:
    """Moments that know differences of two logits alone."""
    statistics = la.predictive_statistics(batches_of(seed=5))
    return statistics.moments(1.0)


def test_parts_and_copies_of_moments_of_differences_are_no_other(of_differences):
    assert isinstance(of_differences, DifferenceMoments)
    copy = of_differences.to(torch.float64)
    assert isinstance(copy, DifferenceMoments)
    for part in of_differences.split(3):
        assert isinstance(part, DifferenceMoments)


@pytest.mark.parametrize("link", EACH_LOGIT)
def test_a_link_that_reads_each_logit_refuses_differences(la, of_differences, link):
    with pytest.raises(ValueError, match="n_contrasts=13"):
        la(of_differences, link_approx=link)


def test_draws_without_correlations_refuse_differences(la, of_differences):
    with pytest.raises(ValueError, match="n_contrasts=13"):
        la(of_differences, link_approx="mc", diagonal_output=True)


def test_logits_themselves_cannot_be_told_from_differences(la, of_differences):
    for read in (la.predictive_moments, la.functional_samples):
        with pytest.raises(ValueError, match="n_contrasts=13"):
            read(of_differences)


@pytest.mark.parametrize("method", ["gridsearch", "val_gd"])
def test_a_search_by_a_link_that_reads_each_logit_refuses_differences(method):
    la = with_classes()
    statistics = la.predictive_statistics(batches_of(seed=5))
    message = r"'probit' reads each by itself.*n_contrasts=13"
    with pytest.raises(ValueError, match=message):
        searched(la, method, statistics, "probit")


def test_no_contrasts_are_refused(la, batch):
    with pytest.raises(ValueError, match="n_contrasts must be at least 1"):
        la(batch, link_approx="mean_field", n_contrasts=0)


# --- agreement and mixtures -----------------------------------------------------------


def agreed(
    la: Any,
    data: Any,
) -> torch.Tensor:
    """Choose the prior precision at which draws agree on the data."""
    la.optimize_prior_precision(method="agreement", train_loader=data)
    return la.prior_precision.clone()


@pytest.mark.filterwarnings("ignore:The best prior precision of the grid")
def test_agreement_takes_contrasts():
    la = with_classes()
    batches = batches_of()
    chosen = agreed(la, batches)
    statistics = la.predictive_statistics(batches)
    assert_close(agreed(la, statistics), chosen)
    exact = la.predictive_statistics(batches, n_contrasts=N_CLASSES)
    # Guessed covariances move the choice, if little.
    assert_close(agreed(la, exact), chosen, rtol=0.1, atol=0.0)


@pytest.fixture
def mixture() -> LaplaceMixture:
    """Two posteriors of fourteen classes that differ in their priors."""
    return LaplaceMixture(
        [
            with_classes(),
            with_classes(prior_precision=3.0),
        ]
    )


def test_a_mixtures_statistics_of_contrasts_predict_as_batches_do(mixture):
    held = batches_of(seed=5)
    statistics = mixture.predictive_statistics(held, dtype=torch.float64)
    moments = statistics.moments(2.0)
    found = mixture(moments, link_approx="mean_field")
    mixture.prior_precision = 2.0
    expected = by_mean_field(mixture, held)
    assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:The best prior precision of the grid")
def test_a_mixture_searches_by_contrasts(mixture):
    held = batches_of(seed=5)
    history = mixture.optimize_prior_precision(val_loader=held, **PRIORS_ALONE)
    tried = history.prior_precision[1]
    found = history.objective[1].item()
    expected = validation_loss(mixture, tried, held, link_approx="mean_field")
    assert found == pytest.approx(expected, rel=1e-4)


def test_a_mixture_decides_by_contrasts(mixture, batch):
    prediction = mixture.predict(batch, n_contrasts=2)
    assert prediction.probabilities.shape == (3, N_CLASSES)
