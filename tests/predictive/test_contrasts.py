"""With many classes, those that matter are compared, others guessed."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from laplace_lora_ext import LaplaceMixture, Moments
from laplace_lora_ext.predictive.links import mean_field
from laplace_lora_ext.predictive.moments import MOST, NO_CLASS, Contrasts, completed
from laplace_lora_ext.predictive.posterior import moments_for
from laplace_lora_ext.predictive.statistics import join_statistics
from tests.support.dense import labels_of
from tests.support.models import first_batch, lora_model, ragged_batches, without_labels
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

Batch = dict[str, Tensor]


def with_classes(n_classes: int = N_CLASSES, sure: float = 80.0, **keywords: Any):
    """Fit a posterior of many classes; the head makes it `sure` of some texts."""
    model = lora_model("bert", n_labels=n_classes)
    head = model.base_model.classifier.modules_to_save["default"]
    head.weight.data.mul_(sure)
    return fitted(model=model, batches=batches_of(n_classes), **keywords)


def batches_of(n_classes: int = N_CLASSES, **keywords: Any) -> list[Batch]:
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


def by_mean_field(la: Any, batches: Sequence[Any]) -> Tensor:
    return torch.cat([la(batch, link_approx="mean_field") for batch in batches])


def classes_that_matter(logits: Tensor) -> list[list[int]]:
    """List the most probable class, then others until 0.001 is left."""
    chosen = []
    for row in logits:
        order = row.argsort(descending=True)
        # A temperature of 2 stands for how much a link may flatten.
        left = 1 - (row / 2).softmax(-1)[order].cumsum(0)
        # So many first classes leave too much.
        n_classes = 1 + max(int((left > 1e-3).sum()), 1)
        chosen.append(order[: min(n_classes, 1 + MOST)].tolist())
    return chosen


def lengths_of(chosen: list[list[int]]) -> set[int]:
    return {len(classes) for classes in chosen}


# --- which classes --------------------------------------------------------------------


def test_classes_are_compared_until_little_probability_is_left():
    # So large that some texts need one contrast, and some as many as there may be.
    logits = 8 * normal(200, N_CLASSES)
    expected = classes_that_matter(logits)
    most = 1 + MOST
    assert {2, most} < lengths_of(expected)
    rows = [classes + [-1] * (most - len(classes)) for classes in expected]
    assert Contrasts().classes(logits).tolist() == rows
    # Texts that all need few have no columns for more.
    few = [text for text, classes in enumerate(expected) if len(classes) <= 4]
    assert Contrasts().classes(logits[few]).shape[1] == 4


@pytest.mark.parametrize("n_contrasts", [1, 5, ALL_CONTRASTS, 100])
def test_as_many_are_compared_as_are_asked_for(n_contrasts):
    logits = normal(5, N_CLASSES)
    expected = logits.argsort(descending=True)[:, : 1 + n_contrasts]
    assert torch.equal(Contrasts(n_contrasts).classes(logits), expected)


# --- predictions ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("structure", "link"),
    [("lowrank_kron", "mean_field"), ("lowrank_kron", "mc"), ("diag", "mean_field")],
)
def test_all_contrasts_are_exact(structure, link, batch):
    la = with_classes(structure=structure, prior_precision=0.5)

    def predicted(inputs: Any) -> Tensor:
        return la(inputs, link_approx=link, n_samples=50, generator=generator())

    exact = predicted(la.predictive_moments(batch))
    la.n_contrasts = 50  # more than there are
    assert_close(predicted(batch), exact)
    decided = la.predict(batch, link, generator=generator(), n_samples=50)
    assert_close(decided.probabilities, exact)
    if link == "mean_field":  # `predict_proba` takes no generator
        assert_close(torch.from_numpy(la.predict_proba(batch)), exact)
    # Otherwise the equality would hold of any contrasts.
    la.n_contrasts = 1
    assert (predicted(batch) - exact).abs().max() > 1e-3


def test_known_contrasts_are_exact_and_others_alike(la):
    for batch in batches_of():
        f_mu, exact = la.predictive_moments(batch)
        moments = moments_for(la, batch, "mean_field")
        assert torch.equal(moments.f_mu, f_mu)
        for text, classes in enumerate(classes_that_matter(f_mu)):
            assert_known_exact_and_others_alike(
                moments.f_var[text], exact[text], classes
            )


def of_differences_from(f_var: Tensor, top: int) -> Tensor:
    """Compute covariances `(C, C)` of all logits' differences from one of them."""
    with_top = f_var[top]
    return f_var - with_top[:, None] - with_top + with_top[top]


