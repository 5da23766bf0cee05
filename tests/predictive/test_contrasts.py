"""With many classes, those that matter are compared, others guessed."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from laplace_lora_ext import LaplaceMixture, Moments
from laplace_lora_ext.predictive.contrasts import (
    MOST,
    NO_CLASS,
    Contrasts,
    completed,
)
from laplace_lora_ext.predictive.links import mean_field
from laplace_lora_ext.predictive.posterior import moments_for
from laplace_lora_ext.predictive.statistics import join_statistics
from tests.support.dense import labels_of
from tests.support.models import (
    first_batch,
    lora_model,
    ragged_batches,
    without_labels,
)
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

Batch = dict[str, Tensor]


def with_classes(
    n_classes: int = N_CLASSES,
    sure: float = SURE,
    **keywords: Any,
):
    """Fit a posterior of a classifier of many classes, which is sure of some texts."""
    model = lora_model("bert", n_labels=n_classes)
    heads = model.base_model.classifier.modules_to_save
    heads["default"].weight.data.mul_(sure)
    return fitted(
        model=model,
        batches=batches_of(n_classes),
        **keywords,
    )


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
    return first_batch(n_classes=N_CLASSES)


@pytest.fixture
def others() -> list[Batch]:
    """Batches of texts that no posterior is fitted to."""
    return batches_of(seed=5)


def by_mean_field(
    la: Any,
    batches: Sequence[Any],
) -> Tensor:
    """Predict batch by batch."""
    predictions = [la(batch, link_approx="mean_field") for batch in batches]
    return torch.cat(predictions)


def classes_that_matter(logits: Tensor) -> list[list[int]]:
    """List the most probable class, then others until 0.001 is left."""
    chosen = []
    for row in logits:
        # A temperature of 2 stands for how much a link may flatten.
        flattened = row / 2
        p = flattened.softmax(-1)
        order = row.argsort(descending=True)
        left = 1 - p[order].cumsum(0)
        # So many first classes leave too much.
        n_too_few = int((left > 1e-3).sum())
        n_classes = 1 + max(n_too_few, 1)
        classes = order[: min(n_classes, 1 + MOST)]
        chosen.append(classes.tolist())
    return chosen


def lengths_of(chosen: list[list[int]]) -> set[int]:
    """Name the numbers of classes that texts need."""
    return {len(classes) for classes in chosen}


def variances_of_differences(f_var: Tensor) -> Tensor:
    """Compute the variance `(C, C)` of each two logits' difference."""
    variances = f_var.diagonal()
    return variances[:, None] + variances - 2 * f_var


def covariances_of_contrasts(
    f_var: Tensor,
    top: int,
) -> Tensor:
    """Compute covariances `(C, C)` of all logits' differences from one of them."""
    with_top = f_var[top]
    return f_var - with_top[:, None] - with_top + with_top[top]


def off_diagonal(matrix: Tensor) -> Tensor:
    """Take all numbers of a matrix but its diagonal."""
    on_diagonal = torch.eye(len(matrix)).bool()
    return matrix[~on_diagonal]


def assert_all_near(
    found: Tensor,
    expected: Tensor,
) -> None:
    """Compare all numbers with one."""
    assert_close(found, expected.expand_as(found), rtol=1e-6, atol=0)


# --- which classes --------------------------------------------------------------------


def logits_of_texts(
    n: int,
    scale: float = 1.0,
) -> Tensor:
    return scale * normal(n, N_CLASSES)


def test_classes_are_compared_until_little_probability_is_left():
    # So large that some texts need one contrast, and some as many as there may be.
    logits = logits_of_texts(200, scale=8)
    expected = classes_that_matter(logits)
    most = 1 + MOST
    assert {2, most} < lengths_of(expected)

    found = Contrasts().classes(logits)
    assert found.shape == (200, most)
    rows = found.tolist()
    for row, classes in zip(rows, expected, strict=True):
        n_missing = most - len(classes)
        assert row == classes + [-1] * n_missing


