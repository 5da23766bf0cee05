"""What holds of every posterior, whatever its weights and its task.

Each case is fitted, predicts, chooses its prior, is saved and mixed as dense formulas
of its Jacobians say, which are each example's alone. Nothing else changes.
"""

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from peft import load_peft_weights, set_peft_model_state_dict
from torch import Tensor
from torch.testing import assert_close

import laplace_lora_ext
from laplace_lora_ext import LaplaceMixture
from laplace_lora_ext.predictive.amortization import amortized_moments
from laplace_lora_ext.predictive.learnt_variance import log_variances
from tests.support.cases import LINKS, Case, Dense, assert_dense, assert_near, dense
from tests.support.dense import glm_covariance
from tests.support.matrices import CASES, LINEAR, SELECTIONS
from tests.support.posteriors import PRIORS_ALONE, generator
from tests.support.snapshots import Snapshot
from tests.support.tasks import IGNORED, OF_TARGETS

# Most of these models are warned of, since their examples take passes of their own.
pytestmark = pytest.mark.filterwarnings("ignore")

TARGETS = {name: task.case for name, task in OF_TARGETS.items()}
ADAPTERS = CASES | SELECTIONS
EVERYTHING = LINEAR | ADAPTERS | TARGETS
SAVED = ["LoRA of an encoder", *ADAPTERS, *TARGETS]
# Where a path of its own leads to what is asked.
SOME = ["LoRA of an encoder", "LoRA of an embedding", *TARGETS]
# More than noise says of the data, so that predictions are in doubt.
BROAD = torch.tensor([0.3])


def of_cases(names: Iterable[str]):
    """Ask this of some cases alone."""
    return pytest.mark.parametrize("fit", names, indirect=True, scope="module")


@pytest.fixture(scope="module", params=EVERYTHING)
def fit(request) -> Dense:
    """Return the dense calculus of a case."""
    return dense(EVERYTHING[request.param]())


@pytest.fixture(scope="module")
def before(fit) -> Snapshot:
    return Snapshot(fit.case.model)


@pytest.fixture(scope="module")
def fitted_once(fit, before):
    """Fit a posterior that tests of a case share."""
    return fit.case.fitted()


@pytest.fixture
def la(fitted_once):
    """Copy that posterior, at a prior precision that leaves it in doubt."""
    la = copy.copy(fitted_once)
    la.prior_precision = BROAD
    return la


def dense_posterior(fit: Dense, prior: Tensor = BROAD, structure: str = "lowrank_kron"):
    return fit.posterior(fit.curvature(structure), prior)


# --- the dense calculus ---------------------------------------------------------------


@pytest.mark.parametrize("structure", ["lowrank_kron", "full", "diag"])
def test_curvature_covariances_and_evidence_are_the_dense_ones(fit, structure):
    assert_dense(fit.case.fitted(structure), fit, fit.curvature(structure))


def predictions(la: Any, case: Case, link: str) -> list[Tensor]:
    """Predict what the loss reads of all batches."""
    found = [la(X, link_approx=link, fitting=True) for X in case.all_inputs()]
    columns = zip(*found, strict=True) if isinstance(found[0], tuple) else [found]
    return [torch.cat(column) for column in columns]


def test_predictions_and_their_mixtures_are_the_dense_ones(fit, la):
    case = fit.case
    other = copy.copy(la)
    other.prior_precision = 10 * BROAD
    mixture = LaplaceMixture([la, other])
    both = [dense_posterior(fit), dense_posterior(fit, 10 * BROAD)]
    for link in LINKS:
        of_each = [posterior.predictive(link) for posterior in both]
        expected = [*of_each[0], *case.target.mixed(of_each)]
        found = predictions(la, case, link) + predictions(mixture, case, link)
        for of_case, of_dense in zip(found, expected, strict=True):
            assert_near(of_case, of_dense, case.tolerance)