def off_diagonal(matrix: Tensor) -> Tensor:
    return matrix[~torch.eye(len(matrix)).bool()]


def assert_known_exact_and_others_alike(
    f_var: Tensor, exact: Tensor, classes: list[int]
) -> None:
    """Compare a text's covariance `(C, C)` with the exact one."""
    top, *known = classes
    found = of_differences_from(f_var, top)
    of_known = of_differences_from(exact, top)[known][:, known]
    assert_close(found[known][:, known], of_known, rtol=0, atol=1e-9)
    variance = of_known.diagonal().mean()
    # Of one contrast nobody knows what it shares with others.
    shared = off_diagonal(of_known).mean() if len(known) > 1 else variance / 2
    assert 0 < shared < variance
    others = [c for c in range(N_CLASSES) if c not in classes]
    # The row of the most probable class is 0: these are covariances of contrasts.
    of_others = f_var[others][:, others]
    for numbers, expected in [
        (found.diagonal()[others], variance),
        (off_diagonal(of_others), shared),
    ]:
        assert_close(numbers, expected.expand_as(numbers), rtol=1e-6, atol=0)


def test_a_prediction_does_not_depend_on_the_other_texts_of_a_batch(la):
    (together,) = batches_of(batch_size=8)
    # Texts need more contrasts beside each other than some of them do alone.
    assert len(lengths_of(classes_that_matter(la.model(together)))) > 2
    alone = by_mean_field(la, batches_of(batch_size=1))
    assert_close(by_mean_field(la, [together]), alone)


def drawn_classes(n: int, n_known: int) -> Tensor:
    """Draw a most probable class and others that are compared with it."""
    return normal(n, N_CLASSES, seed=1).argsort(1)[:, : 1 + n_known]


@pytest.mark.parametrize("n_known", [1, 2, 5])
def test_what_is_completed_is_a_covariance(n_known):
    root = normal(50, n_known, 6)
    classes = drawn_classes(50, n_known)
    eigenvalues = torch.linalg.eigvalsh(completed(root @ root.mT, classes, N_CLASSES))
    # Below 0 by rounding alone.
    assert eigenvalues.min() > -1e-9
    # Where nothing varies, a mean of what is known would be 0 / 0.
    nothing = completed(torch.zeros(50, n_known, n_known), classes, N_CLASSES)
    assert not nothing.any()


@pytest.mark.parametrize("n_known", [2, 5])
def test_contrasts_that_are_all_alike_are_completed_exactly(n_known):
    expected = 0.7 + 1.3 * torch.eye(N_CLASSES).double()
    classes = torch.arange(6)[None]
    # Where one needs fewer than others.
    classes[:, 1 + n_known :] = NO_CLASS
    expected[0] = expected[:, 0] = 0  # the most probable class
    of_known = torch.zeros(1, 5, 5).double()
    of_known[0, :n_known, :n_known] = expected[1 : 1 + n_known, 1 : 1 + n_known]
    (found,) = completed(of_known, classes, N_CLASSES)
    assert_close(found, expected)


def with_fewer_known(n_known: int, scale: float = 1.0) -> Moments:
    """Draw moments of examples, the first of which need fewer contrasts than others."""
    classes = drawn_classes(50, n_known)
    classes[:20, 2:] = NO_CLASS
    is_known = classes[:, 1:] != NO_CLASS
    root = normal(50, n_known, 6, seed=2)
    both = is_known[:, :, None] & is_known[:, None, :]
    return Moments(
        f_mu=4 * normal(50, N_CLASSES, seed=3),
        covariance=torch.where(both, scale * root @ root.mT, 0),
        classes=classes,
    )


@pytest.mark.parametrize("n_known", [1, 2, 5, ALL_CONTRASTS])
def test_sums_by_groups_are_those_by_pairs(n_known):
    moments = with_fewer_known(n_known)
    given = moments.f_mu.requires_grad_(), moments.covariance.requires_grad_()
    seed = normal(50, N_CLASSES, seed=4)
    results = []
    for each in (moments, Moments(moments.f_mu, moments.f_var)):
        log_p = mean_field(each)
        results.append((log_p, *torch.autograd.grad(log_p, given, seed)))
    by_groups, by_pairs = results
    assert_close(by_groups, by_pairs)