def test_texts_that_all_need_few_contrasts_have_no_columns_for_more():
    logits = logits_of_texts(200, scale=8)
    needing_few = []
    for text, classes in enumerate(classes_that_matter(logits)):
        if len(classes) <= 4:
            needing_few.append(text)
    few = logits[needing_few]
    found = Contrasts().classes(few)
    assert found.shape[1] == 4


@pytest.mark.parametrize(
    "n_contrasts",
    [
        1,
        5,
        ALL_CONTRASTS,
        # More than there are.
        100,
    ],
)
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
    return with_classes(
        structure=request.param,
        prior_precision=0.5,
    )


def predicted(
    la: Any,
    inputs: Any,
    link: str,
) -> Tensor:
    """Predict with the same noise for "mc" each time."""
    return la(
        inputs,
        link_approx=link,
        n_samples=50,
        generator=generator(),
    )


@pytest.mark.parametrize("link", ["mean_field", "mc"])
def test_all_contrasts_are_exact(of_structure, batch, link):
    moments = of_structure.predictive_moments(batch)
    exact = predicted(of_structure, moments, link)
    of_structure.n_contrasts = ALL_CONTRASTS
    found = predicted(of_structure, batch, link)
    assert_close(found, exact)
    # Otherwise the equality would hold of any contrasts.
    of_structure.n_contrasts = 1
    rough = predicted(of_structure, batch, link)
    errors = (rough - exact).abs()
    assert errors.max() > 1e-3


@pytest.mark.parametrize("link", ["mean_field", "mc"])
def test_decisions_by_all_contrasts_are_exact(of_structure, batch, link):
    moments = of_structure.predictive_moments(batch)
    exact = predicted(of_structure, moments, link)
    of_structure.n_contrasts = 50
    decided = of_structure.predict(
        batch,
        link,
        generator=generator(),
        n_samples=50,
    )
    assert_close(decided.probabilities, exact)


def test_probabilities_by_all_contrasts_are_exact(of_structure, batch):
    moments = of_structure.predictive_moments(batch)
    # Not of "mc": `predict_proba` takes no generator, so that its draws are others.
    exact = predicted(of_structure, moments, "mean_field")
    of_structure.n_contrasts = 50
    proba = of_structure.predict_proba(batch)
    found = torch.from_numpy(proba)
    assert_close(found, exact)


def test_known_contrasts_are_exact_and_others_alike(la):
    for batch in batches_of():
        f_mu, exact = la.predictive_moments(batch)
        moments = moments_for(la, batch, "mean_field")
        assert torch.equal(moments.f_mu, f_mu)
        chosen = classes_that_matter(f_mu)
        for text, classes in enumerate(chosen):
            assert_known_exact_and_others_alike(
                f_var=moments.f_var[text],
                exact=exact[text],
                classes=classes,
            )