@of_cases(SOME)
def test_all_outputs_of_a_batch_have_the_dense_covariance(fit, la):
    X, *_ = fit.case.all_inputs()
    f_mu, covariance = la.predictive_moments(X, joint=True)
    n_outputs = fit.logits.shape[1]
    J = fit.jacobian[: len(f_mu) // n_outputs].flatten(0, 1)
    posterior = dense_posterior(fit)
    (expected,) = glm_covariance(J[None], posterior.H, posterior.prior)
    assert_near(covariance, expected, fit.case.tolerance)


@of_cases(SOME)
@pytest.mark.parametrize(
    ("structure", "link"), [("lowrank_kron", "mean_field"), ("diag", "probit")]
)
def test_a_search_chooses_by_the_losses_of_dense_predictions(fit, structure, link):
    la = fit.case.fitted(structure)
    history = la.optimize_prior_precision(
        method="gridsearch",
        val_loader=fit.case.batches,
        link_approx=link,
        prior_structure="scalar",
        **PRIORS_ALONE,
    )
    grid = torch.logspace(-2, 2, 7)
    losses = torch.stack(
        [dense_posterior(fit, prior[None], structure).nll(link) for prior in grid]
    )
    # Statistics are in float32.
    assert_close(history.objective.double(), losses, rtol=1e-5, atol=1e-5)
    # The mean of the logarithm, where each weighs its likelihood and its prior.
    log_weights = -len(fit.logits) * losses
    if not la.task.has_noise:
        trace = fit.curvature(structure).trace() / (la.n_data * la.n_outputs)
        log_weights -= ((grid / (300 * trace)).log10() / 1.5).square() / 2
    mean = log_weights.softmax(0) @ grid.double().log()
    chosen = grid[(grid.log() - mean).abs().argmin()]
    assert_close(la.prior_precision.float(), chosen[None])


# --- other ways to the same posterior -------------------------------------------------


@of_cases(SAVED)
def test_a_posterior_survives_a_file(fit, la, tmp_path):
    la.save_pretrained(tmp_path)
    read = laplace_lora_ext.from_pretrained(la.model.model, tmp_path)
    expected = predictions(la, fit.case, "probit")
    for again in (read, copy.deepcopy(la)):
        assert again.likelihood == la.likelihood
        found = predictions(again, fit.case, "probit")
        assert_close(found, expected, rtol=0, atol=0)
        evidence = again.log_marginal_likelihood()
        assert torch.equal(evidence, la.log_marginal_likelihood())


@of_cases(SAVED)
def test_draws_are_adapters(fit, la, tmp_path):
    la.prior_precision = 50.0
    batch = fit.case.batches[0]
    X = fit.case.inputs(batch)
    options = {"pred_type": "nn", "n_samples": 2}
    drawn = la.functional_samples(X, generator=generator(), **options)
    folders = la.sample_adapters(2, tmp_path, generator())
    for of_draw, folder in zip(drawn, folders, strict=True):
        model = copy.deepcopy(la.model.model)
        set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"))
        case = Case(**vars(fit.case) | {"model": model.double().eval()})
        of_file = torch.cat(
            [torch.atleast_2d(case.logits_of(model, x)) for x in case.split(batch)]
        )
        if of_draw.ndim == 3:  # of all tokens
            of_draw = of_draw[batch["labels"] != IGNORED]
        assert_close(of_draw, of_file, rtol=1e-6, atol=1e-6)
        # A draw that was the mean would agree with its file, too.
        assert (of_file - fit.logits[: len(of_file)]).abs().max() > 1e-7


@of_cases([name for name in TARGETS if name != "rewards"])
def test_learnt_variances_are_near_the_dense_ones(fit, la):
    learnt = la.amortize(fit.case.batches, unlabelled=None)
    found = [amortized_moments(la, X) for X in fit.case.all_inputs()]
    assert_close(torch.cat([each.f_mu for each in found]), fit.logits)
    exact = dense_posterior(fit).f_var
    f_var = torch.cat([each.f_var for each in found])
    error = log_variances(f_var) - log_variances(exact)
    # Ridge regression errs less where it has learnt than where an example is left out.
    assert error.abs().mean() < learnt.mean_error + 1e-12
    # Even these are far from what a single logarithm of 0 would make of the mean.
    assert learnt.mean_error < 1.5


@of_cases(SAVED)
def test_the_model_stays_as_it_was(fit, la, before):
    X, *_ = fit.case.all_inputs()
    la(X)
    la.functional_samples(X, pred_type="nn", n_samples=1)
    before.assert_equal(fit.case.model, random_state=False)