@pytest.mark.parametrize(("mean", "scale"), [(1e4, 0.0), (1e4, 1e12), (0.0, 1e30)])
def test_extreme_moments_by_groups_are_finite_as_by_pairs(mean, scale):
    moments = with_fewer_known(5, scale)
    f_mu = (mean * moments.f_mu).float().requires_grad_()
    covariance = moments.covariance.float().requires_grad_()
    log_p = mean_field(Moments(f_mu, covariance, moments.classes))
    gradients = torch.autograd.grad(log_p[:, 1].sum(), (f_mu, covariance))
    for values in (log_p, *gradients):
        assert torch.isfinite(values).all()
    expected = mean_field(Moments(mean * moments.f_mu, moments.f_var))
    assert_close(log_p.double().exp(), expected.exp(), rtol=0.0, atol=1e-5)


def test_moments_of_differences_stay_such_and_are_scaled_as_others_are():
    moments = with_fewer_known(5)
    scaled = moments.scaled(0.5)
    assert_close(scaled.f_mu, 0.5 * moments.f_mu)
    assert_close(scaled.f_var, 0.25 * moments.f_var)
    for other in (scaled, moments.to(torch.float32), *moments.split(3)):
        assert other.classes is not None


# --- statistics -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_contrasts", "prior"), [(None, "layerwise"), (3, "layerwise"), (None, "scalar")]
)
def test_statistics_of_contrasts_predict_as_a_batch_does(la, n_contrasts, prior):
    batches = batches_of()
    la.n_contrasts = n_contrasts
    statistics = la.predictive_statistics(batches, dtype=torch.float64)
    la.prior_precision = prior_precision = some_precision(la, prior)
    moments = statistics.moments(prior_precision)
    found = la(moments, link_approx="mean_field")
    assert_close(found, by_mean_field(la, batches))
    # Others than the first, in another order.
    some = torch.tensor([5, 0])
    part = statistics[some]
    assert_close(part.moments(prior_precision).f_var, moments.f_var[some])
    assert torch.equal(part.targets, labels_of(batches)[some])
    joined = join_statistics([statistics[:4], statistics[4:]])
    assert_close(joined.moments(prior_precision).f_var, moments.f_var)
    unlabelled = la.predictive_statistics([without_labels(b) for b in batches])
    assert unlabelled.targets is None
    assert torch.equal(unlabelled.classes, statistics.classes)


def test_statistics_take_as_many_numbers_as_there_are_contrasts():
    # So unsure that it needs all of its classes.
    unsure = with_classes(n_classes=60, sure=1.0)
    n_leading = unsure.H.spectrum.n_leading
    n_remaining = len(unsure.H.spectrum.values) - n_leading
    for n_contrasts, most in [(None, MOST), (2, 2)]:
        unsure.n_contrasts = n_contrasts
        statistics = unsure.predictive_statistics(batches_of(60))
        assert statistics.projections.shape == (8, most, n_leading)
        assert statistics.inner_products.shape == (8, n_remaining, most, most)
        assert statistics.classes.shape == (8, 1 + most)


def test_few_classes_are_all_known():
    la = with_classes(9, prior_precision=0.5)
    batch = first_batch(n_classes=9)
    exact = la.predictive_moments(batch)
    assert_close(by_mean_field(la, [batch]), mean_field(exact).exp())
    assert la.predictive_statistics([batch]).classes is None


def test_statistics_of_all_contrasts_name_no_classes_and_serve_every_link(la, batch):
    assert la.predictive_statistics([batch]).classes is not None
    of_outputs = la.predictive_statistics([batch], link_approx="probit")
    assert of_outputs.classes is None
    la.n_contrasts = ALL_CONTRASTS
    statistics = la.predictive_statistics([batch], dtype=torch.float64)
    assert statistics.classes is None
    moments = statistics.moments(0.5)
    assert_close(moments.f_var, la.predictive_moments(batch).f_var)
    found = la(moments, link_approx="probit")
    assert_close(found, la(batch, link_approx="probit"))


# --- searches -------------------------------------------------------------------------

# Which prior is the best is not what these tests are about.
may_end_at_the_grids_edge = pytest.mark.filterwarnings(
    "ignore:The best prior precision of the grid"
)