def assert_known_exact_and_others_alike(
    f_var: Tensor,
    exact: Tensor,
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

    all_classes = range(N_CLASSES)
    others = [c for c in all_classes if c not in classes]
    guessed = covariances_of_contrasts(f_var, top)
    variances = guessed.diagonal()
    assert_all_near(variances[others], variance)
    # The row of the most probable class is 0: these are covariances of contrasts.
    of_others = f_var[others][:, others]
    assert_all_near(off_diagonal(of_others), shared)


def test_a_prediction_does_not_depend_on_the_other_texts_of_a_batch(la):
    (all_texts,) = batches_of(batch_size=8)
    each_text = batches_of(batch_size=1)
    # Texts need more contrasts beside each other than some of them do alone.
    chosen = classes_that_matter(la.model(all_texts))
    assert len(lengths_of(chosen)) > 2
    together = by_mean_field(la, [all_texts])
    alone = by_mean_field(la, each_text)
    assert_close(together, alone)


def drawn_classes(
    n: int,
    n_known: int,
) -> Tensor:
    """Draw a most probable class and others that are compared with it."""
    drawn = normal(n, N_CLASSES, seed=1)
    order = drawn.argsort(1)
    return order[:, : 1 + n_known]


@pytest.fixture(
    params=[1, 2, 5],
    ids="{} known".format,
)
def n_known(request: pytest.FixtureRequest) -> int:
    """The number of contrasts whose covariance is known."""
    return request.param


def test_what_is_completed_is_a_covariance(n_known):
    root = normal(50, n_known, 6)
    of_known = root @ root.mT
    classes = drawn_classes(50, n_known)
    V = completed(of_known, classes, N_CLASSES)
    eigenvalues = torch.linalg.eigvalsh(V)
    # Below 0 by rounding alone.
    assert eigenvalues.min() > -1e-9


@pytest.mark.parametrize("n_known", [2, 5])
def test_contrasts_that_are_all_alike_are_completed_exactly(n_known):
    shared = torch.full((N_CLASSES, N_CLASSES), 0.7).double()
    expected = shared + 1.3 * torch.eye(N_CLASSES)
    classes = torch.arange(6)[None]
    # Where one needs fewer than others.
    classes[:, 1 + n_known :] = NO_CLASS
    expected[0] = expected[:, 0] = 0  # the most probable class
    of_known = torch.zeros(1, 5, 5).double()
    of_known[0, :n_known, :n_known] = expected[1 : 1 + n_known, 1 : 1 + n_known]
    (found,) = completed(of_known, classes, N_CLASSES)
    assert_close(found, expected)


def test_where_nothing_varies_nothing_is_completed(n_known):
    # A mean of what is known, relative to its variance, would be 0 / 0.
    zeros = torch.zeros(50, n_known, n_known)
    classes = drawn_classes(50, n_known)
    V = completed(zeros, classes, N_CLASSES)
    assert not V.any()


def with_fewer_known(n_known: int, scale: float = 1.0) -> Moments:
    """Draw moments of examples, the first of which need fewer contrasts than others."""
    classes = drawn_classes(50, n_known)
    classes[:20, 2:] = NO_CLASS
    is_known = classes[:, 1:] != NO_CLASS
    root = normal(50, n_known, 6, seed=2)
    covariance = scale * root @ root.mT
    both = is_known[:, :, None] & is_known[:, None, :]
    return Moments(
        f_mu=4 * normal(50, N_CLASSES, seed=3),
        covariance=torch.where(both, covariance, 0),
        classes=classes,
    )


@pytest.fixture(
    params=[1, 2, 5, ALL_CONTRASTS],
    ids="{} known at most".format,
)
def compared(request: pytest.FixtureRequest) -> Moments:
    """Moments by so many contrasts; by the last number of all classes."""
    return with_fewer_known(request.param)


def test_sums_by_groups_are_those_by_pairs(compared):
    of_all = Moments(compared.f_mu, compared.f_var)
    found = mean_field(compared)
    expected = mean_field(of_all)
    assert_close(found, expected)


def test_gradients_by_groups_are_those_by_pairs(compared):
    f_mu = compared.f_mu.requires_grad_()
    covariance = compared.covariance.requires_grad_()
    of_all = Moments(f_mu, compared.f_var)
    seed = normal(50, N_CLASSES, seed=4)
    found = torch.autograd.grad(mean_field(compared), (f_mu, covariance), seed)
    expected = torch.autograd.grad(mean_field(of_all), (f_mu, covariance), seed)
    assert_close(found, expected)


@pytest.mark.parametrize(("mean", "scale"), [(1e4, 0.0), (1e4, 1e12), (0.0, 1e30)])
def test_extreme_moments_by_groups_are_finite_as_by_pairs(mean, scale):
    moments = with_fewer_known(5, scale)
    f_mu = (mean * moments.f_mu).float()
    covariance = moments.covariance.float()
    f_mu.requires_grad_()
    covariance.requires_grad_()
    log_p = mean_field(Moments(f_mu, covariance, moments.classes))
    gradients = torch.autograd.grad(log_p[:, 1].sum(), (f_mu, covariance))
    for values in (log_p, *gradients):
        assert torch.isfinite(values).all()
    expected = mean_field(Moments(mean * moments.f_mu, moments.f_var))
    assert_close(log_p.double().exp(), expected.exp(), rtol=0.0, atol=1e-5)


def test_moments_of_differences_are_scaled_as_others_are():
    moments = with_fewer_known(5)
    scaled = moments.scaled(0.5)
    assert_close(scaled.f_mu, 0.5 * moments.f_mu)
    assert_close(scaled.f_var, 0.25 * moments.f_var)


# --- statistics and searches ----------------------------------------------------------


@pytest.fixture(
    params=[
        pytest.param(None, id="as needed"),
        pytest.param(3, id="three"),
    ]
)
def n_contrasts(request: pytest.FixtureRequest) -> int | None:
    return request.param


def statistics_of(
    la: Any,
    batches: Sequence[Batch],
    n_contrasts: int | None,
):
    """Compute statistics in float64, as predictions of batches are."""
    la.n_contrasts = n_contrasts
    return la.predictive_statistics(batches, dtype=torch.float64)


@pytest.mark.parametrize("prior", ["scalar", "layerwise"])
def test_statistics_of_contrasts_predict_as_a_batch_does(prior, n_contrasts):
    la = with_classes()
    batches = batches_of()
    statistics = statistics_of(la, batches, n_contrasts)
    la.prior_precision = some_precision(la, prior)
    moments = statistics.moments(la.prior_precision)
    found = la(moments, link_approx="mean_field")
    expected = by_mean_field(la, batches)
    assert_close(found, expected)


@pytest.fixture
def statistics(
    la: Any,
    n_contrasts: int | None,
):
    """Statistics of all texts, by so many contrasts."""
    return statistics_of(la, batches_of(), n_contrasts)


# Others than the first, in another order.
SOME_TEXTS = torch.tensor([5, 0])


@pytest.mark.parametrize("prior", ["scalar", "layerwise"])
def test_statistics_of_contrasts_can_be_divided(la, statistics, prior):
    prior_precision = some_precision(la, prior)
    _, f_var = statistics.moments(prior_precision)
    part = statistics[SOME_TEXTS]
    _, found = part.moments(prior_precision)
    assert_close(found, f_var[SOME_TEXTS])


@pytest.mark.parametrize("prior", ["scalar", "layerwise"])
def test_statistics_of_contrasts_can_be_joined(la, statistics, prior):
    prior_precision = some_precision(la, prior)
    _, f_var = statistics.moments(prior_precision)
    first = statistics[:4]
    second = statistics[4:]
    joined = join_statistics([first, second])
    _, found = joined.moments(prior_precision)
    assert_close(found, f_var)


def test_a_part_of_statistics_has_its_labels(statistics):
    part = statistics[SOME_TEXTS]
    labels = labels_of(batches_of())
    assert torch.equal(part.targets, labels[SOME_TEXTS])


def test_statistics_need_no_labels(la, statistics, n_contrasts):
    inputs = [without_labels(batch) for batch in batches_of()]
    unlabelled = statistics_of(la, inputs, n_contrasts)
    assert unlabelled.targets is None
    assert torch.equal(unlabelled.classes, statistics.classes)


@pytest.fixture
def unsure():
    """A posterior of sixty classes, whose model is so unsure that it needs them all."""
    return with_classes(n_classes=60, sure=1.0)


def test_statistics_take_as_many_numbers_as_there_are_contrasts(unsure):
    batches = batches_of(60)
    statistics = unsure.predictive_statistics(batches)
    spectrum = unsure.H.spectrum
    n_leading = len(spectrum.leading)
    n_remaining = len(spectrum.remaining)
    of_leading = statistics.projections
    of_remaining = statistics.inner_products
    assert of_leading.shape == (8, MOST, n_leading)
    assert of_remaining.shape == (8, n_remaining, MOST, MOST)
    assert statistics.classes.shape == (8, 1 + MOST)


def test_statistics_of_fewer_contrasts_take_fewer_numbers(unsure):
    batches = batches_of(60)
    unsure.n_contrasts = 2
    statistics = unsure.predictive_statistics(batches)
    spectrum = unsure.H.spectrum
    n_leading = len(spectrum.leading)
    of_leading = statistics.projections
    assert of_leading.shape == (8, 2, n_leading)


@pytest.mark.parametrize("n_classes", [3, 9])
def test_few_classes_are_all_known(n_classes):
    la = with_classes(n_classes, prior_precision=0.5)
    batch = first_batch(n_classes=n_classes)
    statistics = statistics_of(la, [batch], n_contrasts=None)
    assert statistics.classes is None
    exact = la.predictive_moments(batch)
    found = statistics.moments(0.5)
    assert_close(found.f_var, exact.f_var)


@pytest.mark.parametrize("n_classes", [3, 9])
def test_few_classes_are_predicted_exactly(n_classes):
    la = with_classes(n_classes, prior_precision=0.5)
    batch = first_batch(n_classes=n_classes)
    moments = la.predictive_moments(batch)
    log_p = mean_field(moments)
    found = by_mean_field(la, [batch])
    assert_close(found, log_p.exp())


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
) -> Tensor:
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


