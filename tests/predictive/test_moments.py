"""Gaussian logits: of many classes some are compared, and others guessed."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from laplace_lora_ext import Moments
from laplace_lora_ext.predictive.links import mean_field
from laplace_lora_ext.predictive.moments import (
    NO_CLASS,
    Contrasts,
    completed,
    gaussian_samples,
    square_root,
)
from laplace_lora_ext.predictive.posterior import moments_for
from tests.support.models import (
    first_batch,
    head_of,
    lora_model,
    ragged_batches,
    without_labels,
)
from tests.support.posteriors import fitted, generator, normal, priors_of_blocks

# More than the nine that are ever compared, so that some are guessed.
N_CLASSES = 14
ALL_CONTRASTS = N_CLASSES - 1


batches_of = partial(ragged_batches, n_classes=N_CLASSES)


def with_classes(**keywords: Any):
    """Fit a posterior of many classes; the head makes it sure of some texts."""
    model = lora_model("bert", n_labels=N_CLASSES)
    head_of(model).weight.data.mul_(80)
    return fitted(model=model, batches=batches_of(), **keywords)


@pytest.fixture
def la():
    """A posterior of fourteen classes, at a prior precision that leaves it unsure."""
    return with_classes(prior_precision=0.5)


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """The first batch of those that posteriors are fitted to."""
    return first_batch(n_classes=N_CLASSES)


def by_mean_field(la: Any, batches: Sequence[Any]) -> Tensor:
    return torch.cat([la(batch, link_approx="mean_field") for batch in batches])


# --- samples --------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1, 4])
def test_roots_and_samples_of_singular_covariances(rank):
    factor = normal(3, 4, rank)
    covariance = factor @ factor.mT
    roots = square_root(covariance)
    assert_close(roots @ roots, covariance)
    assert_close(roots, roots.mT)
    f_mu = normal(3, 4, seed=1)
    # Of each example, and what is drawn once for a whole batch.
    for n_noises in (3, 1):
        noise = normal(5, n_noises, 4, seed=2)
        samples = gaussian_samples(f_mu, covariance, noise)
        expected = f_mu + torch.einsum("sbk,bck->sbc", noise.expand(5, 3, 4), roots)
        assert_close(samples, expected)
    # So far from 0 that none of them changes the rank: gradients keep the null space,
    # as those of a prior precision do.
    scales = (normal(rank, seed=1).abs() + 0.5).requires_grad_()
    if rank:
        assert torch.autograd.gradcheck(
            lambda scales: square_root(factor * scales @ factor.mT), (scales,)
        )


# --- which classes --------------------------------------------------------------------


def classes_that_matter(logits: Tensor) -> list[list[int]]:
    """List the most probable class, then others until 0.001 is left."""
    chosen = []
    for row in logits:
        order = row.argsort(descending=True)
        # A temperature of 2 stands for how much a link may flatten.
        left = 1 - (row / 2).softmax(-1)[order].cumsum(0)
        # So many first classes leave too much.
        n_classes = 1 + max(int((left > 1e-3).sum()), 1)
        chosen.append(order[: min(n_classes, 9)].tolist())
    return chosen


def test_classes_are_compared_until_little_probability_is_left():
    # So large that some texts need one contrast, and some as many as there may be.
    logits = 8 * normal(200, N_CLASSES)
    expected = classes_that_matter(logits)
    assert {2, 9} < {len(classes) for classes in expected}
    rows = [classes + [-1] * (9 - len(classes)) for classes in expected]
    assert Contrasts().classes(logits).tolist() == rows
    # Few classes are all compared.
    assert (Contrasts().classes(logits[:, :9]) != NO_CLASS).all()
    # Texts that all need few have no passes for more.
    few = [text for text, classes in enumerate(expected) if len(classes) <= 4]
    directions = Contrasts().directions(logits[few])
    assert len(directions) == 3
    for text, (top, *known) in enumerate([expected[text] for text in few]):
        rows = torch.zeros(3, N_CLASSES).double()
        rows[range(len(known)), known] = 1
        rows[: len(known), top] = -1
        assert torch.equal(directions[:, text], rows)
    # Or as many as are asked for.
    order = logits.argsort(descending=True)
    for n_contrasts in (5, 100):
        found = Contrasts(n_contrasts).classes(logits)
        assert torch.equal(found, order[:, : 1 + n_contrasts])


# --- what is known, and what is guessed -----------------------------------------------


def drawn_classes(n: int, n_known: int) -> Tensor:
    """Draw a most probable class and others that are compared with it."""
    return normal(n, N_CLASSES, seed=1).argsort(1)[:, : 1 + n_known]


@pytest.mark.parametrize("n_known", [1, 2, 5])
def test_what_is_completed_is_a_covariance_of_classes_alike(n_known):
    root = normal(50, n_known, 6)
    known = root @ root.mT
    classes = drawn_classes(50, n_known)
    found = completed(known, classes, N_CLASSES)
    # Below 0 by rounding alone.
    assert torch.linalg.eigvalsh(found).min() > -1e-9
    variance = known.diagonal(dim1=1, dim2=2).mean(1)
    # Of one contrast nobody knows what it shares with others.
    shared = variance / 2
    if n_known > 1:
        shared = known[:, ~torch.eye(n_known).bool()].mean(1).clamp_min(0)
    for text, (top, *others) in enumerate(classes.tolist()):
        assert_close(found[text][others][:, others], known[text])
        assert not found[text, top].any()
        first, second, *_ = [c for c in range(N_CLASSES) if c not in (top, *others)]
        assert_close(found[text, first, first], variance[text])
        assert_close(found[text, first, second], shared[text])
    # Where nothing varies, a mean of what is known would be 0 / 0.
    assert not completed(0 * known, classes, N_CLASSES).any()


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


@pytest.mark.parametrize("n_known", [1, 5, ALL_CONTRASTS])
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
def test_extreme_moments_have_finite_logarithms_and_gradients(mean, scale):
    moments = with_fewer_known(5, scale)
    f_mu = (mean * moments.f_mu).float().requires_grad_()
    covariance = moments.covariance.float().requires_grad_()
    by_groups = Moments(f_mu, covariance, moments.classes)
    by_pairs = Moments(f_mu, by_groups.f_var)
    expected = mean_field(Moments(f_mu.double(), moments.f_var)).exp()
    for given in (by_groups, by_pairs):
        log_p = mean_field(given)
        assert_close(log_p.double().exp(), expected, rtol=0.0, atol=1e-5)
        of_one = log_p[:, 1].sum()
        gradients = torch.autograd.grad(of_one, (f_mu, covariance), retain_graph=True)
        for values in (log_p, *gradients):
            assert torch.isfinite(values).all()


# --- predictions ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("structure", "link"), [("lowrank_kron", "mc"), ("diag", "mean_field")]
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
    # Otherwise the equality would hold of any contrasts.
    la.n_contrasts = 1
    assert (predicted(batch) - exact).abs().max() > 1e-3


def test_known_contrasts_are_exact_in_any_batch(la):
    (together,) = batches_of(batch_size=8)
    f_mu, exact = la.predictive_moments(together)
    moments = moments_for(la, together, "mean_field")
    assert torch.equal(moments.f_mu, f_mu)
    directions = Contrasts().directions(f_mu)
    of_known = torch.einsum("kbc,bcd,lbd->bkl", directions, exact, directions)
    n = len(directions)
    assert_close(moments.covariance[:, :n, :n], of_known, rtol=0, atol=1e-9)
    # Texts need more contrasts beside each other than some of them do alone.
    assert len({len(classes) for classes in classes_that_matter(f_mu)}) > 2
    alone = by_mean_field(la, batches_of(batch_size=1))
    assert_close(by_mean_field(la, [together]), alone)


# --- statistics and searches ----------------------------------------------------------


@pytest.mark.parametrize(("n_contrasts", "n_priors"), [(None, None), (3, 1)])
def test_statistics_of_contrasts_predict_as_a_batch_does(la, n_contrasts, n_priors):
    batches = batches_of()
    la.n_contrasts = n_contrasts
    statistics = la.predictive_statistics(batches, dtype=torch.float64)
    n_kept = n_contrasts or 8
    assert statistics.projections.shape[1] == n_kept
    assert statistics.inner_products.shape[2:] == (n_kept, n_kept)
    la.prior_precision = prior_precision = priors_of_blocks(la)[:n_priors]
    moments = statistics.moments(prior_precision)
    found = la(moments, link_approx="mean_field")
    assert_close(found, by_mean_field(la, batches))
    unlabelled = la.predictive_statistics([without_labels(b) for b in batches])
    assert unlabelled.targets is None
    assert torch.equal(unlabelled.classes, statistics.classes)


# --- what differences can't tell ------------------------------------------------------


def test_logits_themselves_cannot_be_told_from_differences(la, batch):
    # Of texts that it is not fitted to.
    statistics = la.predictive_statistics(batches_of(seed=5))
    moments = statistics.moments(1.0)
    for read in (
        lambda: la(moments, link_approx="probit"),
        lambda: la(moments, link_approx="bridge"),
        lambda: la(moments, link_approx="mc", diagonal_output=True),
        lambda: la.predictive_moments(moments),
    ):
        with pytest.raises(ValueError, match='link_approx="probit"'):
            read()
    for method in ("gridsearch", "val_gd"):
        options: dict[str, Any] = {"method": method, "val_loader": statistics}
        with pytest.raises(ValueError, match="'probit' reads each by itself"):
            la.optimize_prior_precision(link_approx="probit", **options)
    # What all outputs tell serves every link.
    of_outputs = la.predictive_statistics(
        [batch], False, "cpu", torch.float64, "probit"
    )
    assert of_outputs.classes is None
    found = la(of_outputs.moments(0.5), link_approx="probit")
    assert_close(found, la(batch, link_approx="probit"))