def searched(la: Any, method: str, val_loader: Any, link: str) -> Tensor:
    """Search with a method, and return the losses."""
    options: dict[str, Any] = PRIORS_ALONE
    if method == "val_gd":
        options = {"n_steps": 20, "generator": generator()}
    # "mc" of a grid draws its noise from the global generator.
    torch.manual_seed(0)
    history = la.optimize_prior_precision(
        method=method, val_loader=val_loader, link_approx=link, **options
    )
    return history.objective


@may_end_at_the_grids_edge
@pytest.mark.parametrize(
    ("method", "link"),
    [
        ("gridsearch", "mean_field"),
        ("gridsearch", "mc"),
        ("gridsearch", "probit"),  # which reads each logit by itself
        ("val_gd", "mean_field"),
        ("val_gd", "probit"),
    ],
)
def test_searches_take_statistics_of_what_their_link_reads(others, link, method):
    la = with_classes()
    losses = searched(la, method, others, link)
    statistics = la.predictive_statistics(others, link_approx=link)
    # Statistics are in float32 unless told otherwise.
    of_statistics = searched(la, method, statistics, link)
    assert_close(losses, of_statistics, rtol=1e-5, atol=1e-5)


def test_a_searchs_losses_are_those_of_predictions(others):
    la = with_classes()
    found = searched(la, "gridsearch", others, "mean_field").tolist()
    # The grid of `PRIORS_ALONE`.
    expected = [
        validation_loss(la, prior, others, link_approx="mean_field")
        for prior in torch.logspace(-2, 2, 7)
    ]
    # The search's statistics are in float32.
    assert found == pytest.approx(expected, rel=1e-4)


# --- what differences can't tell ------------------------------------------------------


@pytest.mark.parametrize(
    "read",
    [
        lambda la, moments: la(moments, link_approx="probit"),
        lambda la, moments: la(moments, link_approx="bridge"),
        lambda la, moments: la(moments, link_approx="bridge_norm"),
        lambda la, moments: la(moments, link_approx="mc", diagonal_output=True),
        lambda la, moments: la.predictive_moments(moments),
        lambda la, moments: la.functional_samples(moments),
    ],
)
def test_logits_themselves_cannot_be_told_from_differences(la, others, read):
    of_differences = la.predictive_statistics(others).moments(1.0)
    with pytest.raises(ValueError, match='link_approx="probit"'):
        read(la, of_differences)


@pytest.mark.parametrize("method", ["gridsearch", "val_gd"])
def test_a_search_by_a_link_that_reads_each_logit_refuses_differences(
    la, method, others
):
    statistics = la.predictive_statistics(others)
    message = r"'probit' reads each by itself.*link_approx='probit'"
    with pytest.raises(ValueError, match=message):
        searched(la, method, statistics, "probit")


def test_no_contrasts_and_unknown_options_are_refused(la, batch):
    with pytest.raises(TypeError, match="n_contrast"):
        la(batch, link_approx="mean_field", n_contrast=2)
    la.n_contrasts = 0
    with pytest.raises(ValueError, match="n_contrasts must be at least 1"):
        la(batch, link_approx="mean_field")


# --- agreement and mixtures -----------------------------------------------------------


@may_end_at_the_grids_edge
def test_agreement_takes_contrasts_and_guessed_covariances_move_it_little():
    la = with_classes()
    batches = batches_of()

    def agreed(data: Any) -> Tensor:
        la.optimize_prior_precision(method="agreement", train_loader=data)
        return la.prior_precision.clone()

    by_texts = agreed(batches)
    assert_close(agreed(la.predictive_statistics(batches)), by_texts)
    exact = la.predictive_statistics(batches, link_approx="probit")
    assert_close(agreed(exact), by_texts, rtol=0.1, atol=0.0)


@may_end_at_the_grids_edge
def test_a_mixture_predicts_searches_and_decides_by_contrasts(others, batch):
    mixture = LaplaceMixture([with_classes(), with_classes(prior_precision=3.0)])
    statistics = mixture.predictive_statistics(others, dtype=torch.float64)
    found = mixture(statistics.moments(2.0), link_approx="mean_field")
    mixture.prior_precision = 2.0
    assert_close(found, by_mean_field(mixture, others))
    history = mixture.optimize_prior_precision(val_loader=others, **PRIORS_ALONE)
    tried = history.prior_precision[1]
    expected = validation_loss(mixture, tried, others, link_approx="mean_field")
    assert history.objective[1].item() == pytest.approx(expected, rel=1e-4)
    for member in mixture.members:
        member.n_contrasts = 2
    assert mixture.predict(batch).probabilities.shape == (3, N_CLASSES)