# Which prior is the best is not what these tests are about.
may_end_at_the_grids_edge = pytest.mark.filterwarnings(
    "ignore:The best prior precision of the grid"
)


@may_end_at_the_grids_edge
@pytest.mark.parametrize("method", ["gridsearch", "val_gd"])
# "probit" reads each logit by itself.
@pytest.mark.parametrize("link", ["mean_field", "mc", "probit"])
def test_searches_take_statistics_of_what_their_link_reads(
    others,
    link,
    method,
):
    la = with_classes()
    losses = searched(la, method, others, link)
    statistics = la.predictive_statistics(others, link_approx=link)
    of_statistics = searched(la, method, statistics, link)
    # Statistics are in float32 unless told otherwise.
    assert_close(losses, of_statistics, rtol=1e-5, atol=1e-5)


def test_statistics_of_all_outputs_name_no_classes(la, others):
    of_some = la.predictive_statistics(others)
    assert of_some.classes is not None
    for_probit = la.predictive_statistics(others, link_approx="probit")
    assert for_probit.classes is None
    la.n_contrasts = ALL_CONTRASTS
    of_all = la.predictive_statistics(others)
    assert of_all.classes is None


def test_a_searchs_losses_are_those_of_predictions(others):
    la = with_classes()
    losses = searched(la, "gridsearch", others, "mean_field")
    # The grid of `PRIORS_ALONE`.
    for point, prior in enumerate(torch.logspace(-2, 2, 7)):
        expected = validation_loss(
            la,
            prior,
            others,
            link_approx="mean_field",
        )
        found = losses[point].item()
        # The search's statistics are in float32.
        assert found == pytest.approx(expected, rel=1e-4)
    assert len(losses) == 7


# --- links that read each logit -------------------------------------------------------


@pytest.fixture
def of_differences(
    la: Any,
    others: list[Batch],
) -> Moments:
    """Moments that know differences of two logits alone."""
    statistics = la.predictive_statistics(others)
    return statistics.moments(1.0)


def test_parts_and_copies_of_moments_of_differences_are_no_other(of_differences):
    assert isinstance(of_differences, Moments)
    copy = of_differences.to(torch.float64)
    assert isinstance(copy, Moments)
    for part in of_differences.split(3):
        assert isinstance(part, Moments)


@pytest.mark.parametrize("link", EACH_LOGIT)
def test_a_link_that_reads_each_logit_refuses_differences(la, of_differences, link):
    with pytest.raises(ValueError, match='link_approx="probit"'):
        la(of_differences, link_approx=link)


def test_draws_without_correlations_refuse_differences(la, of_differences):
    with pytest.raises(ValueError, match='link_approx="probit"'):
        la(of_differences, link_approx="mc", diagonal_output=True)


@pytest.mark.parametrize("read", ["predictive_moments", "functional_samples"])
def test_logits_themselves_cannot_be_told_from_differences(la, of_differences, read):
    method = getattr(la, read)
    with pytest.raises(ValueError, match='link_approx="probit"'):
        method(of_differences)


@pytest.mark.parametrize("method", ["gridsearch", "val_gd"])
def test_a_search_by_a_link_that_reads_each_logit_refuses_differences(method, others):
    la = with_classes()
    statistics = la.predictive_statistics(others)
    message = r"'probit' reads each by itself.*link_approx='probit'"
    with pytest.raises(ValueError, match=message):
        searched(la, method, statistics, "probit")


def test_no_contrasts_are_refused(la, batch):
    la.n_contrasts = 0
    with pytest.raises(ValueError, match="n_contrasts must be at least 1"):
        la(batch, link_approx="mean_field")


def test_an_option_that_no_prediction_has_is_refused(la, batch):
    with pytest.raises(TypeError, match="n_contrast"):
        la(batch, link_approx="mean_field", n_contrast=2)


# --- agreement and mixtures -----------------------------------------------------------


def agreed(
    la: Any,
    data: Any,
) -> Tensor:
    """Choose the prior precision at which draws agree on the data."""
    la.optimize_prior_precision(
        method="agreement",
        train_loader=data,
    )
    return la.prior_precision.clone()


@may_end_at_the_grids_edge
def test_agreement_takes_contrasts():
    la = with_classes()
    batches = batches_of()
    by_texts = agreed(la, batches)
    statistics = la.predictive_statistics(batches)
    by_statistics = agreed(la, statistics)
    assert_close(by_statistics, by_texts)


@may_end_at_the_grids_edge
def test_guessed_covariances_move_an_agreement_little():
    la = with_classes()
    batches = batches_of()
    by_some = agreed(la, batches)
    exact = la.predictive_statistics(batches, link_approx="probit")
    by_all = agreed(la, exact)
    assert_close(by_all, by_some, rtol=0.1, atol=0.0)


@pytest.fixture
def mixture() -> LaplaceMixture:
    """Two posteriors of fourteen classes that differ in their priors."""
    return LaplaceMixture(
        [
            with_classes(),
            with_classes(prior_precision=3.0),
        ]
    )


def test_a_mixtures_statistics_of_contrasts_predict_as_batches_do(mixture, others):
    statistics = mixture.predictive_statistics(
        others,
        dtype=torch.float64,
    )
    moments = statistics.moments(2.0)
    found = mixture(moments, link_approx="mean_field")
    mixture.prior_precision = 2.0
    expected = by_mean_field(mixture, others)
    assert_close(found, expected)


@may_end_at_the_grids_edge
def test_a_mixture_searches_by_contrasts(mixture, others):
    history = mixture.optimize_prior_precision(
        val_loader=others,
        **PRIORS_ALONE,
    )
    tried = history.prior_precision[1]
    found = history.objective[1].item()
    expected = validation_loss(
        mixture,
        tried,
        others,
        link_approx="mean_field",
    )
    assert found == pytest.approx(expected, rel=1e-4)


def test_a_mixture_decides_by_contrasts(mixture, batch):
    for member in mixture.members:
        member.n_contrasts = 2
    prediction = mixture.predict(batch)
    found = prediction.probabilities
    assert found.shape == (3, N_CLASSES)
